# SPDX-License-Identifier: Apache-2.0
"""Which module a call belongs to."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator._tracing.recording import Scopes


class Recorder(nn.Module):
    """Notes the scope in which it runs."""

    def __init__(self, scopes, seen):
        super().__init__()
        self.scopes = scopes
        self.seen = seen

    def forward(self, x):
        self.seen.append(self.scopes.prefix)
        return x


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError


class Robust(nn.Module):
    """Goes on when a part of a part fails."""

    def __init__(self, scopes, seen):
        super().__init__()
        self.inner = nn.Sequential(Failing())
        self.recorder = Recorder(scopes, seen)

    def forward(self, x):
        with contextlib.suppress(ValueError):
            self.inner(x)
        return self.recorder(x)


@pytest.fixture
def scopes():
    return Scopes()


def test_modules_are_in_the_scopes_of_those_that_call_them(scopes):
    seen = []
    leaf = Recorder(scopes, seen)
    root = nn.Sequential(nn.ReLU(), nn.Sequential(leaf), leaf)
    with scopes.of_modules(root):
        root(torch.ones(1))
    # A module that is in two places has the name of the first one.
    assert seen == ["1/0/", "0/"]
    assert scopes.prefix == ""


def test_a_module_called_from_outside_has_no_scope(scopes):
    seen = []
    root = nn.Sequential(nn.ReLU())
    with scopes.of_modules(root):
        Recorder(scopes, seen)(torch.ones(1))
    assert seen == [""]


def test_afterwards_modules_open_no_scopes(scopes):
    seen = []
    root = nn.Sequential(Recorder(scopes, seen))
    with scopes.of_modules(root):
        pass
    root(torch.ones(1))
    assert seen == [""]


def test_scopes_of_failed_modules_stay_open(scopes):
    """No forward hook closes them (PopTorch, `NameScopeHook` in `_impl.py`)."""
    seen = []
    robust = Robust(scopes, seen)
    root = nn.Sequential(robust, Recorder(scopes, seen))
    with scopes.of_modules(root):
        root(torch.ones(1))
    assert seen == ["0/inner/0/recorder/", "0/inner/1/"]


def test_a_trace_that_fails_leaves_no_hooks(scopes):
    root = nn.Sequential(Failing())
    with pytest.raises(ValueError, match=r"^$"), scopes.of_modules(root):
        root(torch.ones(1))
    assert scopes.prefix == ""
    for module in root.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_scopes_of_users_hooks_are_around_those_of_modules(scopes):
    """PopTorch registers its hooks when it traces, after the user's."""
    seen = []
    root = nn.Sequential(Recorder(scopes, seen), Recorder(scopes, seen))
    for module in root:
        module.register_forward_pre_hook(lambda *_: scopes.push("mine"))
        module.register_forward_hook(lambda *_: scopes.pop())
    with scopes.of_modules(root):
        root(torch.ones(1))
        assert scopes.prefix == ""
    assert seen == ["mine/0/", "mine/1/"]


def test_closing_what_is_not_open_is_refused(scopes):
    with pytest.raises(poptorch.Error, match="pop_name_scope than of push_name_scope"):
        scopes.pop()


def test_name_scopes_show_in_the_names_of_tensors():
    class Model(nn.Module):
        def forward(self, x):
            with poptorch.NameScope("outer"):
                x = x + 1
                with poptorch.NameScope("inner"):
                    x = x + 1
            return x * 2

    executor = poptorch.inferenceModel(nn.Sequential(Model()))
    executor.compile(torch.ones(1))
    assert executor.getTensorNames() == [
        "input",
        "0/outer/Add:0",
        "0/outer/inner/Add:0",
        "0/Mul:0",
    ]


def test_one_name_scope_may_be_entered_again_inside_itself():
    scope = poptorch.NameScope("again")

    class Model(nn.Module):
        def forward(self, x):
            with scope, scope:
                x = x + 1
            with scope:
                x = x + 1
            return x + 1

    executor = poptorch.inferenceModel(Model())
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
