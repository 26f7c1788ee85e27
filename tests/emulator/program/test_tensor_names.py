# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors in a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import ipufit.emulator as poptorch
from tests.emulator._models import Function, wrap


def names(function, *inputs, **attributes):
    executor = poptorch.inferenceModel(Function(function, **attributes))
    executor.compile(*inputs)
    return executor.getTensorNames()


X = torch.ones(4, 2)


OPERATORS = {
    "Relu": [lambda x: x.relu(), lambda x: (x * 1).relu_()],
    "LogSoftmax": [lambda x: x.log_softmax(1)],
    "Add": [lambda x: x + 1, lambda x: torch.add(x, 1)],
    "Mul": [lambda x: 2 * x],
    "Sub": [lambda x: 2 - x, lambda x: torch.rsub(x, 1)],
    "Div": [lambda x: x / 2],
    "MatMul": [lambda x: x @ x.T],
    "Invert": [lambda x: ~(x > 0)],
    "Isnan": [lambda x: x.isnan()],
    "Rad2deg": [lambda x: x.rad2deg()],
    "Conv": [lambda x: torch.conv1d(x.T[None], x[:, :, None])],
    "MseLoss": [lambda x: mse_loss(x, x)],
}


@pytest.mark.parametrize("expected", OPERATORS)
def test_functions_have_the_names_of_operators(expected):
    for function in OPERATORS[expected]:
        assert f"{expected}:0" in names(lambda self, x, f=function: f(x), X)


def test_inputs_are_numbered_from_the_second_one_on():
    def total(self, x, y, z):
        return x + y + z

    assert names(total, X, X, X) == ["input", "input/1", "input/2", "Add:0", "Add:0/1"]


def test_operators_of_one_name_are_numbered_in_their_scope():
    block = nn.Sequential(nn.ReLU(), nn.ReLU())
    found = names(lambda self, x: self.block(x).relu().relu(), X, block=block)
    assert found == [
        "input",
        "block/0/Relu:0",
        "block/1/Relu:0",
        "Relu:0",
        "Relu:0/1",
    ]


def test_weights_have_their_own_names():
    norm = nn.BatchNorm1d(2)
    found = names(lambda self, x: self.norm(x), X, norm=norm)
    assert found[:5] == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert found[5] == "input"
    assert found[-1] == "norm/BatchNorm:0"


def test_every_result_of_an_operator_has_a_name():
    def two(self, x):
        first, second = x.split(1, dim=1)
        values, indices = x.max(dim=1)
        return first + second, values, indices

    assert names(two, X)[1:] == ["Split:0", "Split:1", "Max:0", "Max:1", "Add:0"]


def test_what_gives_no_tensor_has_no_name():
    def assign(self, x):
        y = x * 2
        y[0] = 1.0
        return y

    assert names(assign, X) == ["input", "Mul:0"]


def test_tensors_that_forward_creates_have_names_too():
    found = names(lambda self, x: x + torch.tensor([1.0, 2.0]), X)
    assert found == ["input", "Tensor:0", "Add:0"]


def test_training_adds_gradients_updates_and_the_optimiser():
    _, executor = wrap()
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == [
        "weight",
        "calls",
        "input",
        "Add:0",
        "Mul:0",
        "IdentityLoss:0",
        "Mul:0/1",
        "Gradient___weight",
        "UpdatedVar___weight",
        "scaledLearningRate0___specific___weight",
        "weightDecayScaleFactor0___specific___weight",
        "lossScaling_FLOAT",
    ]


def test_weights_that_are_not_trained_have_no_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    loss = Function(lambda self, x: mse_loss(self.model(x), x), model=model)
    executor = poptorch.trainingModel(loss)
    executor.compile(X)
    gradients = [n for n in executor.getTensorNames() if n.startswith("Gradient___")]
    assert gradients == ["Gradient___model.1.weight", "Gradient___model.1.bias"]
