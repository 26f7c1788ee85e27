# SPDX-License-Identifier: Apache-2.0
"""Compile, attach, detach, destroy."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator import ConnectionType
from tests.emulator._models import ONE, Model, on_device, said, wrap

NOT_COMPILED = "Model has not been compiled or has been destroyed"

# Compile ----------------------------------------------------------------------


def test_compiling_runs_nothing_and_attaches():
    model, executor = wrap()
    assert not executor.isCompiled()
    assert not executor.isAttachedToDevice()
    executor.compile(ONE)
    assert executor.isCompiled()
    assert executor.isAttachedToDevice()
    assert model.weight.item() == 0
    assert model.calls.item() == 0


def test_compiling_twice_is_ignored_with_a_warning(caplog):
    _, executor = wrap()
    executor.compile(ONE)
    assert said(caplog) == []
    executor.compile(torch.ones(7))
    assert "Call to compile() ignored" in caplog.text
    executor(ONE)


def test_on_demand_attaches_when_compiled(monkeypatch):
    """PopTorch, `_compile`: loading the engine attaches (PopART, `devicex.cpp`)."""
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    on_demand = poptorch.Options().connectionType(ConnectionType.OnDemand)
    _, first = wrap(options=on_demand)
    first.compile(ONE)
    assert first.isAttachedToDevice()
    _, second = wrap(options=on_demand)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        second.compile(ONE)
    assert second.isCompiled()
    assert not second.isAttachedToDevice()
    first.detachFromDevice()
    second(ONE)
    assert second.isAttachedToDevice()


def test_offline_models_only_compile():
    _, executor = wrap(options=poptorch.Options().connectionType(ConnectionType.Never))
    executor.compile(ONE)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline"):
        executor(ONE)
    with pytest.raises(AssertionError, match="attach to an offline device"):
        executor.attachToDevice()


# Attach and detach ------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        "attachToDevice",
        "detachFromDevice",
        "copyWeightsToHost",
        "copyWeightsToDevice",
    ],
)
def test_nothing_moves_before_compiling_or_after_destroying(method):
    model, executor = wrap()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        getattr(executor, method)()
    executor(ONE)
    executor.destroy()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        getattr(executor, method)()
    assert model.weight.item() == -1


def test_host_edits_while_detached_are_uploaded_with_attaching():
    model, executor = wrap()
    executor(ONE)
    executor.detachFromDevice()
    model.weight.data.fill_(10)
    assert on_device(executor) == 10


def test_destroying_twice_is_harmless():
    _, executor = wrap()
    executor(ONE)
    executor.destroy()
    executor.destroy()


def test_a_destroyed_executor_compiles_again_and_holds_the_weights_only():
    """PopTorch, `python/_poplar_executor.py`: only `__init__` wraps the module."""
    model, executor = wrap()
    executor(ONE)
    executor.destroy()
    assert type(model) is Model
    executor(torch.ones(2))
    assert model.weight.item() == -3
    assert type(model) is Model
    assert type(model.weight).__name__ == "PoptorchParameter"
    with pytest.raises(poptorch.Error, match="model was never wrapped"):
        executor.destroy()
    assert not executor.isCompiled()


def test_a_destroyed_executor_leaves_the_module_to_the_next():
    model, first = wrap()
    first(ONE)
    first.destroy()
    _, second = wrap(model)
    second(ONE)
    assert model.weight.item() == -2
    first.destroy()
    assert model.copyWeightsToHostIfNeeded() is False
