# SPDX-License-Identifier: Apache-2.0
"""The pod, the IPU Model or nothing: what a program is compiled for."""

import logging
import math
import os

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import ConnectionType, Options
from tests.emulator._models import Function

MODEL, SMALL = "POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"


def compiled(options):
    executor = poptorch.inferenceModel(nn.Identity(), options)
    executor.compile(torch.ones(options.replication_factor))
    return executor


# What scripts ask for ---------------------------------------------------------


def test_the_emulated_pod_is_hardware(monkeypatch):
    monkeypatch.delenv("IPUFIT_EMULATOR_IPUS", raising=False)
    assert poptorch.ipuHardwareIsAvailable() is True
    assert poptorch.ipuHardwareIsAvailable(64)
    assert not poptorch.ipuHardwareIsAvailable(65)
    assert poptorch.ipuHardwareVersion() == 2
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    assert not poptorch.ipuHardwareIsAvailable(2)
    executor = compiled(Options())
    assert executor.isAttachedToDevice()
    assert poptorch.ipuHardwareIsAvailable() is True  # though it is in use


@pytest.mark.parametrize("variable", [MODEL, SMALL])
def test_the_ipu_model_is_no_hardware(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert poptorch.ipuHardwareIsAvailable() is False
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()
    monkeypatch.setenv(variable, "0")
    assert poptorch.ipuHardwareIsAvailable() is True


# Which one --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "asked", "expected"),
    [
        ({}, None, False),
        ({MODEL: "1"}, None, True),
        ({SMALL: "1"}, None, True),
        ({MODEL: "0", SMALL: "1"}, None, True),
        ({MODEL: "0", SMALL: "0"}, None, False),
        ({MODEL: "1"}, False, False),
        ({}, True, True),
    ],
)
def test_the_option_decides_and_else_the_environment(
    monkeypatch, variables, asked, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = Options() if asked is None else Options().useIpuModel(asked)
    options.replicationFactor(3)  # hardware has no group of three IPUs
    if expected:
        compiled(options)
    else:
        with pytest.raises(poptorch.Error, match="minimum of 4"):
            compiled(options)


# The IPU Model ----------------------------------------------------------------


def test_the_ipu_model_takes_no_ipus_of_the_pod(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    first = compiled(Options())
    assert first.isAttachedToDevice()
    second = compiled(Options().useIpuModel(True).replicationFactor(3))
    assert second(torch.ones(3)).tolist() == [1, 1, 1]
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        compiled(Options().useIpuModel(False))


@pytest.mark.parametrize("asks", ["option", "variable"])
def test_the_ipu_model_neither_stops_at_exceptions_nor_rounds_at_random(
    asks, monkeypatch, caplog
):
    """PopART warns and goes on (`irlowering.cpp`)."""
    options = Options()
    options.Precision.enableFloatingPointExceptions(True)
    options.Precision.enableStochasticRounding(True)
    if asks == "option":
        options.useIpuModel(True)
    else:
        monkeypatch.setenv(MODEL, "1")
    inverse = poptorch.inferenceModel(Function(lambda self, x: 1 / x), options)
    assert inverse(torch.zeros(1)).tolist() == [math.inf]
    for option in ("enableFloatingPointExceptions", "enableStochasticRounding"):
        assert f"Precision.{option}: not on the IPU Model" in caplog.text
    square = poptorch.inferenceModel(Function(lambda self, x: x * x), options)
    x = torch.full((1000,), 1.001).half()
    assert torch.equal(square(x), (x.float() * x.float()).half())


# Offline ----------------------------------------------------------------------


def test_an_offline_target_is_no_device_in_particular():
    with pytest.raises(poptorch.Error, match=r"no device.*useIpuId\(3\)"):
        compiled(Options().useOfflineIpuTarget().useIpuId(3))


@pytest.mark.parametrize(
    "options",
    [
        Options().useIpuModel(True),
        Options().useOfflineIpuTarget(),
        Options().connectionType(ConnectionType.Never),
    ],
    ids=["model", "offline", "never"],
)
def test_cycles_are_counted_on_hardware_only(options):
    with pytest.raises(poptorch.Error, match="only supported on actual IPU hardware"):
        compiled(options.clone().logCycleCount(True))
    assert compiled(options.clone().logCycleCount(False)).isCompiled()


# Hardware ---------------------------------------------------------------------


@pytest.mark.parametrize(("num_ipus", "reserved"), [(3, 4), (5, 8), (33, 64)])
def test_hardware_has_groups_of_powers_of_two(num_ipus, reserved, caplog):
    """In every mode (PopTorch, `CompilerImpl.cpp`)."""
    with pytest.raises(
        poptorch.Error, match=rf"use of {num_ipus} IPUs.*minimum of {reserved} in order"
    ):
        compiled(Options().replicationFactor(num_ipus))
    compiled(Options().replicationFactor(num_ipus).autoRoundNumIPUs(True))
    assert f"Reserving {reserved} IPUs" in caplog.text
    assert f"{reserved - num_ipus} are idle" in caplog.text


def test_the_number_of_ipus_is_refused_before_the_stages():
    """PopTorch asks for IPUs first (`Compiler.cpp`, `tests/pipelining_test.py`)."""

    class Stages(torch.nn.Module):
        def forward(self, x):
            for ipu in range(3):
                with poptorch.Block(f"stage {ipu}", ipu_id=ipu):
                    x = x * 6
            return x

    with pytest.raises(poptorch.Error, match=r"use of 3 IPUs.*minimum of 4 in order"):
        poptorch.inferenceModel(Stages())(torch.ones(4, 5))
    rounded = Options().autoRoundNumIPUs(True)
    with pytest.raises(poptorch.Error, match="number of pipeline stages"):
        poptorch.inferenceModel(Stages(), rounded)(torch.ones(4, 5))


def test_idle_ipus_are_held_all_the_same(monkeypatch):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "4")
    three = Options().replicationFactor(3).autoRoundNumIPUs(True)
    executor = compiled(three)
    with pytest.raises(poptorch.Error, match="4 of the 4 emulated IPUs are in use"):
        compiled(Options())
    executor.detachFromDevice()
    compiled(Options())


# The cache of executables, which the emulator hasn't got ----------------------------


@pytest.fixture
def info(caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    return caplog


def test_nothing_is_cached_and_that_is_said(tmp_path, info):
    cache = tmp_path / "cache"
    compiled(poptorch.Options().enableExecutableCaching(str(cache)))
    assert "writes nothing into the cache" in info.text
    assert os.listdir(tmp_path) == []


def shared_by_two(path):
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    return options if path is None else options.enableExecutableCaching(str(path))


@pytest.mark.parametrize("place", [".", "a", "a/b"])
def test_processes_share_a_folder_that_exists_or_can_be_made(tmp_path, info, place):
    compiled(shared_by_two(tmp_path / place))
    assert "would compile" not in info.text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["file", "file/cache"])
def test_processes_need_a_folder_to_write_to(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="can't be written to"):
        compiled(shared_by_two(tmp_path / place))
