# SPDX-License-Identifier: Apache-2.0
"""Folded float16 against the micro-batches one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import max_pool2d

import ipufit.emulator as poptorch
from tests.emulator._models import Function
from tests.emulator.folding.test_rules import (
    ATTRIBUTES,
    CASES,
    B,
    K,
    X,
    rest_of,
    run,
    weight,
)
from tests.modes import folding_of


@pytest.fixture(autouse=True)
def _fold_wherever_possible(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "1")


def halved(value):
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    if not is_float:
        return value
    return nn.Parameter(value.detach().half()) if value.requires_grad else value.half()


def compare(function, inputs, monkeypatch, **attributes):
    """Run both ways; give the folding."""
    folded, _, folding = run(function, inputs, training=False, **attributes)
    assert folding.failure is None
    monkeypatch.setenv("IPUFIT_EMULATOR_FOLD", "0")
    looped, _, _ = run(function, inputs, training=False, **attributes)
    torch.testing.assert_close(folded, looped, rtol=4e-3, atol=4e-3, equal_nan=True)
    return folding


@pytest.mark.parametrize("what", CASES)
def test_programs_give_what_the_loop_gives(what, monkeypatch):
    function, *inputs = CASES[what]
    attributes = {name: halved(value) for name, value in ATTRIBUTES.items()}
    try:
        compare(function, [halved(x) for x in inputs], monkeypatch, **attributes)
    except (poptorch.Error, RuntimeError) as error:
        pytest.skip(f"no half precision: {str(error)[:60]}")


def layers(m, x):
    y = torch.relu(torch.nn.functional.linear(x, m.A, m.C))
    return (y.softmax(-1) + y.mean(-1, keepdim=True)).reshape(len(x), -1).float()


def test_layers_fold_as_a_whole(monkeypatch):
    weights = {"A": halved(weight(6, 6)), "C": halved(weight(6))}
    folding = compare(layers, [X.half()], monkeypatch, **weights)
    assert rest_of(folding) == []
    assert folding.is_verified([K])


def test_convolutions_fold_as_a_whole(monkeypatch):
    def convolve(m, x):
        y = max_pool2d(torch.conv2d(x, m.A), 2).relu()
        return torch.conv2d(y, m.C).flatten(1)

    weights = {"A": halved(weight(4, 1, 3, 3)), "C": halved(weight(2, 4, 3, 3))}
    images = torch.rand(K * B, 1, 10, 10).half()
    folding = compare(convolve, [images], monkeypatch, **weights)
    assert rest_of(folding) == []


def test_what_would_be_rounded_elsewhere_runs_apart(monkeypatch):
    def errors(m, x):  # folded, it has sums and quotients of its own
        return torch.nn.functional.mse_loss(x, x * 2).reshape(1)

    folding = compare(errors, [X.half()], monkeypatch)
    assert "mse_loss" in rest_of(folding)


def test_rounding_at_random_runs_in_a_loop():
    options = poptorch.Options().deviceIterations(K)
    options.Precision.enableStochasticRounding(True)
    executor = poptorch.inferenceModel(Function(lambda m, x: x * 1.001), options)
    executor(X.half())
    assert folding_of(executor) is None
    executor.destroy()
