# SPDX-License-Identifier: Apache-2.0
"""Half precision: which type comes out, how it is rounded, what is written back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import ipufit.emulator as poptorch
from ipufit.emulator._tracing.half import in_float32, original, rounding, to_half
from ipufit.emulator._tracing.operation import Operation

HALF, SINGLE = torch.float16, torch.float32


class Apply(nn.Module):
    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            self.register_buffer(name, weight)

    def forward(self, *args):
        return self.function(self, *args)


def run(function, *args, **weights):
    return poptorch.inferenceModel(Apply(lambda self, *a: function(*a), **weights))(
        *args
    )


# Types ------------------------------------------------------------------------


@pytest.mark.parametrize("first", [HALF, SINGLE])
@pytest.mark.parametrize("second", [HALF, SINGLE])
def test_mixed_operands_are_promoted_as_in_torch(first, second):
    x, y = torch.ones(3, dtype=first), torch.ones(3, dtype=second)
    assert run(torch.add, x, y).dtype == (x + y).dtype
    assert run(torch.add, x, y.sum()).dtype == (x + y.sum()).dtype


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 2, 1), (2, 4, 5)),
    "conv2d": (lambda: nn.Conv2d(3, 2, 3), (1, 3, 5, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 2, 3), (1, 3, 5, 5)),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "batch_norm": (lambda: nn.BatchNorm1d(4), (2, 4)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 1, 4)),
    "gru": (lambda: nn.GRU(4, 3), (5, 1, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("of_input", [HALF, SINGLE])
@pytest.mark.parametrize("of_weights", [HALF, SINGLE])
def test_layers_give_the_type_of_their_input(name, of_input, of_weights):
    if name in ("lstm", "gru") and of_input != of_weights:
        pytest.skip("newer versions of torch.nn refuse it")
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(shape)
    expected = layer(x)
    result = poptorch.inferenceModel(layer.to(of_weights))(x.to(of_input))
    for got, wanted in zip(
        result if isinstance(result, tuple) else [result],
        expected if isinstance(expected, tuple) else [expected],
    ):
        if isinstance(got, torch.Tensor):
            assert got.dtype == of_input
            torch.testing.assert_close(got.float(), wanted, atol=5e-3, rtol=5e-3)


def test_a_type_that_is_asked_for_comes_out():
    x = torch.ones(2, 3, dtype=HALF)
    assert run(lambda t: torch.softmax(t, 1, dtype=SINGLE), x).dtype == SINGLE
    assert run(lambda t: t.sum(dtype=SINGLE), x).dtype == SINGLE
    assert run(lambda t: torch.softmax(t, 1, dtype=HALF), x).dtype == HALF


# Values -----------------------------------------------------------------------


@given(st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=20))
def test_results_are_those_of_float32_rounded_once(values):
    x = torch.tensor(values, dtype=HALF)
    wide = x.float()
    for function in (torch.sin, torch.sigmoid, lambda t: t * t, torch.sum):
        assert torch.equal(run(function, x), function(wide).half())


def test_products_are_added_up_in_float32():
    ones = torch.ones(1, 4096, dtype=HALF)
    assert run(torch.matmul, ones, ones.T + 0.5).item() == 6144


def test_calls_without_half_are_recorded_as_they_are():
    x = torch.ones(2)
    for unchanged in (
        Operation(torch.sin, "sin", (x,), {}),
        Operation(torch.Tensor.view, "view", (x.half(), 2), {}),
    ):
        assert in_float32(unchanged).function is unchanged.function
    wrapped = in_float32(Operation(torch.sin, "sin", (x.half(),), {})).function
    assert wrapped is not torch.sin
    assert original(wrapped) is torch.sin


# In place ---------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{"p": 0.0}, {"p": 0.5, "training": False}])
def test_dropout_that_drops_nothing_is_recorded_as_it_is(kwargs):
    x = torch.randn(3).half()
    operation = Operation(nn.functional.dropout, "dropout", (x,), kwargs)
    assert in_float32(operation) is operation
    assert torch.equal(operation.run(), x)


def test_changes_in_place_reach_views_and_buffers():
    def forward(self, x):
        self.total += x
        self.total[0].mul_(2)
        return self.total * 1

    model = Apply(forward, total=torch.zeros(2, dtype=HALF))
    inference = poptorch.inferenceModel(model)
    assert inference(torch.ones(2, dtype=HALF)).tolist() == [2, 1]
    assert inference(torch.ones(2, dtype=HALF)).tolist() == [6, 2]
    inference.copyWeightsToHost()
    assert model.total.tolist() == [6, 2]


def test_running_statistics_are_updated_in_either_type():
    x = torch.randn(8, 3)
    for dtype in (HALF, SINGLE):
        norm, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        norm.running_mean, norm.running_var = (
            t.to(dtype) for t in (norm.running_mean, norm.running_var)
        )
        inference = poptorch.inferenceModel(norm)
        inference(x.half())
        inference.copyWeightsToHost()
        plain(x.half().float())
        for name in ("running_mean", "running_var"):
            got = getattr(norm, name)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.float(), getattr(plain, name), atol=2e-3, rtol=2e-3
            )


# Training ---------------------------------------------------------------------


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x, y):
        return mse_loss(self.layer(x), y)


@pytest.mark.parametrize("of_weights", [HALF, SINGLE])
def test_training_in_half_follows_training_in_single(of_weights):
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    single, mixed = Regression(), Regression().to(of_weights)
    reference = poptorch.trainingModel(
        single, optimizer=poptorch.optim.SGD(single.parameters(), lr=0.05)
    )
    half = poptorch.trainingModel(
        mixed, optimizer=poptorch.optim.SGD(mixed.parameters(), lr=0.05)
    )
    for _ in range(10):
        expected = reference(x, y)
        loss = half(x.half(), y.half())
    assert loss.dtype == HALF
    torch.testing.assert_close(loss.float(), expected, atol=2e-2, rtol=2e-2)
    assert mixed.layer.weight.dtype == of_weights
    torch.testing.assert_close(
        mixed.layer.weight.detach().float(),
        single.layer.weight.detach(),
        atol=1e-2,
        rtol=1e-2,
    )


# Stochastic rounding ----------------------------------------------------------


@given(
    st.floats(-60000, 60000, width=32),
)
def test_stochastic_rounding_gives_a_neighbour(value):
    x = torch.full((50,), value)
    with rounding(is_stochastic=True):
        rounded = to_half(x).float()
    step = max(2.0**-24, 2.0 ** (torch.tensor(value).abs().log2().floor().item() - 10))
    assert (rounded - x).abs().max() <= step
    assert rounded.unique().numel() <= 2
    if float(torch.tensor(value).half()) == torch.tensor(value):
        assert torch.equal(rounded, x)


@pytest.mark.parametrize("value", [1.0001, -3.00037, 2.0**-15 * 1.0003, 0.9999999])
def test_stochastic_rounding_is_unbiased(value):
    torch.manual_seed(0)
    x = torch.full((20000,), value)
    with rounding(is_stochastic=True):
        rounded = to_half(x).float()
    spread = rounded.std() / 20000**0.5
    assert abs(rounded.double().mean() - x[0].double()) < 5 * spread + 1e-9


def test_stochastic_rounding_keeps_what_is_not_finite():
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 65504.0])
    with rounding(is_stochastic=True):
        rounded = to_half(x)
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert rounded[2].isnan()
    assert rounded[3] == 65504


def small_steps(*, is_stochastic):
    """A weight of 1 that is to lose 1e-4 in each of 400 updates."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, dtype=HALF))

        def forward(self, x):
            return poptorch.identity_loss(self.weight * x, reduction="sum")

    options = poptorch.Options().deviceIterations(400).randomSeed(3)
    options.Precision.enableStochasticRounding(is_stochastic)
    model = Model()
    sgd = poptorch.optim.SGD(model.parameters(), lr=1e-4)
    training = poptorch.trainingModel(model, options, sgd)
    training(torch.ones(400 * 64, dtype=HALF))
    return model.weight.float()


def test_small_updates_survive_with_stochastic_rounding_only():
    assert torch.equal(small_steps(is_stochastic=False), torch.ones(64))
    mean = small_steps(is_stochastic=True).mean().item()
    assert mean == pytest.approx(0.96, abs=0.004)


def test_stochastic_rounding_repeats_with_the_seed_and_leaves_the_host_alone():
    first = small_steps(is_stochastic=True)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    options = poptorch.Options()
    options.Precision.enableStochasticRounding(True)
    model = poptorch.inferenceModel(Apply(lambda self, x: x * x), options)
    model(torch.ones(5, dtype=HALF) * 1.001)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(small_steps(is_stochastic=True), first)


# What calls say of themselves -------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.nn.functional.relu(y, inplace=True),
        lambda y: torch.nn.functional.leaky_relu(y, 0.5, inplace=True),
        lambda y: torch.nn.ReLU6(inplace=True)(y),
        lambda y: y.hsplit(2)[0].fill_(7.0),
        lambda y: y.adjoint().mul_(2.0),
    ],
)
def test_what_a_function_writes_is_seen_through_other_names(function):
    def forward(x):
        y = x * 1
        result = function(y)
        return y, result

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for got, expected in zip(run(forward, x.half()), forward(x.half().float())):
        torch.testing.assert_close(got.float(), expected, atol=2e-3, rtol=2e-3)


def test_a_type_may_be_given_by_position():
    x = torch.ones(2, 3, dtype=HALF)
    assert run(lambda t: torch.softmax(t, 1, SINGLE), x).dtype == SINGLE
    assert run(lambda t: t.softmax(1, HALF), x).dtype == HALF
    assert run(lambda t: t * t.element_size(), x).tolist() == [[2.0] * 3] * 2


def test_refusals_know_half_precision():
    with pytest.raises(poptorch.Error, match="triu"):
        run(lambda t: torch.triu(t * 1), torch.ones(3, 3, dtype=HALF))
    mask = run(
        lambda t: t + torch.triu(torch.ones_like(t)), torch.zeros(3, 3, dtype=HALF)
    )
    assert torch.equal(mask.float(), torch.ones(3, 3).triu())
