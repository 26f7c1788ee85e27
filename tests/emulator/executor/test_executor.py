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

ONE = torch.ones(1)


class Model(nn.Module):
    """In train mode the loss too; a rate of 1 subtracts the input from the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inner = nn.Linear(1, 1)
        self.name = "plain"

    def forward(self, x):
        out = self.weight * x
        return (out, poptorch.identity_loss(out, "sum")) if self.training else out


def train(model):
    sgd = poptorch.optim.SGD(model.parameters(), lr=1.0)
    return poptorch.trainingModel(model, optimizer=sgd)


def infer(model):
    inner = model.model if isinstance(model, poptorch.PoplarExecutor) else model
    inner.eval()
    try:
        return poptorch.inferenceModel(model)
    finally:
        inner.train()


# Training to inference --------------------------------------------------------


def test_an_inference_model_made_first_does_not_follow():
    model = Model()
    inference = infer(model)
    training = train(model)
    inference(ONE)
    training(ONE)
    assert inference(ONE).item() == 0
    training.copyWeightsToHost()
    assert inference(ONE).item() == 0
    inference.copyWeightsToDevice()
    assert inference(ONE).item() == -1


def test_following_works_across_detaching_and_destroying():
    model = Model()
    training = train(model)
    inference = infer(training)
    inference(ONE)
    training(ONE)
    training.detachFromDevice()
    assert inference(ONE).item() == -1
    inference.detachFromDevice()
    training(ONE)
    assert inference(ONE).item() == -2
    training(ONE)
    training.destroy()
    assert inference(ONE).item() == -3


def test_inference_never_changes_the_trainer():
    model = Model()
    training = train(model)
    inference = infer(training)
    training(ONE)
    with torch.no_grad():
        model.weight.fill_(5)
    inference(ONE)
    inference.copyWeightsToDevice()
    assert inference(ONE).item() == 5
    assert training(ONE)[0].item() == -1


# Delegation -------------------------------------------------------------------


def test_unknown_attributes_are_the_modules():
    model = Model()
    training, inference = train(model), infer(Model())
    for executor in (training, inference):
        assert executor.name == "plain"
        assert executor.inner.in_features == 1
        assert list(executor.state_dict()) == ["weight", "inner.weight", "inner.bias"]
        assert len(list(executor.parameters())) == 3
        with pytest.raises(AttributeError, match="missing"):
            executor.missing  # noqa: B018
    assert training.model is model
    assert training.inner is model.inner


def test_assigning_sets_the_executors_attribute_only():
    model = Model()
    executor = train(model)
    executor.name = "changed"
    assert model.name == "plain"


def test_the_mode_is_that_of_the_wrapping():
    model = Model()
    executor = train(model)
    model.eval()
    out, loss = executor(ONE)
    assert (out.item(), loss.item()) == (0, 0)


# Calls ------------------------------------------------------------------------


def test_wrong_arguments_of_a_later_call_train_nothing():
    model = Model()
    executor = train(model)
    executor(ONE)
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        executor(torch.ones(2))
    assert model.weight.item() == -1


def test_an_error_while_running_leaves_the_executor_usable():
    model = Model()
    model.inner = nn.Embedding(3, 1)
    model.forward = lambda x: poptorch.identity_loss(model.inner(x), "sum")
    executor = train(model)
    executor(torch.tensor([1]))
    with pytest.raises(IndexError):
        executor(torch.tensor([7]))
    executor(torch.tensor([2]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_input_inside", [True, False])
def test_calls_work_in_any_mode_of_the_host(mode, is_input_inside):
    model = Model()
    training, inference = train(model), infer(Model())
    outside = torch.ones(1)
    with mode():
        x = torch.ones(1) if is_input_inside else outside
        training(x)
        training.detachFromDevice()
        training(x)
        assert inference(x).item() == 0
    training(x)
    assert inference(x).item() == 0
    assert model.weight.item() == -3


def test_what_forward_computed_while_tracing_is_not_kept():
    class Remembers(Model):
        def forward(self, x):
            out, loss = super().forward(x)
            references.extend([weakref.ref(out), weakref.ref(loss)])
            return out, loss

    references = []
    executor = train(Remembers())
    executor(ONE)
    gc.collect()
    assert [reference() for reference in references] == [None, None]


# What a call returns ----------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(2)

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
    module = Returns()
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
