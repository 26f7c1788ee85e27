# SPDX-License-Identifier: Apache-2.0
"""Executors: wrap, compile, attach, call, detach, destroy."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import ConnectionType
from tests.emulator._models import ONE, Function, Model, on_device, said, wrap

NOT_COMPILED = "Model has not been compiled or has been destroyed"

# Wrapping ---------------------------------------------------------------------


def test_wrapping_twice_for_training_is_an_error():
    model, executor = wrap()
    for again in (model, executor):
        with pytest.raises(RuntimeError, match=r"model\.destroy\(\)"):
            poptorch.trainingModel(again)


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


@pytest.mark.parametrize("wrapper", [poptorch.inferenceModel, poptorch.trainingModel])
def test_an_executor_can_not_be_copied(wrapper):
    executor = wrapper(Model())
    with pytest.raises(RecursionError, match=r"copy\.deepcopy\(executor\.model\)"):
        copy.copy(executor)
    executor(ONE)


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


# Calls, delegation to the module, and weights between training and inference --------


def weight_on(executor):
    return executor(ONE)[1].item()


# Training to inference --------------------------------------------------------


def test_following_works_across_detaching_and_destroying():
    _, training = wrap()
    inference = poptorch.inferenceModel(training)
    inference(ONE)
    training(ONE)
    training.detachFromDevice()
    assert weight_on(inference) == -1
    inference.detachFromDevice()
    training(ONE)
    assert weight_on(inference) == -2
    training(ONE)
    training.destroy()
    assert weight_on(inference) == -3


def test_inference_never_changes_the_trainer():
    model, training = wrap()
    inference = poptorch.inferenceModel(training)
    training(ONE)
    with torch.no_grad():
        model.weight.fill_(5)
    inference(ONE)
    inference.copyWeightsToDevice()
    assert weight_on(inference) == 5
    assert on_device(training) == -1


# Delegation -------------------------------------------------------------------


def test_unknown_attributes_are_the_modules():
    model = Function(lambda m, x: x, name="plain", inner=nn.Linear(1, 1))
    executors = [poptorch.trainingModel(model), poptorch.inferenceModel(model)]
    for executor in executors:
        assert executor.name == "plain"
        assert executor.inner is model.inner
        assert list(executor.state_dict()) == ["inner.weight", "inner.bias"]
        assert len(list(executor.parameters())) == 2
        with pytest.raises(AttributeError, match="missing"):
            executor.missing  # noqa: B018
        executor.name = "changed"
        assert model.name == "plain"
    assert executors[0].model is model


# Calls ------------------------------------------------------------------------


def test_wrong_arguments_of_a_later_call_train_nothing():
    model, executor = wrap()
    executor(ONE)
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        executor(torch.ones(2))
    assert model.weight.item() == -1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_input_inside", [True, False])
def test_calls_work_in_any_mode_of_the_host(mode, is_input_inside):
    (model, training), inference = wrap(), poptorch.inferenceModel(Model())
    outside = torch.ones(1)
    with mode():
        x = torch.ones(1) if is_input_inside else outside
        training(x)
        training.detachFromDevice()
        training(x)
        assert inference(x)[1].item() == 0
    training(x)
    assert inference(x)[1].item() == 0
    assert model.weight.item() == -3


def test_what_forward_computed_while_tracing_is_not_kept():
    def forward(m, x):
        out = x * 2
        references.append(weakref.ref(out))
        return out

    references = []
    executor = poptorch.inferenceModel(Function(forward))
    executor(ONE)
    gc.collect()
    assert [reference() for reference in references] == [None]


# What a call returns ----------------------------------------------------------------


def forward(self, x):
    made = torch.zeros(2)
    return {"x": x, "nested": [x * 2, (x.sum(), None)], "made": made}, self.table


def tensors_of_the_device(outputs):
    outputs = outputs[0]
    return [
        outputs["x"],
        outputs["nested"][0],
        outputs["nested"][1][0],
        outputs["made"],
    ]


@pytest.fixture
def returned():
    module = Function(forward, table=torch.ones(2))
    executor = poptorch.inferenceModel(module)
    with pytest.warns(UserWarning, match="expected to be on the IPU but is on cpu"):
        outputs = executor(torch.ones(2))
    return module, outputs


def test_outputs_refuse_to_go_backward_and_to_be_pickled(returned):
    """Each has a `backward` of its own (PopTorch, `_assign_backward_error`)."""
    for tensor in tensors_of_the_device(returned[1]):
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called"):
            tensor.backward()
        with pytest.raises(TypeError):  # it takes no arguments
            tensor.backward(torch.ones(2))
        with pytest.raises(
            (AttributeError, pickle.PicklingError), match="local object"
        ):
            torch.save(tensor, io.BytesIO())
        torch.save(tensor.clone(), io.BytesIO())
        assert torch.equal(copy.deepcopy(tensor), tensor)


# Functions called around every compilation ------------------------------------------


@pytest.fixture
def register():
    """Registers hooks for the time of a test."""
    handles = []

    def register_one(when, hook):
        handles.append(getattr(poptorch, f"register{when}CompileHook")(hook))
        return handles[-1]

    yield register_one
    for handle in handles:
        handle.remove()


def test_a_hook_may_remove_itself(register):
    events = []

    def once():
        events.append("once")
        handle.remove()

    handle = register("Pre", once)
    register("Pre", lambda: events.append("always"))
    for _ in range(2):
        poptorch.inferenceModel(nn.Identity()).compile(ONE)
    assert events == ["once", "always", "always"]


def test_post_compile_hooks_run_after_a_failed_trace_too(register):
    def forward(m, x):
        events.append("forward")
        raise poptorch.createPoptorchError("on purpose")

    events = []
    register("Post", lambda: events.append("post"))
    with pytest.raises(poptorch.Error, match="on purpose"):
        poptorch.inferenceModel(Function(forward)).compile(ONE)
    assert events == ["forward", "post"]


def test_an_error_in_a_hook_is_the_users(register):
    def fail():
        raise KeyError("mine")

    handle = register("Pre", fail)
    executor = poptorch.inferenceModel(nn.Identity())
    with pytest.raises(KeyError, match="mine"):
        executor(ONE)
    assert not executor.isCompiled()
    handle.remove()
    assert executor(ONE).item() == 1
