# SPDX-License-Identifier: Apache-2.0
"""Half precision: which type comes out, how it is rounded, what is written back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import ipufit.emulator as poptorch
from tests.emulator._models import Function, run, wrap
from tests.strategies import examples

HALF, SINGLE = torch.float16, torch.float32


# Types ------------------------------------------------------------------------


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "conv2d": (lambda: nn.Conv2d(3, 2, 3), (1, 3, 5, 5)),
    "layer_norm": (lambda: nn.LayerNorm(4), (2, 4)),
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


# In place ---------------------------------------------------------------------


def test_changes_in_place_reach_views_and_buffers():
    def forward(self, x):
        self.total += x
        self.total[0].mul_(2)
        return self.total * 1

    model = Function(forward, buffers={"total": torch.zeros(2, dtype=HALF)})
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
    _, reference = wrap(single, lr=0.05)
    _, half = wrap(mixed, lr=0.05)
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


MANY = 150_000  # more than one chunk


def rounding_model(seed=0):
    options = poptorch.Options().randomSeed(seed)
    options.Precision.enableStochasticRounding(True)
    return poptorch.inferenceModel(Function(lambda self, x: x.half()), options)


def rounded(x, seed=0):
    return rounding_model(seed)(x)


def all_halves():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(HALF)


def neighbours(value):
    """The float16 numbers around a float32 one; equal if it is one itself."""
    number = torch.tensor(value).item()  # as float32
    halves = all_halves().double()
    halves = halves[halves.isfinite()]
    return (
        halves[halves <= number].max().item(),
        halves[halves >= number].min().item(),
    )


def test_what_float16_holds_stays_as_it_is():
    halves = all_halves()
    is_number = ~halves.isnan()
    model = rounding_model()
    for _ in range(3):
        result = model(halves.float())
        assert torch.equal(result[is_number].float(), halves[is_number].float())
        assert result[~is_number].isnan().all()


def test_zeros_get_no_sign():
    assert not torch.signbit(rounded(torch.zeros(1000)).float()).any()


SPREAD = [1.0001, -3.00037, 2047.3, -60001.0, 0.33333]
SMALL = [2.0**-14 * 1.3001, 5e-5, -(2.0**-15) * 1.0003, -3e-7, 1e-8, 2.0**-25, 1e-10]


@pytest.mark.parametrize("value", SPREAD + SMALL)
def test_the_upper_neighbour_comes_as_often_as_it_is_near(value):
    low, high = neighbours(value)
    results = rounded(torch.full((MANY,), value)).double()
    assert bool(((results == low) | (results == high)).all())
    share = (torch.tensor(value).item() - low) / (high - low)
    ups = (results == high).sum().item()
    assert abs(ups - share * MANY) <= 5 * math.sqrt(MANY * share * (1 - share)) + 40


@given(st.floats(-65504, 65504, width=32), st.integers(0, 2**32))
@settings(max_examples=examples(25), deadline=None)
def test_a_neighbour_comes_out(value, seed):
    low, high = neighbours(value)
    results = rounded(torch.full((40,), value), seed).double()
    assert bool(((results == low) | (results == high)).all())


@pytest.mark.parametrize(
    ("count", "value", "times"),
    [(5000, 1.0 + 0.3 * 2.0**-10, 60), (MANY, 5.3 * 2.0**-24, 30)],
)
def test_means_spread_as_those_of_independent_roundings(count, value, times):
    low, high = neighbours(value)
    share = (torch.tensor(value).item() - low) / (high - low)
    x, model = torch.full((count,), value), rounding_model(1)
    shares = torch.tensor(
        [(model(x).double().mean().item() - low) / (high - low) for _ in range(times)]
    )
    expected = math.sqrt(share * (1 - share) / count)
    assert abs(shares.mean().item() - share) < 5 * expected / math.sqrt(times) + 2e-4
    assert shares.std().item() == pytest.approx(expected, rel=0.3)


def test_values_near_the_largest_may_become_infinite():
    results = rounded(torch.full((4000,), -65520.0)).float()
    assert set(results.tolist()) == {-65504.0, -math.inf}
    assert 1700 < results.isinf().sum() < 2300
    assert rounded(torch.tensor([65536.0, 1e30])).isinf().all()


@pytest.mark.parametrize("count", [1, 7, 8192, 8193, 65537, 131_072, 131_073])
def test_every_element_is_rounded(count):
    x = torch.linspace(-3, 3, count)
    result = rounded(x)
    assert result.shape == x.shape
    assert bool(((result.float() - x).abs() < 2.0**-9).all())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:, :, ::2],
        lambda x: x[:, 1:2].expand(2, 3, 4, 5),
        lambda x: x.sum(),
    ],
)
def test_tensors_of_any_layout_are_rounded(view):
    options = poptorch.Options().randomSeed(0)
    options.Precision.enableStochasticRounding(True)
    model = poptorch.inferenceModel(
        Function(lambda self, x: view(x).half() * 1), options
    )
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x).float(), view(x), rtol=2e-3, atol=1e-6)


class Line(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=HALF))

    def forward(self, factor):
        return poptorch.identity_loss(self.weight * factor, reduction="sum")


@pytest.mark.parametrize("size", [400, 40_000])
def test_gradients_are_rounded_at_random(size):
    options = poptorch.Options().randomSeed(2)
    options.Precision.enableStochasticRounding(True)
    options.anchorTensor("gradient", "Gradient___weight")
    line = Line(size)
    _, training = wrap(line, options, lr=0.0)
    training(torch.full((size,), 1.0001))
    gradient = training.getAnchoredTensor("gradient").float()
    assert set(gradient.tolist()) == {1.0, 1.0009765625}
    assert gradient.mean().item() == pytest.approx(1.0001, abs=1e-4)


def small_steps(*, is_stochastic):
    """A weight of 1 that is to lose 2e-4 in each of 40 updates."""

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x, reduction="sum")

    options = poptorch.Options().deviceIterations(40).randomSeed(3)
    options.Precision.enableStochasticRounding(is_stochastic)
    model = Function(forward, weight=nn.Parameter(torch.ones(64, dtype=HALF)))
    sgd = poptorch.optim.SGD(model.parameters(), lr=2e-4)
    training = poptorch.trainingModel(model, options, sgd)
    training(torch.ones(40 * 64, dtype=HALF))
    return model.weight.float()


def test_small_updates_survive_with_stochastic_rounding_only():
    assert torch.equal(small_steps(is_stochastic=False), torch.ones(64))
    mean = small_steps(is_stochastic=True).mean().item()
    assert mean == pytest.approx(0.992, abs=0.001)


def test_stochastic_rounding_repeats_with_the_seed_and_leaves_the_host_alone():
    first = small_steps(is_stochastic=True)
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    options = poptorch.Options()
    options.Precision.enableStochasticRounding(True)
    model = poptorch.inferenceModel(Function(lambda self, x: x * x), options)
    model(torch.ones(5, dtype=HALF) * 1.001)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(small_steps(is_stochastic=True), first)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 3).half()

    def forward(self, x):
        loss = (self.layer(x).float() ** 2).mean()
        return loss, poptorch.identity_loss(loss, reduction="none")


def trained(iterations):
    options = poptorch.Options().deviceIterations(iterations).randomSeed(7)
    options.Precision.enableStochasticRounding(True)
    model = Layer()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options, optimizer)
    for rows in (
        torch.linspace(-1, 1, 24 * 8).reshape(24, 8).half().split(4 * iterations)
    ):
        executor(rows)
    executor.destroy()
    return model.layer.weight.detach().clone()


def test_runs_repeat_however_many_updates_a_call_makes():
    first = trained(1)
    assert torch.equal(trained(1), first)
    assert torch.equal(trained(6), first)


# What calls say of themselves -------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda y: torch.nn.functional.relu(y, inplace=True),
        lambda y: torch.nn.functional.leaky_relu(y, 0.5, inplace=True),
        lambda y: torch.nn.ReLU6(inplace=True)(y),
        lambda y: y.hsplit(2)[0].fill_(7.0),
        lambda y: y.adjoint().mul_(2.0),
        lambda y: y.swapaxes_(0, 1),
        lambda y: y.swapdims_(0, 1),
        lambda y: y.transpose_(0, 1),
        lambda y: y.unsqueeze_(1),
        lambda y: y.resize_(2, 3),
        lambda y: y.as_strided_((2, 2), (2, 1)),
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
