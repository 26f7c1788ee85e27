# SPDX-License-Identifier: Apache-2.0
"""`MultiConv` changes nothing and checks its settings."""

from __future__ import annotations

import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, assert_device_equals_host

X = torch.linspace(-1, 1, 32).reshape(1, 2, 16)


def module(forward):
    torch.manual_seed(0)
    return Function(forward, layer=torch.nn.Conv1d(2, 3, 3))


def test_convolutions_inside_are_as_outside():
    def forward(self, x):
        with poptorch.MultiConv():
            y = self.layer(x)
            return y + self.layer(x.abs())

    assert_device_equals_host(module(forward), X)
