# SPDX-License-Identifier: Apache-2.0
"""Calls that torch hides from a trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X, assert_device_equals_host

F = nn.functional


def double(x):
    return x * 2


def script(something):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch calls it deprecated
        return torch.jit.script(something)


def swallowed(function, x):
    try:
        return function(x)
    except Exception:  # noqa: BLE001
        return x


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.scripted(x),
        lambda m, x: m.scripted(m.weight),
        lambda m, x: swallowed(m.scripted, x),
        lambda m, x: torch.vmap(double)(x),
    ],
)
def test_calls_that_the_trace_cannot_see_are_refused(function):
    weight = nn.Parameter(torch.ones(2))
    module = Function(function, weight=weight, scripted=script(double))
    with pytest.raises(poptorch.Error, match="cannot be traced"):
        poptorch.inferenceModel(module)(X)


def test_scripted_modules_are_refused():
    module = nn.Sequential(script(nn.Linear(6, 2)))
    with pytest.raises(poptorch.Error, match="ScriptModule"):
        poptorch.inferenceModel(module)(X)


def test_a_module_hidden_in_an_argument_is_refused():
    def forward(m, x):
        return F.triplet_margin_with_distance_loss(
            x, x * 2, x + 1, distance_function=m.distance
        )

    weighted = Function(forward, distance=nn.Bilinear(6, 6, 1))
    with pytest.raises(poptorch.Error, match="cannot be traced"):
        poptorch.inferenceModel(weighted)(X)
    weightless = Function(forward, distance=nn.PairwiseDistance())
    assert_device_equals_host(weightless, X)


def test_a_trace_leaves_tensors_as_they_were():
    picks = Function(lambda m, x: x[:, 0] + x[0])
    poptorch.inferenceModel(picks)(torch.ones(3, 3))
    zero_dimensional = torch.tensor(1)
    assert torch.tensor([zero_dimensional, zero_dimensional]).tolist() == [1, 1]
    assert "__getitem__" not in vars(torch.Tensor)
