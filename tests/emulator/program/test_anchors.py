# SPDX-License-Identifier: Apache-2.0
"""Tensors of the program and of its updates that become visible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import ipufit.emulator as poptorch
from ipufit.emulator import CommGroupType, OutputMode, VariableRetrievalMode
from tests.emulator._models import ONE, Function, Model, make_options, wrap


def anchoring(anchors, **settings):
    options = poptorch.Options()
    for name, value in settings.items():
        getattr(options, name)(*(value if isinstance(value, tuple) else (value,)))
    for short, anchor in anchors.items():
        options.anchorTensor(
            short, *(anchor if isinstance(anchor, tuple) else (anchor,))
        )
    return options


def infer(function, anchors, **settings):
    options = anchoring(anchors, **settings)
    return poptorch.inferenceModel(Function(function), options)


# Values -----------------------------------------------------------------------


def test_results_inside_the_model_are_seen():
    executor = infer(
        lambda self, x: (x * 2 + 1).relu(),
        {"product": "Mul:0", "sum": "Add:0", "x": "input"},
    )
    assert executor(torch.tensor([-3.0, 1.0])).tolist() == [0, 3]
    assert executor.getAnchoredTensor("product").tolist() == [-6, 2]
    assert executor.getAnchoredTensor("sum").tolist() == [-5, 3]
    assert executor.getAnchoredTensor("x").tolist() == [-3, 1]


def test_a_value_is_that_of_its_moment_whatever_is_done_to_it_later():
    def overwrite(self, x):
        y = x * 2
        y.add_(1)
        y.mul_(10)
        return y

    executor = infer(overwrite, {"first": "Mul:0", "second": "Add:0"})
    assert executor(ONE).tolist() == [30]
    assert executor.getAnchoredTensor("first").tolist() == [2]
    assert executor.getAnchoredTensor("second").tolist() == [3]


def test_a_weight_is_what_a_micro_batch_computes_with():
    options = anchoring(
        {"w": "weight", "calls": "calls"}, deviceIterations=3, outputMode=OutputMode.All
    )
    _, executor = wrap(options=options)
    executor(torch.ones(3))
    assert executor.getAnchoredTensor("w").tolist() == [0, -1, -2]
    assert executor.getAnchoredTensor("calls").tolist() == [0, 1, 2]


# What else is returned --------------------------------------------------------


def test_outputs_are_what_they_are_without_anchors():
    def several(self, x):
        return {"sum": x + 1, "constant": torch.ones(2), "word": "w"}, x * 2

    seen = infer(several, {"sum": "Add:0", "x": "input"})(ONE)
    plain = poptorch.inferenceModel(Function(several))(ONE)
    assert repr(seen) == repr(plain)


def test_a_training_model_without_outputs_has_no_loss():
    """All its operators go (PopTorch, `LowerToPopartFactories.cpp`)."""
    _, executor = wrap(
        Function(quiet, weight=nn.Parameter(torch.zeros(1))),
        anchoring({"product": "Mul:0"}),
    )
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        executor(ONE * 3)


def quiet(self, x):
    poptorch.identity_loss(self.weight * x, reduction="sum")


# Modes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ((OutputMode.All,), [0, 2, 4, 6, 8, 10, 12, 14]),
        ((OutputMode.Final,), [12, 14]),
        ((OutputMode.Sum,), [24, 32]),
        ((OutputMode.EveryN, 2), [4, 6, 12, 14]),
    ],
)
def test_anchors_come_back_as_the_outputs_do(mode, expected):
    executor = infer(
        lambda self, x: x * 2,
        {"product": "Mul:0"},
        deviceIterations=4,
        replicationFactor=2,
        outputMode=mode,
    )
    assert executor(torch.arange(8.0)).tolist() == expected
    assert executor.getAnchoredTensor("product").tolist() == expected


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.EveryN, OutputMode.Sum])
def test_the_mode_of_an_anchor_has_no_effect_and_that_is_said(mode, caplog):
    executor = infer(
        lambda self, x: x * 2,
        {"product": ("Mul:0", mode, 2)},
        deviceIterations=4,
        outputMode=OutputMode.Final,
    )
    executor(torch.arange(4.0))
    assert executor.getAnchoredTensor("product").tolist() == [6]
    assert "The output mode of anchor 'product' has no effect" in caplog.text
    assert "FINAL" in caplog.text


@pytest.mark.parametrize(
    ("mode", "expected"),
    [((OutputMode.Sum,), [3, 1]), ((OutputMode.EveryN, 5), [1, 5])],
)
def test_anchors_without_a_mode_take_over_that_of_the_options(mode, expected):
    options = anchoring({"free": "a", "fixed": ("b", OutputMode.All)}, outputMode=mode)
    anchors = poptorch.inferenceModel(nn.Identity(), options).options.anchored_tensors
    assert anchors["free"] == ["a", True, *expected]
    assert anchors["fixed"] == ["b", False, OutputMode.All, 1]


# Names ------------------------------------------------------------------------


def test_unknown_names_are_refused_with_those_that_are_close():
    executor = infer(lambda self, x: x * 2, {"product": "Mul:1"})
    with pytest.raises(
        poptorch.Error, match=r"anchorTensor\('product', 'Mul:1'\).*mean 'Mul:0'"
    ):
        executor(ONE)
    assert not executor.isCompiled()


def test_values_outlive_the_attachment_but_no_compilation():
    executor = infer(lambda self, x: x * 2, {"x": "input"})
    executor(ONE)
    executor.detachFromDevice()
    assert executor.getAnchoredTensor("x").tolist() == [1]
    executor.destroy()
    executor.compile(torch.ones(2))
    with pytest.raises(AssertionError, match="No tensor with name x found"):
        executor.getAnchoredTensor("x")


# Gradients, updated weights and optimiser tensors that are anchored -----------------

MEAN = poptorch.MeanReductionStrategy


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(2, 1)

    def forward(self, x, y):
        return mse_loss(self.layer(x), y)


def data(rows):
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 2, generator=generator),
        torch.randn(rows, 1, generator=generator),
    )


def anchored(options, strategy=MEAN.Post):
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    for name in ("weight", "bias"):
        options.anchorTensor(f"gradient of {name}", f"Gradient___layer.{name}")
        options.anchorTensor(f"new {name}", f"UpdatedVar___layer.{name}")
    return options


def run_by_hand(D, G, R, lr):  # noqa: N803
    """Gradients of each micro-batch, and the weights after its update."""
    model = Regression()
    x, y = data(2 * D * G * R)
    gradients, updated = [], []
    for d in range(D):
        batch = range(d * G * R, (d + 1) * G * R)
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for k in batch:
            rows = slice(2 * k, 2 * k + 2)
            found = torch.autograd.grad(
                model(x[rows], y[rows]), list(model.parameters())
            )
            gradients.append(found)
            sums = [total + new for total, new in zip(sums, found)]
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), sums):
                parameter -= lr * total / (G * R)
        updated += [[p.detach().clone() for p in model.parameters()] for _ in batch]
    return gradients, updated


small = st.integers(1, 3)


@given(
    small,
    small,
    small,
    st.sampled_from([MEAN.Post, MEAN.Running]),
    st.sampled_from([1.0, 64.0]),
)
def test_they_equal_those_of_a_plain_loop(D, G, R, strategy, scaling):  # noqa: N803
    model = Regression()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=scaling)
    options = anchored(make_options(D, G, R, OutputMode.All), strategy)
    executor = poptorch.trainingModel(model, options, sgd)
    executor(*data(2 * D * G * R))
    gradients, updated = run_by_hand(D, G, R, lr=0.1)
    for index, name in enumerate(("weight", "bias")):
        expected = torch.cat([found[index] for found in gradients]) * scaling
        actual = executor.getAnchoredTensor(f"gradient of {name}")
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            executor.getAnchoredTensor(f"new {name}"),
            torch.cat([values[index] for values in updated]),
        )


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ((OutputMode.All,), [0, 1, 2, 3]),
        ((OutputMode.Final,), [3]),
        ((OutputMode.EveryN, 2), [1, 3]),
    ],
)
def test_they_come_back_as_the_outputs_do(mode, kept):
    model = Regression()
    sgd = poptorch.optim.SGD(model.parameters(), lr=0.1)
    options = anchored(make_options(4, 1, 1, *mode))
    executor = poptorch.trainingModel(model, options, sgd)
    executor(*data(8))
    gradients, updated = run_by_hand(4, 1, 1, lr=0.1)
    torch.testing.assert_close(
        executor.getAnchoredTensor("gradient of bias"),
        torch.cat([gradients[step][1] for step in kept]),
    )
    torch.testing.assert_close(
        executor.getAnchoredTensor("new bias"),
        torch.cat([updated[step][1] for step in kept]),
    )


def test_the_tensors_of_the_optimiser_are_those_after_the_update():
    options = poptorch.Options().deviceIterations(3).outputMode(OutputMode.All)
    options.anchorTensor("velocity", "Accl1___weight")
    options.anchorTensor("scaling", "lossScaling_FLOAT")
    options.anchorTensor("momentum", "scaledMomentum1___specific___weight")
    model = Model()
    sgd = poptorch.optim.SGD(
        model.parameters(),
        lr=1.0,
        momentum=0.5,
        loss_scaling=4.0,
        use_combined_accum=False,
    )
    executor = poptorch.trainingModel(model, options, sgd)
    executor(torch.ones(3))
    velocity = executor.getAnchoredTensor("velocity") / 4
    assert velocity.tolist() == [1, 1.5, 1.75]
    assert executor.getAnchoredTensor("scaling").tolist() == [4, 4, 4]
    assert executor.getAnchoredTensor("momentum").tolist() == [0.5] * 3


def test_each_replica_shows_the_element_of_its_group():
    def forward(self, x):
        return poptorch.identity_loss(self.factor * x, "sum")

    options = poptorch.Options().replicationFactor(2).outputMode(OutputMode.All)
    for short, name in (
        ("g", "Gradient___factor"),
        ("w", "UpdatedVar___factor"),
        ("v", "Accl1___factor"),
    ):
        options.anchorTensor(short, name)
    model = Function(forward, factor=nn.Parameter(torch.tensor([[1.0], [2.0]])))
    adam = poptorch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.5))
    executor = poptorch.trainingModel(model, options, adam)
    executor.factor.replicaGrouping(
        CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup
    )
    executor(torch.tensor([3.0, 5.0]))
    assert executor.getAnchoredTensor("g").tolist() == [3, 5]
    assert executor.getAnchoredTensor("w").tolist() == [1, 2]
    assert executor.getAnchoredTensor("v").tolist() == [1.5, 2.5]  # means over two
