# SPDX-License-Identifier: Apache-2.0
"""Which module a call belongs to."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import Function


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
    def forward(self, x):
        with poptorch.NameScope("outer"):
            x = x + 1
            with poptorch.NameScope("inner"):
                x = x + 1
        return x * 2

    executor = poptorch.inferenceModel(nn.Sequential(Function(forward)))
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == [
        "input",
        "0/outer/Add:0",
        "0/outer/inner/Add:0",
        "0/Mul:0",
    ]


def test_one_name_scope_may_be_entered_again_inside_itself():
    scope = poptorch.NameScope("again")

    def forward(self, x):
        with scope, scope:
            x = x + 1
        with scope:
            x = x + 1
        return x + 1

    executor = poptorch.inferenceModel(Function(forward))
    executor.compile(torch.ones(1))
    assert executor.getTensorNames()[1:] == [
        "again/again/Add:0",
        "again/Add:0",
        "Add:0",
    ]


def test_module_scopes_can_be_switched_off():
    options = poptorch.Options().disableModuleNamescope()
    executor = poptorch.inferenceModel(nn.Sequential(nn.ReLU()), options)
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == ["input", "Relu:0"]
