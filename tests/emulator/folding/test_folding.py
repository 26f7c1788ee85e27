# SPDX-License-Identifier: Apache-2.0
"""Programs of all kinds, several micro-batches at once and one by one."""

# ruff: noqa: N803 - D, G, R and B are the letters of the user guide
from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode, optim
from ipufit.emulator._folding import fold as _fold
from ipufit.emulator._tracing.nodes import function_name
from tests.modes import folding_of
from tests.strategies import examples

F = nn.functional
T, C = 3, 4
CALLS = 3
small = st.integers(1, 3)


@contextmanager
def switched(fold, mib=None):
    """Set the switches; a fixture would be shared by all examples of a property."""
    before = dict(os.environ)
    os.environ["IPUFIT_EMULATOR_FOLD"] = fold
    if mib is not None:
        os.environ["IPUFIT_EMULATOR_FOLD_MIB"] = str(mib)
    try:
        yield
    finally:
        for name in ("IPUFIT_EMULATOR_FOLD", "IPUFIT_EMULATOR_FOLD_MIB"):
            os.environ.pop(name, None)
        os.environ.update(before)


# Random programs ------------------------------------------------------------------


class Layers(nn.Module):
    """What the steps below use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(C, C)
        self.other = nn.Linear(C, C)
        self.conv = nn.Conv1d(T, T, 3, padding=1)
        self.norm = nn.LayerNorm(C)
        self.batch_norm = nn.BatchNorm1d(T)
        self.learnt = nn.BatchNorm1d(T).eval()
        self.lstm = nn.LSTM(C, C, batch_first=True)
        self.attention = nn.MultiheadAttention(C, 2, batch_first=True)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(C))


def counted(m, x):
    m.calls.add_(1)
    return x + 0.01 * m.calls


def moving_mean(m, x):
    m.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return x - m.mean


def written(m, x):
    y = x * 1.0
    y[:, 0].mul_(2.0)
    y += 0.1
    return y


def written_after(m, x):
    y = (x * 1.0).contiguous()
    z = y.view(-1, C)
    y.mul_(0.5)
    z.reshape(x.shape)[:, 0].clamp_(max=0.2)
    return z.view(x.shape) + y


def written_through_a_transposed_view(m, x):
    y = x * 1.0
    y.transpose(0, 1)[1].add_(x[:, 0])
    y.transpose(0, 1).contiguous().mul_(3.0)  # a copy, but not of one sample
    return y


def written_first_sample(m, x):
    y = x * 1.0
    y[0].mul_(2.0)
    return y


def mixed_write(m, x):
    y = x * 1.0
    y += torch.randn(C) * 0.1
    return y


def without_gradients(m, x):
    with torch.no_grad():
        scale = x.abs().amax((1, 2), keepdim=True) + 1
    return x / scale


ROW_WISE = {
    "linear": lambda m, x: torch.tanh(m.linear(x)),
    "the same layer": lambda m, x: m.other(x),
    "conv": lambda m, x: m.conv(x).relu(),
    "layer norm": lambda m, x: m.norm(x),
    "learnt": lambda m, x: m.learnt(x),
    "lstm": lambda m, x: m.lstm(x)[0],
    "attention": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "by hand": lambda m, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "flat": lambda m, x: m.other(x.reshape(-1, C)).view(x.shape[0], T, C),
    "steps first": lambda m, x: m.linear(x.transpose(0, 1)).transpose(0, 1),
    "pieces": lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1),
    "chunks": lambda m, x: sum(x.chunk(2, 2)).repeat(1, 1, 2),
    "copies": lambda m, x: x.mean(1, keepdim=True).expand(x.shape[0], T, C) + x,
    "softmax": lambda m, x: x.softmax(-1) + x.log_softmax(1),
    "written": written,
    "written through a view": written_through_a_transposed_view,
    "first sample written": written_first_sample,
    "written after a view": written_after,
    "centred": lambda m, x: x - x.mean(),
    "over the batch": lambda m, x: x - x.mean(0) + x.amax(0, keepdim=True),
    "reversed batch": lambda m, x: x.flip(0),
    "first sample": lambda m, x: x + x[0],
    "along the batch": lambda m, x: x.softmax(0),
    "of the batch": lambda m, x: (
        x * torch.arange(float(x.shape[0]))[:, None, None].to("ipu")
    ),
    "without gradients": without_gradients,
}
OTHER = {
    "dropout": lambda m, x: F.dropout(x, 0.3),
    "noise": lambda m, x: x + 0.1 * torch.randn_like(x),
    "same noise": lambda m, x: x + 0.1 * torch.randn(C),
    "noise written": mixed_write,
    "batch norm": lambda m, x: m.batch_norm(x),
    "counted": counted,
    "moving mean": moving_mean,
    "no rule": lambda m, x: x + torch.cdist(x, x).mean(),
    "masked": lambda m, x: x[:, torch.tensor([2, 0, 1])],
}
STEPS = {**ROW_WISE, **OTHER}


class Steps(Layers):
    """Some steps; the last gives the loss."""

    def __init__(self, names, *, reduction="mean"):
        super().__init__()
        self.names = names
        self.reduction = reduction

    def forward(self, x, y=None):
        for name in self.names:
            x = STEPS[name](self, x)
        if y is None:
            return x, x.sum((1, 2)), x.mean().reshape(1)
        loss = F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction=self.reduction)
        if self.reduction == "none":
            loss = poptorch.identity_loss(loss, reduction="sum")
        hits = (x.argmax(-1) == y).to(torch.float32).sum()
        return torch.stack([loss.detach(), hits]), x.mean(0), loss


def make_options(D, G, R, mode, period=1):
    options = poptorch.Options().deviceIterations(D).replicationFactor(R)
    options.autoRoundNumIPUs(True).randomSeed(3)
    options.outputMode(mode, period)
    options.Training.gradientAccumulation(G)
    options.broadcastBuffers(False)
    return options


def make_inputs(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, C, generator=generator)
    return x, torch.randint(0, C, (rows, T), generator=generator)


def train(names, D, G, R, B, mode, reduction="mean"):
    module = Steps(names, reduction=reduction)
    options = make_options(D, G, R, mode)
    sgd = optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    executor = poptorch.trainingModel(module, options, sgd)
    try:
        outputs = [executor(*make_inputs(D * G * R * B, i)) for i in range(CALLS)]
        executor.copyWeightsToHost()
        state = executor.rng_state
        return outputs, module.state_dict(), state, folding_of(executor)
    finally:
        executor.destroy()


def infer(names, D, R, B, mode):
    module = Steps(names)
    executor = poptorch.inferenceModel(module, make_options(D, 1, R, mode))
    try:
        outputs = [executor(make_inputs(D * R * B, i)[0]) for i in range(CALLS)]
        return outputs, executor.rng_state, folding_of(executor)
    finally:
        executor.destroy()


programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)
modes = st.sampled_from([OutputMode.All, OutputMode.Final, OutputMode.Sum])
mebibytes = st.sampled_from([32, 0.01, 0.002])
"""All micro-batches in one pass, or a few in each, or two."""


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@settings(max_examples=examples(60))
@given(programs, small, small, st.sampled_from([1, 2]), small, modes, mebibytes)
def test_any_program_trains_alike(names, D, G, R, B, mode, mib):
    if "batch norm" in names and B * T < 2:
        return
    with switched("0"):
        outputs, weights, rng_state, off = train(names, D, G, R, B, mode)
    with switched("1", mib):
        folded, trained, drawn, folding = train(names, D, G, R, B, mode)
    assert off is None
    assert folding is None or folding.failure is None
    assert_close(folded, outputs)
    assert_close(trained, weights)
    assert drawn == rng_state


@settings(max_examples=examples(60))
@given(programs, st.integers(1, 5), st.sampled_from([1, 2]), small, modes, mebibytes)
def test_any_program_infers_alike(names, D, R, B, mode, mib):
    with switched("0"):
        outputs, rng_state, _ = infer(names, D, R, B, mode)
    with switched("1", mib):
        folded, drawn, folding = infer(names, D, R, B, mode)
    assert folding is None or folding.failure is None
    assert_close(folded, outputs)
    assert drawn == rng_state


IN_PART = {"written through a view", "written after a view", "first sample written"}
WHOLE = sorted(ROW_WISE.keys() - IN_PART)
VIEW_OF_WRITTEN = ("written", "first sample")
"""Where a sample of what was written to is looked at, writing is done for each."""


@settings(max_examples=examples(20))
@given(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=6), st.integers(2, 3))
def test_what_has_rules_is_folded_as_a_whole(names, B):
    assume(VIEW_OF_WRITTEN not in zip(names, names[1:]))
    with switched("1"):
        *_, folding = train(names, 1, 3, 1, B, OutputMode.All)
    split = folding._split
    rest = [function_name(n) for n in split.records if n not in split.folded]
    assert rest == []
    assert folding.is_verified([3])
    assert split.pays


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_of_all_reductions_train_alike(reduction):
    with switched("0"):
        expected = train(["linear"], 2, 3, 1, 2, OutputMode.All, reduction)
    with switched("1"):
        actual = train(["linear"], 2, 3, 1, 2, OutputMode.All, reduction)
    assert_close(actual[:2], expected[:2])


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_n_th_result_comes_back(name):
    def results(fold):
        with switched(fold):
            module = Steps(["linear", name, "conv"])
            options = make_options(4, 1, 1, OutputMode.EveryN, 2)
            executor = poptorch.inferenceModel(module, options)
            outputs = executor(make_inputs(8, 0)[0])
            executor.destroy()
            return outputs

    assert_close(results("1"), results("0"))


# Optimisers and reductions --------------------------------------------------------


@settings(max_examples=examples(25))
@given(
    st.sampled_from([optim.SGD, optim.AdamW, optim.Adam, optim.RMSprop, optim.LAMB]),
    st.sampled_from(["Mean", "Sum"]),
    st.sampled_from(["Post", "Running"]),
    st.sampled_from([None, 128.0]),
    st.sampled_from([1, 2]),
)
def test_gradients_are_reduced_alike(optimizer, kind, strategy, scaling, R):
    def run(fold):
        with switched(fold):
            module = Steps(["linear", "conv"])
            options = make_options(2, 3, R, OutputMode.All)
            options.Training.accumulationAndReplicationReductionType(
                getattr(poptorch.ReductionType, kind)
            )
            options.Training.setMeanAccumulationAndReplicationReductionStrategy(
                getattr(poptorch.MeanReductionStrategy, strategy)
            )
            made = optimizer(module.parameters(), lr=0.01, loss_scaling=scaling)
            executor = poptorch.trainingModel(module, options, made)
            outputs = [executor(*make_inputs(12 * R, i)) for i in range(CALLS)]
            executor.copyWeightsToHost()
            folding = folding_of(executor)
            assert (folding is not None and folding.is_on) == (fold == "1")
            executor.destroy()
            return outputs, module.state_dict()

    assert_close(run("1"), run("0"))


def test_nothing_to_train_is_fine():
    with switched("1"):
        module = Steps(["linear"])
        module.requires_grad_(False)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        executor = poptorch.trainingModel(module, make_options(1, 3, 1, OutputMode.All))
        executor(*make_inputs(6, 0))
        assert folding_of(executor).is_on
        executor.destroy()
    torch.testing.assert_close(module.state_dict(), before)


# What the loop is for -------------------------------------------------------------


class HalfModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(C, C).half()

    def forward(self, x):
        out = self.layer(x)
        return out, poptorch.identity_loss((out.float() ** 2).mean(), reduction="none")


def test_float16_weights_are_trained_in_a_loop():
    with switched("1"):
        module = HalfModel()
        executor = poptorch.trainingModel(module, make_options(1, 3, 1, OutputMode.All))
        executor(torch.randn(6, C).half())
        folding = folding_of(executor)
        assert not folding.is_verified([3])
        executor.destroy()


class PartlyHalfModel(HalfModel):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(C, C)

    def forward(self, x):
        return super().forward(torch.tanh(self.first(x)).half())


def test_float16_weights_get_the_gradient_of_each_micro_batch_once():
    def weights(fold):
        with switched(fold):
            module = PartlyHalfModel()
            sgd = optim.SGD(module.parameters(), lr=0.5)
            options = make_options(1, 3, 1, OutputMode.All)
            executor = poptorch.trainingModel(module, options, sgd)
            executor(torch.linspace(-1, 1, 6 * C).reshape(6, C))
            executor.destroy()
            return module.state_dict()

    torch.testing.assert_close(weights("1"), weights("0"), rtol=0, atol=0)


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(C, C)

    def forward(self, x):
        return poptorch.ipu_print_tensor(self.layer(x), "shown")


def test_programs_that_print_run_as_often_as_on_a_device(capfd):
    with switched("1"):
        options = make_options(3, 1, 1, OutputMode.All)
        executor = poptorch.inferenceModel(Printing(), options)
        executor(torch.randn(6, C))
        executor.destroy()
    assert capfd.readouterr().err.count("shown") == 3


def test_the_host_is_called_for_each_micro_batch():
    calls = []

    def host(x):
        calls.append(len(x))
        return x

    class Model(nn.Module):
        def forward(self, x):
            return poptorch.CPU(host, "host")(x * 2)

    with switched("1"):
        executor = poptorch.inferenceModel(
            Model(), make_options(3, 1, 1, OutputMode.All)
        )
        executor(torch.randn(6, C))
        executor.destroy()
    assert calls == [2, 2, 2, 2]  # once while tracing


def test_anchored_gradients_are_those_of_micro_batches():
    def gradients(fold):
        with switched(fold):
            module = Steps(["linear"])
            options = make_options(1, 3, 1, OutputMode.All)
            options.anchorTensor("seen", "Gradient___linear.weight")
            executor = poptorch.trainingModel(module, options)
            executor(*make_inputs(6, 0))
            seen = executor.getAnchoredTensor("seen")
            executor.destroy()
            return seen

    assert_close(gradients("1"), gradients("0"))


def test_micro_batches_that_share_rows_run_in_a_loop():
    with switched("1"):
        options = make_options(1, 2, 2, OutputMode.All)
        options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
        executor = poptorch.trainingModel(Steps(["linear"]), options)
        executor(*make_inputs(4, 0))
        assert folding_of(executor) is None
        executor.destroy()


def test_inputs_that_are_written_to_come_back():
    class Model(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x + 1

    x = torch.ones(6, C)
    with switched("1"):
        executor = poptorch.inferenceModel(
            Model(), make_options(3, 1, 1, OutputMode.All)
        )
        executor(x)
        executor.destroy()
    assert torch.equal(x, torch.full((6, C), 2.0))


# Decisions ------------------------------------------------------------------------


def test_what_is_mostly_random_runs_in_a_loop_unless_it_must_not():
    names = ["dropout", "linear", "conv", "attention"]
    for fold, is_folded in (("", False), ("1", True)):
        with switched(fold):
            *_, folding = train(names, 1, 3, 1, 2, OutputMode.All)
            assert folding.is_on == is_folded
    with switched(""):
        *_, folding = train(names[1:], 1, 3, 1, 2, OutputMode.All)
        assert folding.is_on


def test_the_split_follows_the_random_numbers():
    with switched("1"):
        *_, folding = train(["linear", "dropout", "conv"], 1, 3, 1, 2, OutputMode.All)
    split = folding._split
    names = [function_name(n) for n in split.records if n.op.startswith("call")]
    folded = [function_name(n) for n in split.folded if n.op.startswith("call")]
    assert sorted(folded) == ["flatten", "linear", "tanh"]  # and the labels
    assert names.index("dropout") == 2


@pytest.mark.parametrize("mib", [1, 2, 4, 64])
def test_a_pass_keeps_to_its_memory(mib, monkeypatch):
    """The most that the folded graph has at one time, counted while it runs."""
    rows, width = 64, 512
    module = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    with switched("1", mib):
        options = make_options(10, 1, 1, OutputMode.All)
        executor = poptorch.inferenceModel(module, options)
        x = torch.randn(10 * rows, 8)
        expected = module(x)
        torch.testing.assert_close(executor(x), expected)
        folding = folding_of(executor)
        sizes = folding._sizes[10]
        most = max(sizes)
        executor.destroy()
    assert sum(sizes) == 10
    assert most - min(sizes) <= 1
    value_bytes = rows * width * 4
    assert most * value_bytes <= mib * 2**20
    if mib == 64:
        assert sizes == (10,)
    if mib == 1:  # two values at a time, 128 KiB each
        assert len(sizes) == 3


def test_training_counts_what_the_backward_pass_needs():
    module = Steps(["linear"] * 8)
    with switched("1"):
        executor = poptorch.trainingModel(module, make_options(1, 4, 1, OutputMode.All))
        executor(*make_inputs(8, 0))
        trained = folding_of(executor)._split.bytes_per_micro_batch
        executor.destroy()
        inference = poptorch.inferenceModel(
            module, make_options(4, 1, 1, OutputMode.All)
        )
        inference(make_inputs(8, 0)[0])
        inferred = folding_of(inference)._split.bytes_per_micro_batch
        inference.destroy()
    values = 2 * T * C * 4
    assert trained >= 16 * values  # a product and a tanh each
    assert inferred <= 4 * values


def test_nothing_is_folded_if_two_micro_batches_are_too_large():
    with switched("1", 0):
        *_, folding = train(["linear"], 1, 3, 1, 2, OutputMode.All)
    assert folding._sizes == {3: ()}


# The first call -------------------------------------------------------------------


def test_a_wrong_pass_is_found_and_never_used(monkeypatch, caplog):
    run = _fold.Fold.run

    def wrong(self, arguments, joined, apart):
        results, loss = run(self, arguments, joined, apart)
        wrong = [tuple(t + 0.01 for t in of_one) for of_one in results]
        return _fold.FoldResults(wrong, loss)

    with switched("0"):
        expected = train(["linear", "moving mean"], 2, 3, 1, 2, OutputMode.All)
    monkeypatch.setattr(_fold.Fold, "run", wrong)
    with switched("1"), caplog.at_level("WARNING"):
        actual = train(["linear", "moving mean"], 2, 3, 1, 2, OutputMode.All)
    folding = actual[-1]
    assert not folding.is_on
    assert "results" in folding.failure
    said = [r for r in caplog.records if "one after the other" in r.getMessage()]
    assert len(said) == 1
    for got, wanted in zip(actual[:2], expected[:2]):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, IndexError])
def test_a_pass_that_fails_is_replaced_by_the_loop(error, monkeypatch):
    def fail(*arguments):
        raise error("no")

    with switched("0"):
        expected = train(["linear", "dropout"], 1, 3, 2, 2, OutputMode.All)
    monkeypatch.setattr(_fold.Fold, "run", fail)
    with switched("1"):
        actual = train(["linear", "dropout"], 1, 3, 2, 2, OutputMode.All)
    assert actual[3].failure == f"{error.__name__}: no"
    assert actual[2] == expected[2]
    for got, wanted in zip(actual[:2], expected[:2]):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("wrong_gradient", [True, False])
def test_gradients_are_held_against_the_loop_too(wrong_gradient, monkeypatch):
    run = _fold.Fold.run

    def changed(self, arguments, joined, apart):
        results, loss = run(self, arguments, joined, apart)
        return _fold.FoldResults(results, loss * 1.01 if wrong_gradient else loss)

    monkeypatch.setattr(_fold.Fold, "run", changed)
    with switched("1"):
        *_, folding = train(["linear"], 1, 3, 1, 2, OutputMode.All)
    assert folding.is_on != wrong_gradient
    if wrong_gradient:
        assert "gradients" in folding.failure


def test_a_second_executor_goes_on_bit_by_bit():
    """The first call of an executor runs both ways and leaves no trace."""
    names = ["linear", "dropout", "moving mean", "conv"]

    def run(interrupted_after):
        with switched("1"):
            module = Steps(names)
            options = make_options(2, 2, 1, OutputMode.All)
            sgd = optim.SGD(module.parameters(), lr=0.05)
            executor = poptorch.trainingModel(module, options, sgd)
            outputs = []
            for i in range(4):
                if i == interrupted_after:
                    state = executor.rng_state
                    executor.destroy()
                    executor = poptorch.trainingModel(module, options, sgd)
                    executor.compile(*make_inputs(8, i))
                    executor.rng_state = state
                outputs.append(executor(*make_inputs(8, i)))
            executor.copyWeightsToHost()
            assert folding_of(executor).is_on
            executor.destroy()
            return outputs, module.state_dict()

    whole = run(None)
    for stop in (1, 2, 3):
        torch.testing.assert_close(run(stop), whole, rtol=0, atol=0)


def test_times_are_those_of_micro_batches():
    with switched("1"):
        options = make_options(4, 1, 2, OutputMode.All)
        executor = poptorch.inferenceModel(Steps(["linear"]), options)
        for _ in range(2):
            executor(make_inputs(16, 0)[0])
            counters = executor.getPerfCounters()
            taken = counters["input_complete"][0]
            assert len(taken) == 8
            assert taken == sorted(taken)
            given = [out >= at for at, out in zip(taken, counters["output"][0])]
            assert all(given)
            assert executor.getComputeLatency()[0] > 0
        assert folding_of(executor).is_verified([8])
        executor.destroy()
