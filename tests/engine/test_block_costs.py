# SPDX-License-Identifier: Apache-2.0
"""Costs of blocks, beside torch's own counter and a forward pass with values."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled
from torch.autograd.graph import saved_tensors_hooks

from ipufit import ConfigError, DataError, IPUConfig, UnsupportedError
from ipufit.model.costs import block_costs
from tests.strategies import examples


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.conv2(torch.relu(self.norm(self.conv1(x))))
        return self.head(self.up(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.cells = kind(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cells(self.embedding(x))[0][:, -1])


IMAGES = torch.zeros(2, 3, 8, 8)
MODULES = {
    "residual": (Residual, [IMAGES]),
    "gru": (lambda: Recurrent(nn.GRU), [torch.zeros(2, 4, dtype=torch.int64)]),
    "lstm": (lambda: Recurrent(nn.LSTM), [torch.zeros(2, 4, dtype=torch.int64)]),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2
        ),
        [torch.zeros(2, 5, 16)],
    ),
    "attention": (
        lambda: nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True),
        [torch.zeros(2, 5, 16), torch.zeros(2, 3, 16)],
    ),
}


@contextlib.contextmanager
def without_mkldnn():
    before = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    yield
    _set_mkldnn_enabled(before)


def names(costs):
    return [cost.name for cost in costs]


def total(costs, field):
    return sum(getattr(cost, field) for cost in costs)


def by_torch(module, tensors):
    """The floating-point operations that torch's own counter counts."""
    if importlib.util.find_spec("torch.utils.flop_counter") is None:
        pytest.skip("torch 2.1 is the first with a counter")
    counter = importlib.import_module("torch.utils.flop_counter")
    with counter.FlopCounterMode(display=False) as mode:
        module(*tensors)
    return mode.get_total_flops()


@pytest.mark.parametrize("name", ["residual", "gru", "lstm"])
def test_operations_are_those_of_torchs_counter(name):
    make, tensors = MODULES[name]
    module = make()
    with without_mkldnn():  # torch doesn't count its LSTM
        expected = by_torch(module, tensors)
    assert total(block_costs(module, tensors), "flops") == expected > 0


def test_a_layer_of_a_transformer_has_the_operations_of_its_formula():
    make, tensors = MODULES["transformer"]
    batch, length, width = tensors[0].shape
    products = 2 * batch * length * (4 * width**2 + 2 * width * 32)
    attention = 2 * 2 * batch * length**2 * width
    assert total(block_costs(make(), tensors), "flops") == 2 * (products + attention)


def test_recurrent_layers_have_the_operations_of_their_formula():
    make, tensors = MODULES["lstm"]
    costs = {cost.name: cost for cost in block_costs(make(), tensors)}
    steps = tensors[0].numel()
    assert costs["cells"].flops == 2 * steps * 4 * 5 * (6 + 5 + 5 + 5)
    assert {cost.uncounted for cost in costs.values()} == {()}


@pytest.mark.parametrize("name", MODULES)
def test_saved_activations_are_those_that_torch_saves(name):
    make, tensors = MODULES[name]
    module = make().train()
    weights = {one.untyped_storage().data_ptr() for one in module.parameters()}
    weights |= {one.untyped_storage().data_ptr() for one in module.buffers()}
    saved = {}
    kept = []  # no storage may be taken for another

    def save(tensor):
        storage = tensor.untyped_storage()
        kept.append(storage)
        if storage.data_ptr() not in weights:
            width = tensor.element_size()
            count = storage.nbytes() // width
            saved[storage.data_ptr()] = count * min(4, width)
        return tensor

    costs = block_costs(module, tensors)
    with saved_tensors_hooks(save, lambda one: one), without_mkldnn():
        module(*tensors)
    saved.pop(0, None)
    assert total(costs, "saved_bytes") == sum(saved.values()) > 0


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_counted_once(name):
    make, tensors = MODULES[name]
    module = make()
    costs = block_costs(module, tensors)
    parameters = list(module.parameters())
    assert total(costs, "parameters") == sum(p.numel() for p in parameters)
    assert total(costs, "parameter_bytes") == 4 * total(costs, "trained_parameters")
    used = {name for cost in costs for name in cost.weights}
    assert used == {name for name, _ in module.named_parameters()}


def test_nothing_changes_and_no_random_number_is_drawn():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    before = {name: one.clone() for name, one in module.state_dict().items()}
    state = torch.get_rng_state()
    block_costs(module, [torch.ones(5, 3)])
    assert torch.equal(torch.get_rng_state(), state)
    for name, one in module.state_dict().items():
        assert torch.equal(one, before[name])
    assert not module.training
    assert not any(child._forward_pre_hooks for child in module.modules())


class Crosswise(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Tanh())
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.body(x * 2))


def test_blocks_are_in_the_order_of_their_calls_and_have_the_outermost_name():
    costs = block_costs(Crosswise(), [torch.zeros(2, 4)])
    assert names(costs) == ["body", "body.0.1", "body.1", "last"]
    assert total(costs, "parameters") == 40


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 4)
        self.head.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)


def test_a_submodule_that_is_called_several_times_begins_no_block():
    first, head = block_costs(Shared(), [torch.zeros(2, 4)])
    assert (first.name, head.name) == ("first", "head")
    assert first.flops == 4 * head.flops == 4 * 2 * 2 * 16
    assert first.weights[:2] == ("first.weight", "first.bias")
    assert head.weights == ("first.weight", "head.bias")
    assert (first.parameters, head.parameters) == (16 + 4 + 20, 4)


def test_what_crosses_are_all_tensors_that_a_later_block_needs():
    costs = {cost.name: cost for cost in block_costs(Residual(), [IMAGES])}
    image = 2 * 8 * 8 * 8 * 4
    assert costs["stem"].output_bytes == image
    assert costs["conv1"].output_bytes == 2 * image  # and what skips the convolution
    assert costs["conv2"].output_bytes == image
    assert costs["head"].output_bytes == 0


def test_an_early_output_crosses_to_the_end():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return (x := self.a(x)), self.b(x.sum(1, keepdim=True).expand(-1, 4))

    a, _ = block_costs(Early(), [torch.zeros(2, 4)])
    assert a.output_bytes == 2 * 4 * 4 + 2 * 4  # the output, and the sums


@settings(max_examples=examples(40), deadline=None)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    rows=st.integers(1, 5),
)
def test_costs_of_a_chain_of_layers(widths, rows):
    pairs = list(zip(widths, widths[1:]))
    module = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in pairs))
    costs = block_costs(module, [torch.zeros(rows, widths[0])])
    crossing = [4 * rows * width for width in widths[1:-1]]
    assert [cost.flops for cost in costs] == [2 * rows * i * o for i, o in pairs]
    assert [cost.parameters for cost in costs] == [i * o for i, o in pairs]
    assert [cost.output_bytes for cost in costs] == [*crossing, 0]


def test_a_frozen_layer_has_nothing_that_is_trained():
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    first, last = block_costs(module, [torch.zeros(2, 4)])
    assert (first.parameters, first.trained_parameters) == (20, 0)
    assert last.trained_parameters == 10
    assert first.saved_bytes == 0


@pytest.mark.parametrize(
    ("precision", "weights", "activations"), [("16.16", 2, 2), ("16.32", 4, 2)]
)
def test_bytes_are_those_of_the_precision(precision, weights, activations):
    config = IPUConfig(precision=precision)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    if weights == 2:
        module.half()  # as an IPUModel does it
    first, _ = block_costs(module, [torch.zeros(3, 4)], config)
    assert first.parameter_bytes == weights * 40
    assert first.output_bytes == activations * 3 * 8


def test_a_costly_operator_without_a_formula_is_named():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Bilinear(4, 4, 2)

        def forward(self, x):
            return self.mix(x, torch.fft.fft(x).real)

    (cost,) = block_costs(Spectrum(), [torch.zeros(2, 4)])
    assert "aten::_trilinear" in cost.uncounted
    assert any("fft" in name for name in cost.uncounted)


def test_a_module_without_submodules_is_one_block():
    (cost,) = block_costs(nn.Linear(4, 2), [torch.zeros(3, 4)])
    assert (cost.name, cost.flops) == ("", 48)


def test_a_module_that_is_larger_than_memory_can_be_measured():
    with_shapes = nn.Linear(1, 1)
    with_shapes.weight = nn.Parameter(torch.zeros(1).expand(10**6, 10**6))
    with_shapes.bias = None
    (cost,) = block_costs(with_shapes, [torch.zeros(1).expand(10**6, 10**6)])
    assert cost.parameters == 10**12
    assert cost.flops == 2 * 10**18


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="failed with inputs"):
        block_costs(nn.Sequential(nn.Linear(4, 2)), [torch.zeros(3, 5)])


def test_no_number_on_a_device_has_64_bits():
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Embedding(5, 2), nn.Embedding(5, 2)

        def forward(self, x):
            return self.first(x) + self.second(x)

    first, _ = block_costs(Indices(), [torch.zeros(3, dtype=torch.int64)])
    assert first.output_bytes == 3 * 4 + 3 * 2 * 4  # indices, and what was looked up
    assert first.saved_bytes == 3 * 4


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (lambda x: x * x.sum().item(), "x.sum().item()"),
        (lambda x: x if x.sum() > 0 else -x, "x if x.sum()"),
        (lambda x: x[x > 0], "x[x > 0]"),
        (lambda x: torch.unique(x), "torch.unique(x)"),
        (lambda x: x * len(x.numpy()), "x.numpy()"),
        (lambda x: x * len(f"{x.mean():.3f}"), "x.mean():.3f"),
    ],
)
def test_where_code_needs_values_is_said(forward, line):
    module = nn.Module()
    module.forward = forward
    with pytest.raises(UnsupportedError, match="computes with values") as caught:
        block_costs(module, [torch.ones(3, 4)])
    assert "test_block_costs.py:" in str(caught.value)
    assert line in str(caught.value)


class Drawn(nn.Module):
    """The draw of a variational autoencoder."""

    def forward(self, x):
        mean, spread = x.chunk(2, 1)
        return torch.distributions.Normal(mean, spread.exp()).rsample()


def test_distributions_take_arguments_without_values():
    before = torch.distributions.Distribution._validate_args
    first, second = block_costs(
        nn.Sequential(nn.Linear(4, 4), Drawn()), [torch.zeros(3, 4)]
    )
    assert (first.name, second.name) == ("0", "1")
    assert first.output_bytes == 3 * 4 * 4
    assert torch.distributions.Distribution._validate_args is before


def test_a_module_that_cannot_be_copied_is_refused():
    module = nn.Linear(4, 2)
    module.generator = iter([1])
    module.lock = (one for one in [1])
    with pytest.raises(ConfigError, match="can't be copied"):
        block_costs(module, [torch.zeros(3, 4)])
