# SPDX-License-Identifier: Apache-2.0
"""Functions by which scripts ask for hardware."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch


def test_the_emulated_pod_is_hardware(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    assert poptorch.ipuHardwareIsAvailable() is True
    assert poptorch.ipuHardwareIsAvailable(4) is True
    assert poptorch.ipuHardwareIsAvailable(5) is False
    assert poptorch.ipuHardwareVersion() == 2


@pytest.mark.parametrize("variable", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
def test_the_ipu_model_is_no_hardware(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert poptorch.ipuHardwareIsAvailable() is False
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()
    monkeypatch.setenv(variable, "0")
    assert poptorch.ipuHardwareIsAvailable() is True


def test_ipus_in_use_are_available_hardware(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    executor = poptorch.inferenceModel(poptorch.torch.nn.Identity())
    executor(poptorch.torch.ones(1))
    assert poptorch.ipuHardwareIsAvailable() is True


def test_outside_a_trace_nothing_runs_on_an_ipu():
    assert poptorch.isRunningOnIpu() is False


def test_torch_is_reachable_as_through_poptorch():
    import torch

    assert poptorch.torch is torch
