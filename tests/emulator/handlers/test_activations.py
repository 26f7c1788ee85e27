# SPDX-License-Identifier: Apache-2.0
"""Activations as a device computes them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu

from tests.emulator.handlers._programs import infer, reports, trained


def test_exact_gelu_is_the_tanh_form():
    x = torch.linspace(-4, 4, 50)
    device = infer(gelu, x)
    torch.testing.assert_close(device, gelu(x, approximate="tanh"))
    assert not torch.allclose(device, gelu(x), atol=1e-5)
    assert "the tanh form" in reports(gelu, x)[0]
    assert not reports(lambda x: gelu(x, approximate="tanh"), x)


def test_nothing_before_a_prelu_trains():
    network = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2))
    changed = trained(network, torch.randn(5, 3))
    assert changed == {"2.weight", "2.bias"}
    assert "has no gradient" in reports(network, torch.randn(5, 3), trains=True)[0]
    assert not reports(network, torch.randn(5, 3))
