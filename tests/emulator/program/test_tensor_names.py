# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors in a program."""

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
    "Add": [lambda x: x + 1, lambda x: torch.add(x, 1)],
    "Mul": [lambda x: 2 * x],
    "Sub": [lambda x: 2 - x, lambda x: torch.rsub(x, 1)],
    "MatMul": [lambda x: x @ x.T],
    "Invert": [lambda x: ~(x > 0)],
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


# Which module a call belongs to -----------------------------------------------------


class Adds(nn.Module):
    """An operator whose name shows the scope in which it runs."""

    def forward(self, x):
        return x + 1


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError


def scopes_of(root):
    """The scopes of the operators of a program, in order."""
    executor = poptorch.inferenceModel(root)
    executor.compile(torch.ones(1))
    _, *names = executor.getTensorNames()
    return [name.rpartition("Add")[0] for name in names]


def test_modules_are_in_the_scopes_of_those_that_call_them():
    leaf = Adds()
    root = nn.Sequential(nn.Identity(), nn.Sequential(leaf), leaf)
    # A module that is in two places has the name of the first one.
    assert scopes_of(root) == ["1/0/", "0/"]


def test_a_trace_leaves_no_hooks():
    root = nn.Sequential(Adds(), Failing())
    with pytest.raises(ValueError, match=r"^$"):
        scopes_of(root)
    for module in root.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_closing_what_is_not_open_is_refused():
    def forward(self, x):
        torch.ops.poptorch.pop_name_scope()
        return x + 1

    with pytest.raises(poptorch.Error, match="pop_name_scope than of push_name_scope"):
        scopes_of(Function(forward))


def test_name_scopes_show_in_the_names_of_tensors():
    def forward(m, x):
        with poptorch.NameScope("outer"):
            x = m.adds(x)
            with poptorch.NameScope("inner"):
                x = m.adds(x)
        return x * 2

    assert names(forward, X, adds=Adds()) == [
        "input",
        "outer/adds/Add:0",
        "outer/inner/adds/Add:0",
        "Mul:0",
    ]


def test_module_scopes_can_be_switched_off():
    options = poptorch.Options().disableModuleNamescope()
    executor = poptorch.inferenceModel(nn.Sequential(nn.ReLU()), options)
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == ["input", "Relu:0"]
