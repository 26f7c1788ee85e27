# SPDX-License-Identifier: Apache-2.0
"""Training on the device against plain loops of torch, and what runs per call."""

# ruff: noqa: N803 - D, G, R and B are the letters of the user guide
import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import MeanReductionStrategy, ReductionType, optim
from tests.emulator._models import Function, make_options, wrap
from tests.strategies import examples

pytestmark = pytest.mark.looped

CALLS = 3
small = st.integers(1, 3)
quick = settings(max_examples=examples(25))


class Network(nn.Module):
    """Regression with its loss inside; parameters of three shapes."""

    def __init__(self, reduction="mean"):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.reduction = reduction

    def forward(self, x, y):
        out = self.second(torch.tanh(self.first(x))) * self.scale
        return out, nn.functional.mse_loss(out, y, reduction=self.reduction)


OPTIMIZERS = {
    "SGD": (optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Nesterov": (
        optim.SGD,
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "LAMB": (optim.LAMB, optim.LAMB, {"lr": 0.01, "weight_decay": 0.1}),
}


def make_data(rows, calls=CALLS):
    generator = torch.Generator().manual_seed(rows)
    return [
        (
            torch.randn(rows, 3, generator=generator),
            torch.randn(rows, 1, generator=generator),
        )
        for _ in range(calls)
    ]


def train_by_hand(model, optimizer, data, D, G, R, kind):
    """data.md section 16: the loops, nothing else."""
    losses = []
    for x, y in data:
        blocks = list(zip(x.chunk(D * G * R), y.chunk(D * G * R)))
        for d in range(D):
            optimizer.zero_grad()
            for g in range(G):
                for r in range(R):
                    _, loss = model(*blocks[(d * G + g) * R + r])
                    loss.backward()
                    losses.append(loss.detach())
            if kind == ReductionType.Mean:
                for parameter in model.parameters():
                    parameter.grad /= G * R
            optimizer.step()
    return torch.stack(losses)


def assert_same_weights(actual, expected, rtol=1e-5):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=rtol, atol=1e-6, check_dtype=False
        )


def train_on_device(model, optimizer, data, options):
    options.outputMode(poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, options, optimizer)
    losses = [executor(x, y)[1].reshape(-1) for x, y in data]
    executor.copyWeightsToHost()
    return torch.cat(losses)


# Differential -----------------------------------------------------------------


@quick
@given(
    small,
    small,
    small,
    small,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([ReductionType.Mean, ReductionType.Sum]),
    st.sampled_from([MeanReductionStrategy.Post, MeanReductionStrategy.Running]),
    st.sampled_from([None, 1.0, 256.0]),
)
def test_training_equals_a_plain_loop(D, G, R, B, name, kind, strategy, scaling):
    poptorch_class, torch_class, arguments = OPTIMIZERS[name]
    if kind == ReductionType.Sum:  # a rate that doesn't diverge
        arguments = {**arguments, "lr": arguments["lr"] / (G * R)}
    data = make_data(D * G * R * B)
    by_hand = Network()
    expected = train_by_hand(
        by_hand, torch_class(by_hand.parameters(), **arguments), data, D, G, R, kind
    )
    model = Network()
    before = copy.deepcopy(model.state_dict())
    optimizer = poptorch_class(model.parameters(), loss_scaling=scaling, **arguments)
    options = make_options(D, G, R)
    options.Training.accumulationAndReplicationReductionType(kind)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    losses = train_on_device(model, optimizer, data, options)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    trained = model.state_dict()
    assert_same_weights(trained, by_hand.state_dict())
    assert all(not torch.equal(trained[name], before[name]) for name in before)


# Buffers ----------------------------------------------------------------------


def counter(self, x):
    """Counts micro-batches in a float and in an integer buffer."""
    self.calls.add_(1)
    self.whole += 1
    loss = poptorch.identity_loss(x * self.weight, reduction="sum")
    return self.calls * 1, self.whole * 1, loss


def test_a_buffer_is_updated_once_per_micro_batch():
    model = Function(
        counter,
        buffers={"calls": torch.zeros(1), "whole": torch.zeros(1, dtype=torch.int64)},
        weight=nn.Parameter(torch.ones(1)),
    )
    executor = poptorch.trainingModel(
        model, make_options(2, 3, 1, poptorch.OutputMode.All)
    )
    for call in range(2):
        calls, whole, *_ = executor(torch.ones(6))
        assert calls.tolist() == [6 * call + n for n in range(1, 7)]
        assert whole.tolist() == [1] * 6  # a constant of the program
    assert (model.calls.item(), model.whole.item()) == (12, 0)


def test_buffers_of_replicas_diverge_and_the_first_comes_back():
    def forward(self, x):
        self.total += x
        return self.total * 1

    model = Function(forward, buffers={"total": torch.zeros(1)})
    options = make_options(D=2, R=2).broadcastBuffers(False)
    executor = poptorch.inferenceModel(model, options)
    assert executor(torch.tensor([1.0, 10.0, 2.0, 20.0])).tolist() == [1, 10, 3, 30]
    executor.copyWeightsToHost()
    assert model.total.item() == 3


def test_integer_buffers_are_compiled_in():
    def forward(self, x):
        return x + self.offset

    model = Function(forward, buffers={"offset": torch.tensor([1])})
    executor = poptorch.inferenceModel(model)
    assert executor(torch.zeros(1)).item() == 1
    model.offset.fill_(5)
    executor.copyWeightsToDevice()
    assert executor(torch.zeros(1)).item() == 1
    executor.copyWeightsToHost()
    assert model.offset.item() == 5
    executor.detachFromDevice()
    assert executor(torch.zeros(1)).item() == 1
    executor.destroy()
    assert executor(torch.zeros(1)).item() == 5


# Random numbers ---------------------------------------------------------------


def noisy(self, x):
    return x * (torch.rand_like(x) > 0.5), torch.rand(1)


def draws(seed, calls=2):
    options = make_options(D=2, R=2)
    if seed is not None:
        options.randomSeed(seed)
    executor = poptorch.inferenceModel(Function(noisy), options)
    return executor, [executor(torch.ones(64)) for _ in range(calls)]


def test_every_micro_batch_draws_fresh_numbers():
    _, calls = draws(seed=1)
    numbers = torch.cat([noise for _, noise in calls])
    assert numbers.numel() == 8
    assert len(set(numbers.tolist())) == 8
    masks = {tuple(rows.tolist()) for kept, _ in calls for rows in kept.chunk(4)}
    assert len(masks) == 8


def test_without_a_seed_the_hosts_decides():
    torch.manual_seed(5)
    _, first = draws(None)
    torch.manual_seed(5)
    _, again = draws(None)
    torch.manual_seed(6)
    _, other = draws(None)
    assert torch.equal(first[0][1], again[0][1])
    assert not torch.equal(first[0][1], other[0][1])


def test_an_error_on_the_device_gives_the_hosts_random_state_back():
    def forward(self, rows):
        table = torch.rand(3, 2)
        return nn.functional.embedding(rows, table)

    executor = poptorch.inferenceModel(Function(forward))
    executor(torch.tensor([1]))
    before = torch.random.get_rng_state()
    with pytest.raises(IndexError):
        executor(torch.tensor([7]))
    assert torch.equal(torch.random.get_rng_state(), before)


# Grad modes -------------------------------------------------------------------


def test_a_forward_that_ends_without_gradients_trains_the_next_micro_batch():
    class Quiet(Network):
        def forward(self, x, y):
            out, loss = super().forward(x, y)
            with torch.no_grad():
                accuracy = (out - y).abs().mean()
            torch.set_grad_enabled(False)
            return accuracy * 2, loss

    by_hand, model = Network(), Quiet()
    data = make_data(6)
    sgd = torch.optim.SGD(by_hand.parameters(), lr=0.01)
    train_by_hand(by_hand, sgd, data, 3, 2, 1, ReductionType.Mean)
    train_on_device(model, None, data, make_options(D=3, G=2))
    assert torch.is_grad_enabled()
    assert_same_weights(model.state_dict(), by_hand.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_gradient_that_torch_gives_without_memory_is_0(steps, dtype):
    def forward(self, x):
        return poptorch.identity_loss((self.w.sgn() + x * self.v).sum(), "none")

    w, v = (nn.Parameter(torch.tensor([2.0, -3.0], dtype=dtype)) for _ in range(2))
    module = Function(forward, w=w, v=v)
    _, training = wrap(module, make_options(G=steps))
    for _ in range(2):
        training(torch.ones(2 * steps, dtype=dtype))
    assert w.tolist() == [2, -3]
    assert v.tolist() == [0, -5]


def test_inputs_get_no_gradients(caplog):
    model = Network()
    x, y = make_data(2, calls=1)[0]
    x.requires_grad_()
    poptorch.trainingModel(model, make_options())(x, y)
    assert x.grad is None
    assert "requires_grad=True" in caplog.text


def test_a_call_that_failed_midway_leaves_no_gradients_behind():
    def forward(self, rows):
        chosen = nn.functional.embedding(rows, self.table)
        return poptorch.identity_loss(chosen.float().sum(), "none")

    module = Function(
        forward, table=nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    )
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    _, training = wrap(module, options)
    training.compile(torch.tensor([0, 0]))
    with pytest.raises(Exception, match="out of range"):
        training(torch.tensor([0, 7]))
    training(torch.tensor([1, 1]))
    assert module.table.tolist() == [[0.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]
