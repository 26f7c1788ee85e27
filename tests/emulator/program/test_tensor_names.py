# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors in a program."""

from __future__ import annotations

import contextlib

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


# Which module a call belongs to -----------------------------------------------------


class Adds(nn.Module):
    """An operator whose name shows the scope in which it runs."""

    def forward(self, x):
        return x + 1


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError


def robust(self, x):
    """Goes on when a part of a part fails."""
    with contextlib.suppress(ValueError):
        self.inner(x)
    return self.recorder(x)


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


def test_a_module_called_from_outside_has_no_scope():
    outside = Adds()

    def forward(self, x):
        return outside(x)

    assert scopes_of(Function(forward)) == [""]


def test_scopes_of_failed_modules_stay_open():
    """No forward hook closes them (PopTorch, `NameScopeHook` in `_impl.py`)."""
    root = nn.Sequential(
        Function(robust, inner=nn.Sequential(Failing()), recorder=Adds()), Adds()
    )
    assert scopes_of(root) == ["0/inner/0/recorder/", "0/inner/1/"]


def test_a_trace_leaves_no_hooks():
    root = nn.Sequential(Adds(), Failing())
    with pytest.raises(ValueError, match=r"^$"):
        scopes_of(root)
    for module in root.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_scopes_of_users_hooks_are_around_those_of_modules():
    """PopTorch registers its hooks when it traces, after the user's."""
    root = nn.Sequential(Adds(), Adds())
    for module in root:
        module.register_forward_pre_hook(
            lambda *_: torch.ops.poptorch.push_name_scope("mine")
        )
        module.register_forward_hook(lambda *_: torch.ops.poptorch.pop_name_scope())
    assert scopes_of(root) == ["mine/0/", "mine/1/"]


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


def test_one_name_scope_may_be_entered_again_inside_itself():
    scope = poptorch.NameScope("again")

    def forward(m, x):
        with scope, scope:
            x = x + 1
        with scope:
            x = x + 1
        return x + 1

    found = names(forward, X)
    assert found == ["input", "again/again/Add:0", "again/Add:0", "Add:0"]


def test_module_scopes_can_be_switched_off():
    options = poptorch.Options().disableModuleNamescope()
    executor = poptorch.inferenceModel(nn.Sequential(nn.ReLU()), options)
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == ["input", "Relu:0"]
