# SPDX-License-Identifier: Apache-2.0
"""Wrap, compile, attach, detach, destroy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import ConnectionType
from tests.emulator._models import ONE, Model, on_device, said, wrap

NOT_COMPILED = "Model has not been compiled or has been destroyed"

# Wrapping ---------------------------------------------------------------------


def test_wrapping_twice_for_training_is_an_error():
    model, executor = wrap()
    for again in (model, executor):
        with pytest.raises(RuntimeError, match=r"model\.destroy\(\)"):
            poptorch.trainingModel(again)


def test_any_number_of_inference_models_may_share_a_module():
    model, training = wrap()
    executors = [poptorch.inferenceModel(m) for m in (model, training, model)]
    assert {executor(ONE)[1].item() for executor in executors} == {0}


def test_a_module_can_be_trained_after_its_inference_executor_was_given():
    inference = poptorch.inferenceModel(Model())
    _, training = wrap(inference)
    assert inference(ONE)[1].item() == 0
    training(ONE)
    training.copyWeightsToHost()
    inference.copyWeightsToDevice()
    assert inference(ONE)[1].item() == -1


def test_attributes_of_the_top_are_those_at_wrapping():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = 2.0
            self.child = nn.Module()
            self.child.scale = 2.0

        def forward(self, x):
            return x * self.scale, x * self.child.scale

    model = Scaled()
    executor = poptorch.inferenceModel(model)
    model.scale = model.child.scale = 3.0
    top, child = executor(torch.ones(1))
    assert (top.item(), child.item()) == (2, 3)  # children are shared


def test_what_a_model_is_wrapped_with():
    with pytest.raises(TypeError):
        poptorch.inferenceModel(Model(), None, None)
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        poptorch.inferenceModel(nn.Identity(), {"deviceIterations": 2})


# Compile ----------------------------------------------------------------------


def test_it_is_compiled_and_attached_until_it_is_detached_and_destroyed():
    model, executor = wrap()
    seen = [(executor.isCompiled(), executor.isAttachedToDevice())]
    compile_it = lambda: executor.compile(ONE)  # noqa: E731 - a step as the others
    for step in (compile_it, executor.detachFromDevice, executor.destroy):
        step()
        seen.append((executor.isCompiled(), executor.isAttachedToDevice()))
    assert seen == [(False, False), (True, True), (True, False), (False, False)]
    assert (model.weight.item(), model.calls.item()) == (0, 0)  # nothing has run


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
    _, executor = wrap(options=poptorch.Options().useOfflineIpuTarget())
    executor.compile(ONE)
    assert executor.isCompiled()
    assert not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline"):
        executor(ONE)
    with pytest.raises(AssertionError, match="attach to an offline device"):
        executor.attachToDevice()


# Attach and detach ------------------------------------------------------------


NEEDS_A_PROGRAM = {
    "attach": lambda executor: executor.attachToDevice(),
    "detach": lambda executor: executor.detachFromDevice(),
    "copy to the host": lambda executor: executor.copyWeightsToHost(),
    "copy to the device": lambda executor: executor.copyWeightsToDevice(),
    "copy buffers": lambda executor: executor.copyNamedBuffersToDevice(),
    "save": lambda executor: executor.save("/no/such/folder"),
    "random state": lambda executor: executor.rng_state,
    "set random state": lambda executor: setattr(executor, "rng_state", [1]),
}


@pytest.mark.parametrize("use", NEEDS_A_PROGRAM.values(), ids=NEEDS_A_PROGRAM)
def test_nothing_moves_before_compiling_or_after_destroying(use):
    options = poptorch.Options().updatableNamedBuffers(["calls"])
    model, executor = wrap(options=options)
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        use(executor)
    executor(ONE)
    executor.destroy()
    with pytest.raises(poptorch.Error, match=NOT_COMPILED):
        use(executor)
    assert model.weight.item() == -1


def test_host_edits_while_detached_are_uploaded_with_attaching():
    model, executor = wrap()
    executor(ONE)
    executor.detachFromDevice()
    model.weight.data.fill_(10)
    assert on_device(executor) == 10


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
