# SPDX-License-Identifier: Apache-2.0
"""Tensors of the forward pass that become visible."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode
from tests.emulator._models import ONE, Function, wrap


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


def test_an_input_is_seen_as_it_came():
    def write(self, x):
        x += 1
        return x

    executor = infer(write, {"x": "input"})
    executor(ONE.clone())
    assert executor.getAnchoredTensor("x").tolist() == [1]


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


def test_names_like_no_other_are_refused_without_a_guess():
    executor = infer(lambda self, x: x * 2, {"product": "zzz"})
    with pytest.raises(poptorch.Error, match=r"of that name\. `getTensorNames\(\)`"):
        executor.compile(ONE)


def test_floating_point_exceptions_and_anchors_get_along():
    options = anchoring({"product": "Mul:0"})
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.inferenceModel(Function(lambda self, x: 1 / (x * 2)), options)
    executor(ONE)
    assert executor.getAnchoredTensor("product").tolist() == [2]
    assert "Mul:0" in executor.getTensorNames()
    with pytest.raises(poptorch.Error, match="Floating point exception"):
        executor(ONE * 0)


def test_without_anchors_there_is_nothing_to_find():
    plain = poptorch.inferenceModel(nn.ReLU())
    plain(ONE)
    with pytest.raises(AssertionError, match="there are: none"):
        plain.getAnchoredTensor("x")


def test_values_outlive_the_attachment_but_no_compilation():
    executor = infer(lambda self, x: x * 2, {"x": "input"})
    executor(ONE)
    executor.detachFromDevice()
    assert executor.getAnchoredTensor("x").tolist() == [1]
    executor.destroy()
    executor.compile(torch.ones(2))
    with pytest.raises(AssertionError, match="No tensor with name x found"):
        executor.getAnchoredTensor("x")
