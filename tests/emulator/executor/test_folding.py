# SPDX-License-Identifier: Apache-2.0
"""Several micro-batches that run at once give what they give one by one.

`tests/differential` holds programs in both modes against plain torch.
"""

# ruff: noqa: N803 - D, G, R and B are the letters of the user guide
import contextlib
import logging
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode, optim
from tests.emulator import _models
from tests.emulator._models import Function
from tests.strategies import examples

F = nn.functional
B, T, C, K = 3, 4, 6, 3  # rows, steps, channels, micro-batches
CALLS = 2  # the first one runs both ways


@contextlib.contextmanager
def switched(fold, mib=None):
    """Set the switches, and list what the emulator says of folds."""
    before, said = dict(os.environ), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record)
    log = logging.getLogger("poptorch::python")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    os.environ["IPUFIT_EMULATOR_FOLD"] = fold
    if mib is not None:
        os.environ["IPUFIT_EMULATOR_FOLD_MIB"] = str(mib)
    try:
        yield said
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        for name in ("IPUFIT_EMULATOR_FOLD", "IPUFIT_EMULATOR_FOLD_MIB"):
            os.environ.pop(name, None)
        os.environ.update(before)


def folded_in(said):
    """The most micro-batches in one pass; None if all ran one after the other."""
    found = [r.args[0] for r in said if "run in one pass" in r.msg]
    return max(found) if found else None


def why_looped(said):
    """Why micro-batches ran one after the other; None if they didn't."""
    found = [r for r in said if "one after the other" in r.msg]
    return str(found[-1].args[-1]) if found else None


def found_wrong(said):
    """Whether a fold gave something else than the loop."""
    found = [r for r in said if "one after the other" in r.msg]
    return any(r.levelno >= logging.WARNING for r in found)


def assert_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True
    )


def floats(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.rand(K * B, *sizes, generator=generator) * 0.8 + 0.1


def numbers(*sizes, high=C, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randint(0, high, (K * B, *sizes), generator=generator)


def weight(*sizes):
    return nn.Parameter(torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes))


# Functions --------------------------------------------------------------------------

X, Y = floats(T, C), floats(T, C, seed=1)

CASES = {
    "images": (
        lambda m, x: (
            F.conv2d(x, m.kernel, m.bias, padding=1),
            F.conv2d(x, m.kernel, padding="same"),
            F.conv_transpose2d(x, m.kernel, stride=2),
            F.max_pool2d(x, 2, 2),
            F.avg_pool2d(x, 2, 2),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_max_pool2d(x, 2),
            F.max_pool1d(x[:, 0], 2, 2),
            F.max_pool2d(x.sum(0), 2, 2),
        ),
        floats(4, 8, 8),
    ),
    "attention": (
        lambda m, x, y: (
            F.linear(x.sum(0), m.W),
            F.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]),
            F.scaled_dot_product_attention(x, y, y, is_causal=True),
            F.scaled_dot_product_attention(x, y, y, torch.ones(T, T).tril().bool()),
            F.scaled_dot_product_attention(
                x[:, None], y[:, None], y[:, None], attn_mask=(x @ x.mT)[:, None]
            ),
            F.scaled_dot_product_attention(x, y, y, torch.ones(B, T, T)),
        ),
        X,
        Y,
    ),
    "losses of classes": (
        lambda m, x, y: [
            loss.reshape(-1)
            for reduction in ("none", "sum", "mean")
            for loss in (
                F.cross_entropy(x, y, reduction=reduction),
                F.cross_entropy(x, y, ignore_index=1, reduction=reduction),
                F.cross_entropy(
                    x,
                    y,
                    label_smoothing=0.0 if reduction == "mean" else 0.1,
                    reduction=reduction,
                ),
                F.cross_entropy(x, x.softmax(1), reduction=reduction),
                F.nll_loss(x, y, reduction=reduction),
            )
        ],
        floats(C),
        numbers(),
    ),
    "losses of many classes": (
        lambda m, x, y: [
            F.cross_entropy(x.transpose(1, 2), y % C, ignore_index=2).reshape(1),
            F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum").reshape(1),
        ],
        X,
        numbers(T),
    ),
}
ATTRIBUTES = {"W": weight(C, C), "kernel": weight(4, 4, 3, 3), "bias": weight(4)}
SEVERAL = poptorch.Options().deviceIterations(K)


def infer(fold, module, options, *batches, mib=None):
    return run(fold, lambda: poptorch.inferenceModel(module, options), batches, mib)


def run(fold, make_executor, batches, mib=None):
    """Outputs of some calls, the random state after them, and what was said."""
    with switched(fold, mib) as said:
        executor = make_executor()
        try:
            outputs = [executor(*batch) for batch in batches]
            return outputs, executor.rng_state, said
        finally:
            executor.destroy()


@pytest.mark.parametrize("what", CASES)
def test_functions_give_what_they_give_in_a_loop(what):
    function, *inputs = CASES[what]
    module = Function(function, **ATTRIBUTES)
    batches = inputs, [tensor.flip(0).clone() for tensor in inputs]
    folded, _, said = infer("1", module, SEVERAL, *batches)
    assert_close(folded, infer("0", module, SEVERAL, *batches)[0])
    assert not found_wrong(said)
    assert folded_in(said) == K


LATER = {
    "reversed, dimensions one by one": lambda m, x: x.flip(1, 0),
    "counted": lambda m, x: x.count_nonzero(1).repeat(B, 1),
    "a sum over no dimensions": lambda m, x: x.sum([]).repeat(B),
    "a fill with a value of each": lambda m, x: x.masked_fill(x > 1, x.mean()),
    "statistics of the batch": lambda m, x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("what", LATER)
def test_rows_that_are_alike_at_first_hide_nothing(what):
    """The first call of a fold is compared with the loop; later ones aren't."""
    module = Function(lambda m, x: LATER[what](m, x * 1))
    batches = [(x,) for x in (torch.ones_like(X), X, X * 4)]
    folded, _, said = infer("1", module, SEVERAL, *batches)
    assert_close(folded, infer("0", module, SEVERAL, *batches)[0])
    assert not found_wrong(said)


# Random programs --------------------------------------------------------------------


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
        self.gru = nn.GRU(C, C)
        self.rnn = nn.RNN(C, C, nonlinearity="relu", batch_first=True)
        self.attention = nn.MultiheadAttention(C, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True)
        self.group_norm = nn.GroupNorm(2, T)
        self.slope = nn.PReLU()
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


def masked_attention(m, x):
    mask = (torch.arange(T)[None] > torch.arange(T)[:, None]).to(x.device)
    padding = x.sum(-1) > 9  # of few: something is left to attend to
    return m.attention(x, x, x, padding, need_weights=False, attn_mask=mask)[0]


ROW_WISE = {
    "linear": lambda m, x: torch.tanh(m.linear(x)),
    "the same layer": lambda m, x: m.other(x),
    "conv": lambda m, x: m.conv(x).relu(),
    "layer norm": lambda m, x: m.norm(x),
    "learnt": lambda m, x: x if torch.is_grad_enabled() else m.learnt(x),
    "lstm": lambda m, x: m.lstm(x)[0],
    "gru, steps first": lambda m, x: m.gru(x.transpose(0, 1))[0].transpose(0, 1),
    "rnn": lambda m, x: m.rnn(x)[0],
    "attention": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "weights of attention": lambda m, x: m.attention(x, x, x)[1] @ x,
    "masked attention": masked_attention,
    "encoder": lambda m, x: m.encoder(x),
    "group norm": lambda m, x: m.slope(m.group_norm(x)),
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
    "written after a view": written_after,
    "masked": lambda m, x: x[:, torch.tensor([2, 0, 1, 3])],
}
STEPS = {**ROW_WISE, **OTHER}


class Steps(Layers):
    """Some steps; the last gives the loss."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def forward(self, x, y=None):
        for name in self.names:
            x = STEPS[name](self, x)
        if y is None:
            return x, x.sum((1, 2)), x.mean().reshape(1)
        loss = F.cross_entropy(x.flatten(0, 1), y.flatten())
        hits = (x.argmax(-1) == y).to(torch.float32).sum()
        return torch.stack([loss.detach(), hits]), x.mean(0), loss


def make_options(D, G, R, mode, period=1):
    options = _models.make_options(D, G, R, mode, period)
    return options.randomSeed(3).broadcastBuffers(False)


def make_inputs(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, T, C, generator=generator)
    return x, torch.randint(0, C, (rows, T), generator=generator)


def train(fold, names, D, G, R, B, mode, *, mib=None):
    """Outputs, weights and random state after some calls; and what was said."""
    module = Steps(names)
    sgd = optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    options = make_options(D, G, R, mode)
    batches = [make_inputs(D * G * R * B, i) for i in range(CALLS)]
    outputs, rng_state, said = run(
        fold, lambda: poptorch.trainingModel(module, options, sgd), batches, mib
    )
    return outputs, module.state_dict(), rng_state, said


programs = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5)
modes = st.sampled_from([OutputMode.All, OutputMode.Final, OutputMode.Sum])
small = st.integers(1, 3)
mebibytes = st.sampled_from([32, 0.01, 0.002])
"""All micro-batches in one pass, or a few in each, or two."""


@settings(max_examples=examples(25))
@given(programs, small, small, st.sampled_from([1, 2]), small, modes, mebibytes)
def test_any_program_trains_alike(names, D, G, R, B, mode, mib):
    if "batch norm" in names and B * T < 2:
        return
    outputs, weights, rng_state, _ = train("0", names, D, G, R, B, mode)
    folded, trained, drawn, said = train("1", names, D, G, R, B, mode, mib=mib)
    assert not found_wrong(said)
    assert_close(folded, outputs, 1e-3)
    assert_close(trained, weights, 1e-3)
    assert drawn == rng_state


@settings(max_examples=examples(25))
@given(programs, st.integers(1, 5), st.sampled_from([1, 2]), small, modes, mebibytes)
def test_any_program_infers_alike(names, D, R, B, mode, mib):
    module, options = Steps(names), make_options(D, 1, R, mode)
    batches = [make_inputs(D * R * B, i)[:1] for i in range(CALLS)]
    outputs, rng_state, _ = infer("0", module, options, *batches)
    folded, drawn, said = infer("1", module, options, *batches, mib=mib)
    assert not found_wrong(said)
    assert_close(folded, outputs, 1e-3)
    assert drawn == rng_state


# Whether it copies depends on strides: behind an LSTM a fold has other ones.
FOLDED = sorted(set(ROW_WISE) - {"written through a view"})


@pytest.mark.parametrize("names", [FOLDED[::3], FOLDED[1::3], FOLDED[2::3]], ids=len)
def test_layers_are_folded_and_train_alike(names):
    outputs, weights, *_ = train("0", names, 1, K, 1, B, OutputMode.All)
    folded, trained, _, said = train("1", names, 1, K, 1, B, OutputMode.All)
    assert folded_in(said) == K
    assert_close(folded, outputs, 1e-3)
    assert_close(trained, weights, 1e-3)


@pytest.mark.parametrize("name", ["linear", "dropout", "counted"])
def test_every_n_th_result_comes_back(name):
    module = Steps(["linear", name, "conv"])
    given = make_options(4, 1, 1, OutputMode.EveryN, 2), make_inputs(8, 0)[:1]
    assert_close(infer("1", module, *given)[0], infer("0", module, *given)[0], 1e-3)


# What the loop is for -------------------------------------------------------------

REASONS = {
    "dropout": "random",
    "batch norm": "buffers",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_log_says_why_micro_batches_run_one_by_one(name):
    *_, said = train("", ["linear", name, "conv"], 1, 3, 1, 2, OutputMode.All)
    assert folded_in(said) is None
    assert REASONS[name] in why_looped(said)


def test_what_torch_can_not_fold_runs_in_a_loop():
    def program(m, x):
        row = torch.zeros(C)
        row[0] = x.mean()
        return x + row

    module = Function(program)
    folded, _, said = infer("1", module, SEVERAL, [X])
    assert folded_in(said) is None
    assert "inplace" in why_looped(said)
    assert not found_wrong(said)
    assert_close(folded, infer("0", module, SEVERAL, [X])[0])


class HalfModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(C, C)
        self.layer = nn.Linear(C, C).half()

    def forward(self, x):
        out = self.layer(torch.tanh(self.first(x)).half())
        return out, poptorch.identity_loss((out.float() ** 2).mean(), reduction="none")


def test_float16_weights_get_the_gradient_of_each_micro_batch_once():
    def weights(fold):
        module = HalfModel()
        sgd = optim.SGD(module.parameters(), lr=0.5)
        options = make_options(1, 3, 1, OutputMode.All)
        batch = [torch.linspace(-1, 1, 6 * C).reshape(6, C)]
        *_, said = run(
            fold, lambda: poptorch.trainingModel(module, options, sgd), [batch]
        )
        assert folded_in(said) is None
        return module.state_dict()

    torch.testing.assert_close(weights("1"), weights("0"), rtol=0, atol=0)


def test_rounding_at_random_runs_in_a_loop():
    options = SEVERAL.clone()
    options.Precision.enableStochasticRounding(True)
    *_, said = infer("1", Function(lambda m, x: x * 1.001), options, [X.half()])
    assert why_looped(said) == "rounding is stochastic"


def test_the_host_is_called_for_each_micro_batch():
    calls = []

    def host(x):
        calls.append(len(x))
        return x

    asking = Function(lambda m, x: poptorch.CPU(host, "host")(x * 2))
    infer("1", asking, SEVERAL, [torch.randn(6, C)])
    assert calls == [2, 2, 2, 2]  # once while tracing


def test_micro_batches_that_share_rows_run_in_a_loop():
    options = make_options(1, 2, 2, OutputMode.All)
    options.inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive)
    module = Steps(["linear"])
    *_, said = run(
        "1", lambda: poptorch.trainingModel(module, options), [make_inputs(4, 0)]
    )
    assert why_looped(said) == "replicas share inputs"


# Memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "most"), [(1, 4), (4, 10)])
def test_a_pass_keeps_to_its_memory(mib, most):
    """Two values of a micro-batch are there at a time, of 128 KiB each."""
    rows, width = 64, 512
    module = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    x = torch.randn(10 * rows, 8)
    options = make_options(10, 1, 1, OutputMode.All)
    [actual], _, said = infer("", module, options, [x], mib=mib)
    assert folded_in(said) == most
    assert_close(actual, module(x).detach())


def test_training_counts_what_the_backward_pass_needs():
    names, value = ["linear"] * 8, 2 * T * C * 4
    mib = 40 * value / 2**20
    *_, trained = train("", names, 1, 4, 1, 2, OutputMode.All, mib=mib)
    options = make_options(4, 1, 1, OutputMode.All)
    *_, inferred = infer("", Steps(names), options, make_inputs(8, 0)[:1], mib=mib)
    assert folded_in(trained) == 2  # a product and a tanh each, and more for the loss
    assert folded_in(inferred) == 4


def test_nothing_is_folded_if_two_micro_batches_are_too_large():
    *_, said = train("", ["linear"], 1, 3, 1, 2, OutputMode.All, mib=0)
    assert folded_in(said) is None


# The first call -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "G"), [("results", 3), ("gradients", 3), ("results", 1)]
)
def test_a_fold_that_differs_from_the_loop_is_never_used(wrong, G, monkeypatch):
    home = "ipufit.emulator.core.fold.fold"
    fold = pytest.importorskip("ipufit.emulator.core.fold").fold

    def wrongly_folded(*given, **settings):
        forward = fold(*given, **settings)

        def run(*arguments):
            *results, loss = forward(*arguments)
            if wrong == "results":
                return (*(result + 0.01 for result in results), loss)
            return (*results, loss * 1.01)

        return run

    *expected, _ = train("0", ["linear"], 2, G, 1, 2, OutputMode.All)
    monkeypatch.setattr(home, wrongly_folded)
    *actual, said = train("1", ["linear"], 2, G, 1, 2, OutputMode.All)
    assert len([r for r in said if "one after the other" in r.msg]) == 1
    assert found_wrong(said)
    assert why_looped(said).startswith(wrong)
    for got, wanted in zip(actual[:2], expected[:2]):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("names", "mib", "sizes"),
    [
        (["linear", "conv"], 32, {5}),
        (["linear", "conv"], 0.001, {5, 2, 1}),
        (["linear", "dropout"], 32, set()),
        (["counted"], 32, set()),
    ],
)
def test_metrics_of_many_updates_run_in_one_pass(names, mib, sizes):
    outputs, weights, *_ = train("0", names, 5, 1, 1, B, OutputMode.All)
    folded, trained, _, said = train("1", names, 5, 1, 1, B, OutputMode.All, mib=mib)
    assert {r.args[0] for r in said if r.msg.startswith("Parts run in one")} == sizes
    assert_close(folded, outputs)
    torch.testing.assert_close(trained, weights, rtol=0, atol=0)


class Counting(nn.Module):
    """Divides its loss by the number of inputs that count, and returns places."""

    def __init__(self):
        super().__init__()
        self.weight = weight(C)

    def forward(self, x):
        known = x[:, 0].gt(0).to(torch.float32)
        largest, place = x.max(-1)
        highest, at = (x * self.weight).max(-1)
        loss = (highest.mean(-1) * known[:, 0] + largest.mean(-1)).sum()
        loss = poptorch.identity_loss(loss / known.sum().clamp(min=1), "none")
        return place, at, (at == place).to(torch.float32).sum(), loss


@pytest.mark.parametrize(("mib", "passes"), [(32, [5, 5]), (0.0001, [1])])
def test_what_depends_on_inputs_alone_runs_before_the_loop(mib, passes):
    def trained(fold):
        module = Counting()
        sgd = optim.SGD(module.parameters(), lr=1.0)
        options = make_options(5, 1, 1, OutputMode.All)
        model = poptorch.trainingModel(module, options, sgd)
        batches = [[torch.randn(5 * B, T, C)] for _ in range(3)]
        *results, said = run(fold, lambda: model, batches, mib)
        found = [r.args[0] for r in said if r.msg.startswith("Parts run in one")]
        return [*results, module.state_dict()], found

    torch.manual_seed(0)
    expected, _ = trained("0")
    torch.manual_seed(0)
    actual, found = trained("1")
    assert found == passes
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


class Images(nn.Module):
    """A convolution of grey images, whose loss and hits need their targets alone."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 5), nn.Linear(8 * 12 * 12, K)

    def forward(self, x, y):
        scores = self.head(F.max_pool2d(self.conv(x), 2, 2).flatten(1))
        known = y.ne(0).to(torch.float32).sum().clamp(min=1)
        loss = F.cross_entropy(scores, y, reduction="sum") / known
        hits = scores.argmax(1).eq(y).to(torch.float32).sum()
        return hits, poptorch.identity_loss(loss, "none")


class Convolved(TorchDispatchMode):
    """Notes the steps in memory of the images that are convolved."""

    def __init__(self):
        super().__init__()
        self.strides = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.strides.append(args[0].stride())
        return function(*args, **(kwargs or {}))


@pytest.mark.not_in_mode("contiguous", reason="images have that layout there")
@pytest.mark.parametrize("fold", ["0", "1"])
def test_images_keep_their_layout_where_metrics_run_apart(fold):
    options = make_options(5, 1, 1, OutputMode.All)
    module = Images()
    sgd = optim.SGD(module.parameters(), lr=0.1)
    images, targets = torch.rand(5 * 8, 1, 28, 28), torch.randint(K, (5 * 8,))
    with switched(fold):
        model = poptorch.trainingModel(module, options, sgd)
        model(images, targets)
        with Convolved() as convolved:
            model(images, targets)
    assert convolved.strides == [(28 * 28, 1, 28, 1)] * 5  # channels_last


class Reporting(nn.Module):
    """Returns what its loss and its report make of one view of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = weight(C)

    def forward(self, x):
        row = self.weight.view(1, -1)
        loss = poptorch.identity_loss((x.mean(0) * row).pow(2).mean(), "mean")
        return row.abs().sum().reshape(1), loss


def test_metrics_of_weights_are_those_before_the_update():
    def reported(fold):
        module = Reporting()
        sgd = optim.SGD(module.parameters(), lr=1.0)
        options = make_options(5, 1, 1, OutputMode.All)
        model = poptorch.trainingModel(module, options, sgd)
        return run(fold, lambda: model, [[torch.ones(5 * B, C)]])[0][0]

    looped = reported("0")
    assert len(set(looped[0].tolist())) == 5
    torch.testing.assert_close(reported("1"), looped, rtol=0, atol=0)


def test_a_second_executor_goes_on_bit_by_bit():
    """The first call of an executor runs both ways and leaves no trace."""
    names = ["linear", "attention", "conv"]

    def run(interrupted_after):
        with switched("1") as said:
            module = Steps(names)
            options = make_options(2, 2, 1, OutputMode.All)
            sgd = optim.SGD(module.parameters(), lr=0.05)
            executor = poptorch.trainingModel(module, options, sgd)
            outputs = []
            for i in range(4):
                if i == interrupted_after:
                    executor.destroy()
                    executor = poptorch.trainingModel(module, options, sgd)
                outputs.append(executor(*make_inputs(8, i)))
            executor.copyWeightsToHost()
            executor.destroy()
        assert folded_in(said) == 2
        return outputs, module.state_dict()

    whole = run(None)
    torch.testing.assert_close(run(1), whole, rtol=0, atol=0)


def test_times_are_those_of_micro_batches():
    with switched("1") as said:
        options = make_options(4, 1, 2, OutputMode.All)
        executor = poptorch.inferenceModel(Steps(["linear"]), options)
        for _ in range(2):
            executor(make_inputs(16, 0)[0])
            counters = executor.getPerfCounters()
            taken = counters["input_complete"][0]
            assert len(taken) == 8
            assert taken == sorted(taken)
            assert all(o >= t for t, o in zip(taken, counters["output"][0]))
            assert executor.getComputeLatency()[0] > 0
        executor.destroy()
    assert folded_in(said) == 8
