# SPDX-License-Identifier: Apache-2.0
"""What is recorded when `forward` runs once, and what can't be."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import ipufit.emulator as poptorch
from tests.emulator._models import (
    Function,
    Linear,
    Marked,
    X,
    assert_device_equals_host,
    assert_same,
    wrap,
)

F = nn.functional


INDEX = torch.tensor([2, 0])


def in_place(m, x):
    y = x * 2
    y += 1
    y[0] = 0
    y[:, 1] += 5
    y[y < 0] = 7
    y[INDEX.tolist()] *= 3
    view = y[1]
    view.add_(100)
    y.view(-1)[3] = 9
    return y, view, y.sum()


def out_argument(m, x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return y


def creation(m, x):
    bias = torch.tensor([1.0, 2.0, 3.0])
    bias += x[0, :3]  # a constant that is changed must not stay changed
    return (
        x + torch.arange(6),
        x + torch.zeros(6, device=x.device),
        x.new_ones(6) + x,
        bias * 1,
        torch.eye(4, device=x.device) @ x,
        torch.where(x > 0, 1.0, 0.0),
        torch.full_like(x, 3.0) * x,
    )


FUNCTIONS = {
    "in-place": in_place,
    "out": out_argument,
    "creation": creation,
    "operators": lambda m, x: (
        2 * x,
        2 - x,
        1 / (x + 9),
        x**2,
        2**x,
        -x,
        x // 2,
        ~(x > 0),
    ),
    "int index": lambda m, x: (x[0], x[-1], x[0, 1], x[(0, 1)]),
    "slices": lambda m, x: (x[1:3], x[..., 2], x[:, 1:5:2], x[None], x[:, None, 1:4]),
    "list index": lambda m, x: (x[[0, 2]], x[:, [1, 3]]),
    "tensor index": lambda m, x: x[torch.tensor([1, 0])],
    "array index": lambda m, x: (x[np.array([1, 0])], x[np.int64(2)]),
    "views": lambda m, x: (
        x.T,
        x.mT,
        x.reshape(2, -1),
        x.t().contiguous(),
        x.flatten(),
        x.unflatten(1, (2, 3)),
    ),
    "data": lambda m, x: x.data * 2,
    "iteration": lambda m, x: [row * 2 for row in x],
    "lists of tensors": lambda m, x: (torch.cat([x, x]), torch.stack((x, x), 1)),
    "types": lambda m, x: (x.double() + 1, x.long(), x.bool(), x.half(), x.to(x.dtype)),
    "shapes": lambda m, x: x.reshape(x.shape[0], x.size(1) // 2, 2) * x.numel(),
    "scatter": lambda m, x: x.scatter(1, torch.zeros(4, 1, dtype=torch.long), 5.0),
    "new of a size": lambda m, x: (
        x.new(x.size()).fill_(2) + x,
        x.new(torch.Size([])).fill_(2),
    ),
    "numpy scalar": lambda m, x: x * np.float32(2.0),
    "no values": lambda m, x: x.sum() * 0 + x.dim() + int(x.requires_grad),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_replayed(name):
    assert_device_equals_host(Function(FUNCTIONS[name]), X)


def make_modules():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    return {
        "linear": nn.Linear(6, 3),
        "sequence": nn.Sequential(
            nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Softmax(-1)
        ),
        "list": Function(
            lambda m, x: sum(layer(x) for layer in m.layers),
            layers=nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)]),
        ),
        "parameter dict": Function(
            lambda m, x: x * m.weights["a b"] + m.weights["a-b"],
            weights=nn.ParameterDict(
                {"a b": nn.Parameter(torch.ones(6)), "a-b": nn.Parameter(torch.ones(6))}
            ),
        ),
        "lstm": nn.LSTM(6, 5, batch_first=True),
        "gru": nn.GRU(6, 5),
        "lstm cell": nn.LSTMCell(6, 5),
        "attention": Function(lambda m, x: m.attend(x, x, x), attend=attention),
        "attention in eval": Function(
            lambda m, x: m.attend(x, x, x, need_weights=False), attend=attention
        ).eval(),
        "encoder layer": encoder,
        "encoder in eval": nn.TransformerEncoder(
            encoder, 2, enable_nested_tensor=False
        ).eval(),
        "norms": nn.Sequential(nn.LayerNorm(6), nn.PReLU(), nn.Dropout(0.5)).eval(),
        "weight norm": Function(
            lambda m, x: m.layer(x),
            layer=parametrizations.orthogonal(nn.Linear(6, 6)),
        ),
        "parametrized": Function(lambda m, x: m.layer(x), layer=make_symmetric()),
        "sliced weight": Function(
            lambda m, x: x @ m.layer.weight.T + m.layer.weight[0].mean(),
            layer=nn.Linear(6, 3),
        ),
    }


def test_an_encoder_computes_padded_positions_as_on_a_device():
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    with_path, without = (
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=way).eval()
        for way in (True, False)
    )
    without.load_state_dict(with_path.state_dict())
    x, padding = torch.randn(4, 5, 6), torch.arange(5).expand(4, 5) > 2
    model = poptorch.inferenceModel(
        Function(
            lambda m, x, mask: m.layer(x, src_key_padding_mask=mask), layer=with_path
        ).eval()
    )
    expected = without(x, src_key_padding_mask=padding).detach()
    assert expected[:, 3:].abs().min() > 0
    torch.testing.assert_close(model(x, padding), expected)


LATER = nn.Transformer.generate_square_subsequent_mask(5)
MASKED = {
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True), 1
    ),
    "decoder": lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(6, 2, 12, 0.0, batch_first=True), 1
    ),
    "both": lambda: nn.Transformer(6, 2, 1, 1, 12, 0.0, batch_first=True),
}
CALLS = {
    "encoder": lambda m, x: m.layers(x, mask=m.later),
    "decoder": lambda m, x: m.layers(x, x, tgt_mask=m.later),
    "both": lambda m, x: m.layers(x, x, src_mask=m.later, tgt_mask=m.later),
}


@pytest.mark.parametrize("name", MASKED)
def test_torch_s_stacks_take_causal_masks_as_they_are(name):
    torch.manual_seed(0)
    module = Function(CALLS[name], layers=MASKED[name]())
    module.register_buffer("later", LATER.clone())
    x = torch.randn(4, 5, 6)
    expected = module(x).detach()  # in train mode: without torch's fast path
    result = poptorch.inferenceModel(module)(x)
    torch.testing.assert_close(result, expected)


def make_symmetric():
    def forward(self, x):
        return (x + x.T) / 2

    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Function(forward))
    return layer


@pytest.mark.parametrize("name", make_modules())
def test_modules_are_replayed(name):
    module = make_modules()[name]
    needs_time = any(word in name for word in ("lstm", "gru", "attention", "encoder"))
    needs_time = needs_time and name != "lstm cell"
    assert_device_equals_host(module, X[None] if needs_time else X)


def test_weights_with_names_that_look_alike_are_kept_apart():
    class Alike(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Module()
            self.a.b_c = nn.Parameter(torch.tensor([1.0]))
            self.a_b = nn.Module()
            self.a_b.c = nn.Parameter(torch.tensor([10.0]))

        def forward(self, x):
            return x * self.a.b_c + self.a_b.c

    assert_device_equals_host(Alike(), torch.ones(1))


# Python runs once -------------------------------------------------------------


def test_python_runs_once():
    def forward(self, x):
        self.runs += 1
        return x * self.factor, self.runs

    model = Function(forward, runs=0, factor=2.0)
    executor = poptorch.inferenceModel(model)
    assert executor(torch.ones(1))[1] == 1
    model.factor = 100.0
    out, runs = executor(torch.ones(1))
    assert out.item() == 2
    assert runs == 1


def test_hooks_run_once_and_what_they_return_is_recorded():
    seen = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *call: seen.append("hook") or call[2] * 10)
    layer.register_forward_pre_hook(lambda *call: seen.append("pre"))
    executor = poptorch.inferenceModel(nn.Sequential(layer))
    outs = [executor(torch.ones(1, 2)) for _ in range(2)]
    assert seen == ["pre", "hook"]
    expected = 10 * F.linear(torch.ones(1, 2), layer.weight, layer.bias)
    assert_same(outs[1], expected)


# Gradients --------------------------------------------------------------------


def grad_enabled_again(layer, x):
    with torch.no_grad():
        frozen = layer(x)
        with torch.enable_grad():
            free = layer(x)
    return frozen + free


@torch.no_grad()
def frozen_layer(layer, x):
    return layer(x)


GRADIENTS = {
    "enable_grad": grad_enabled_again,
    "decorated": lambda layer, x: frozen_layer(layer, x) + layer(x),
    "in place": lambda layer, x: layer(x).mul_(2).add_(x),
    "mask": lambda layer, x: torch.where(x > 0, layer(x), torch.zeros(6)),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "setitem": lambda layer, x: _set_row(layer(x), layer),
}


def _set_row(y, layer):
    y = y * 1
    y[0] = layer.bias * 2
    return y


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_host(name):
    by_hand = Linear(GRADIENTS[name])
    sgd = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    model = Marked(GRADIENTS[name])
    _, executor = wrap(model, lr=0.1)
    for factor in (1, 2):
        sgd.zero_grad()
        by_hand(X * factor).backward()
        sgd.step()
        executor(X * factor)
    before = Linear(None).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, by_hand.state_dict()[key])
        assert not torch.equal(value, before[key])


def test_no_warning_is_lost_or_added():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        poptorch.inferenceModel(nn.Linear(6, 2))(X)
    assert caught == []


def test_statistics_are_returned_as_they_were_before_their_update():
    """PopTorch's own `half_test.py::test_buffers`: to the device they are an input of
    `batch_norm`, whose schema says nothing of an update."""

    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2, momentum=1.0)
            self.norm.running_mean.fill_(3.0)

        def forward(self, x):
            y = self.norm(x)
            loss = poptorch.identity_loss(y, "mean")
            return loss, self.norm.running_mean, self.norm.running_var

    model = Statistics()
    executor = poptorch.trainingModel(model)
    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    _, *before = executor(x)
    assert [t.tolist() for t in before] == [[3, 3], [1, 1]]
    _, *after = executor(x)
    assert [t.tolist() for t in after] == [[2, 4], [2, 8]]
