# SPDX-License-Identifier: Apache-2.0
"""Costs of stages, beside a run on the host that saves tensors for backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ipufit import ConfigError, IPUConfig, IPUModel, poptorch
from ipufit.model.costs import device_bytes, stage_costs
from ipufit.optimizers import weight_states

CLASSES = 5


def convolutions():
    parts = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    parts += [nn.Conv2d(4, 6, 3, stride=2), nn.GELU(), nn.Dropout(0.1), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(6 * 3 * 3, CLASSES)), torch.zeros(
        4, 3, 16, 16
    )


def dense():
    parts = [nn.Linear(12, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 16)]
    return nn.Sequential(*parts, nn.SiLU(), nn.Linear(16, CLASSES)), torch.zeros(6, 12)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def residual():
    parts = [nn.Conv2d(3, 4, 3), Residual(4), Residual(4), nn.AdaptiveAvgPool2d(1)]
    parts += [nn.Flatten(), nn.Linear(4, CLASSES)]
    return nn.Sequential(*parts), torch.zeros(2, 3, 10, 10)


def transformer():
    layers = [
        nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True) for _ in "ab"
    ]
    parts = [nn.Embedding(40, 16), *layers, nn.LayerNorm(16), nn.Linear(16, CLASSES)]
    return nn.Sequential(*parts), torch.zeros(3, 7, dtype=torch.int64)


class Last(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


def recurrent():
    parts = [nn.Embedding(20, 8), Last(nn.LSTM(8, 12, 2, batch_first=True))]
    return nn.Sequential(*parts, nn.Linear(12, CLASSES)), torch.zeros(4, 6).long()


MODELS = [convolutions, dense, residual, transformer, recurrent]
models = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


@contextlib.contextmanager
def saved_on_the_host(module):
    """The storages that torch saves meanwhile, without those of weights."""
    own = [*module.parameters(), *module.buffers()]
    weights = {weight.untyped_storage().data_ptr() for weight in own}
    held = {}

    def pack(tensor):
        where = tensor.untyped_storage().data_ptr()
        if where not in weights:
            held[where] = tensor  # held, so that nothing else gets its place
        return tensor

    # The processor's library saves a workspace for recurrent layers, which IPUs lack.
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield held
    finally:
        torch.backends.mkldnn.set_flags(before)


def num_bytes(tensors):
    """Bytes of whole storages, where no number has more than 32 bits."""
    total = 0
    for tensor in tensors:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        total += count * device_bytes(tensor.dtype)
    return total


def costs_of(module, x, **config):
    return stage_costs(module, [x], IPUConfig(**config), {}, lambda m, t: m(*t))


@models
def test_saved_bytes_are_those_that_torch_saves(make):
    module, x = make()
    cost = costs_of(module, x)
    with saved_on_the_host(module) as held:
        output = module(x)
    assert [stage.saved_bytes for stage in cost.stages] == [num_bytes(held.values())]
    assert cost.output_bytes == num_bytes([output])
    (stage,) = cost.stages
    assert stage.input_bytes <= stage.made_bytes
    assert stage.saved_bytes <= stage.made_bytes
    assert stage.input_bytes == num_bytes([x])


@models
def test_each_stage_saves_what_its_part_saves(make):
    module, x = make()
    names = [name for name, _ in module.named_children()]
    cut = len(names) // 2
    stages = [names[:cut], names[cut:]]
    cost = costs_of(module, x, pipeline=stages)
    saved, given, sizes = [], x, []
    for part in (module[:cut], module[cut:]):
        sizes.append(num_bytes([given]))
        with saved_on_the_host(part) as held:
            output = part(given)
        saved.append(num_bytes(held.values()))
        given = output.detach().requires_grad_()
    assert [stage.saved_bytes for stage in cost.stages] == saved
    assert [stage.input_bytes for stage in cost.stages] == sizes
    assert [stage.ipu for stage in cost.stages] == [0, 1]


@models
def test_recomputation_keeps_what_checkpoints_keep(make):
    module, x = make()
    names = [name for name, _ in module.named_children()]
    cost = costs_of(module, x, recompute=names)
    with saved_on_the_host(module) as held:
        given = x
        for child in module:
            if given.requires_grad:
                given = checkpoint(child, given, use_reentrant=True)
            else:  # integers have no gradient, and reentrant checkpoints need one
                given = child(given)
                held.clear()
                held[x.untyped_storage().data_ptr()] = x
    (stage,) = cost.stages
    # A checkpoint holds the inputs of a part; ours also keeps the last output.
    assert stage.kept_bytes == num_bytes(held.values()) + num_bytes([given])
    assert stage.num_kept == len(names)


@models
def test_parameters_and_buffers_are_all_counted_once(make):
    module, x = make()
    half = [name for name, _ in module.named_children()][1:]
    cost = costs_of(module, x, pipeline=["0", half])
    weights = [weight for stage in cost.stages for weight in stage.weights]
    assert [weight.name for weight in weights] == [
        n for n, _ in module.named_parameters()
    ]
    assert sum(weight.num_bytes for weight in weights) == num_bytes(module.parameters())
    counted = [b for b in module.buffers() if b.dim()]  # of batches nobody counts
    assert sum(s.buffer_bytes for s in cost.stages) >= num_bytes(counted)
    assert not cost.unused
    assert not cost.shared


@models
def test_states_and_sums_are_those_of_the_optimizer(make):
    module, x = make()
    model = IPUModel(module, IPUConfig(micro_batch_size=1))
    model.compile("adamw", "cross_entropy")
    states = weight_states(model.optimizer, module.parameters())
    cost = stage_costs(module, [x], model.config, states, lambda m, t: m(*t))
    (stage,) = cost.stages
    count = sum(parameter.numel() for parameter in module.parameters())
    num_weights = len(stage.weights)
    state = sum(one.num_bytes for weight in stage.weights for one in weight.state)
    assert state == 8 * count + 4 * num_weights
    assert sum(weight.accumulator_bytes for weight in stage.weights) == 4 * count
    assert sum(weight.gradient_bytes for weight in stage.weights) == 4 * count


@models
def test_in_float16_all_is_half_as_large(make):
    module, x = make()
    wide = costs_of(module, x).stages[0]
    halved = IPUModel(module, IPUConfig(precision="16.16"))
    config = IPUConfig(precision="16.16")
    cost = stage_costs(halved.module, [x], config, {}, lambda m, t: m(*t))
    (stage,) = cost.stages
    assert stage.parameter_bytes * 2 == wide.parameter_bytes
    assert stage.saved_bytes < 0.75 * wide.saved_bytes


class Own(nn.Module):
    """A module that begins its blocks itself, and uses a weight in two of them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        with poptorch.Block("body", ipu_id=0):
            x = self.body(self.table(x))
        with poptorch.Block("head", ipu_id=1):
            return x @ self.table.weight.T


def test_blocks_of_forward_are_stages_and_shared_weights_are_the_first_ones():
    cost = costs_of(Own(), torch.zeros(2, 3, dtype=torch.int64))
    first, second = cost.stages
    assert [weight.name for weight in first.weights] == [
        "table.weight",
        "body.weight",
        "body.bias",
    ]
    assert second.weights == ()
    assert cost.shared == ("table.weight",)
    assert cost.unused == ("spare.weight", "spare.bias")
    assert second.flops == 2 * 2 * 3 * 4 * 10


def test_a_skip_connection_over_a_cut_is_an_input_of_the_later_stage():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            return x + self.b(torch.relu(self.a(x)))

    cost = costs_of(Skip(), torch.zeros(2, 4), pipeline=["a", "b"])
    assert [stage.input_bytes for stage in cost.stages] == [32, 48 + 32]


def test_stages_that_only_own_options_know_are_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for name, layer in module.named_children():
        poptorch.BeginBlock(layer, name)
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.PipelinedExecution("0", "1"))
    with pytest.raises(ConfigError, match="block '0', and training_options"):
        costs_of(module, torch.zeros(2, 4), training_options=options)


class Positions(nn.Module):
    """Has tensors that are neither parameters nor buffers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.table = torch.arange(8.0).reshape(2, 4)
        self.masks = {"first": [torch.ones(4)]}

    def forward(self, x):
        return self.head((x + self.table) * self.masks["first"][0])


def test_tensors_as_plain_attributes_are_copied_and_are_no_inputs():
    module = Positions()
    (stage,) = costs_of(module, torch.zeros(2, 4)).stages
    assert stage.input_bytes == stage.kept_bytes == 32  # x alone
    assert torch.equal(module.table, torch.arange(8.0).reshape(2, 4))


def test_nothing_changes():
    module, x = convolutions()
    module[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    module.eval()
    costs_of(module, x, pipeline=["0", "4"])
    assert torch.equal(state, torch.get_rng_state())
    assert not any(part.training for part in module.modules())
    assert not any(part._forward_pre_hooks for part in module.modules())
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not module[0].weight.requires_grad
