# SPDX-License-Identifier: Apache-2.0
"""`MultiConv` changes nothing and checks its settings."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, assert_device_equals_host

X = torch.linspace(-1, 1, 32).reshape(1, 2, 16)
PARALLEL = poptorch.MultiConvPlanType.Parallel


def module(forward):
    torch.manual_seed(0)
    return Function(forward, layer=torch.nn.Conv1d(2, 3, 3))


def test_convolutions_inside_are_as_outside():
    def forward(self, x):
        with poptorch.MultiConv():
            y = self.layer(x)
            return y + self.layer(x.abs())

    assert_device_equals_host(module(forward), X)


def test_it_can_be_used_again():
    multi = poptorch.MultiConv()

    def forward(self, x):
        with multi:
            y = self.layer(x)
        with multi:
            return y + self.layer(x * 2)

    assert_device_equals_host(module(forward), X)


def nested(self, x):
    with poptorch.MultiConv(), poptorch.MultiConv():
        return self.layer(x)


def empty(self, x):
    x = self.layer(x)
    with poptorch.MultiConv():
        return x * 2


@pytest.mark.parametrize(
    ("forward", "fragment"),
    [
        (nested, "Nested poptorch.MultiConv is not supported"),
        (empty, "Unexpected end_multi_conv"),
    ],
)
def test_compiling_refuses_it_nested_or_empty(forward, fragment):
    assert forward(module(forward), X).shape == (1, 3, 14)  # the host does not mind
    with pytest.raises(poptorch.Error, match=fragment):
        poptorch.inferenceModel(module(forward))(X)


def test_errors_inside_come_out():
    def forward(self, x):
        with poptorch.MultiConv():
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        poptorch.inferenceModel(module(forward))(X)


SETTINGS = {
    "availableMemoryProportions": ([0.8, [0.1, 1.5], (0.1,), None], [1, [], [1]]),
    "partialsTypes": ([torch.half, [torch.float], []], [None, "half", [None]]),
    "enableConvDithering": ([True, [False], None], [1, ["yes"]]),
    "planType": ([PARALLEL, None], [0, "parallel"]),
    "perConvReservedTiles": ([120], [1.0, None]),
    "cycleBackOff": ([0.3, 7.0], [1, None]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_checked_and_can_be_chained(name):
    multi = poptorch.MultiConv()
    good, bad = SETTINGS[name]
    for value in good:
        assert getattr(multi, name)(value) is multi
    for value in bad:
        with pytest.raises((AssertionError, ValueError)):
            getattr(multi, name)(value)


@pytest.mark.parametrize("name", ["partialsTypes", "enableConvDithering"])
def test_two_settings_raise_value_errors(name):
    with pytest.raises(ValueError, match="Got 'half'"):
        getattr(poptorch.MultiConv(), name)("half")
