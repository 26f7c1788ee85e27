# SPDX-License-Identifier: Apache-2.0
"""What scripts learn about the machine."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch


def test_there_is_no_hardware():
    assert poptorch.ipuHardwareIsAvailable() is False
    assert poptorch.ipuHardwareIsAvailable(16) is False
    with pytest.raises(AssertionError, match="No IPU hardware"):
        poptorch.ipuHardwareVersion()


def test_outside_a_trace_nothing_runs_on_an_ipu():
    assert poptorch.isRunningOnIpu() is False


def test_torch_is_reachable_as_through_poptorch():
    import torch

    assert poptorch.torch is torch
