# SPDX-License-Identifier: Apache-2.0
"""Calls, delegation to the module, and weights between training and inference."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, Function, Model, on_device, wrap


def weight_on(executor):
    return executor(ONE)[1].item()


# Training to inference --------------------------------------------------------


def test_an_inference_model_made_first_does_not_follow():
    model = Model()
    inference = poptorch.inferenceModel(model)
    _, training = wrap(model)
    inference(ONE)
    training(ONE)
    assert weight_on(inference) == 0
    training.copyWeightsToHost()
    assert weight_on(inference) == 0
    inference.copyWeightsToDevice()
    assert weight_on(inference) == -1


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


def test_the_mode_is_that_of_the_wrapping():
    model = Function(lambda m, x: x + m.training)
    executor = poptorch.inferenceModel(model)
    model.eval()
    assert executor(ONE).item() == 2


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


def test_outputs_of_the_host_are_the_tensors_themselves(returned):
    module, outputs = returned
    assert outputs[1] is module.table
    torch.save(outputs[1], io.BytesIO())
