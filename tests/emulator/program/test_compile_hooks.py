# SPDX-License-Identifier: Apache-2.0
"""Functions called around every compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch

ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def _no_hooks_left(monkeypatch):
    """Remove all hooks that a test registers."""
    handles = []
    for name in ("registerPreCompileHook", "registerPostCompileHook"):
        register = getattr(poptorch, name)

        def noted(hook, register=register):
            handles.append(register(hook))
            return handles[-1]

        monkeypatch.setattr(poptorch, name, noted)
    yield
    for handle in handles:
        handle.remove()


class Noting(nn.Module):
    def __init__(self, events, fails=False):
        super().__init__()
        self.events = events
        self.fails = fails

    def forward(self, x):
        self.events.append("forward")
        if self.fails:
            raise poptorch.createPoptorchError("on purpose")
        return x + 1


def note(events, word):
    return lambda: events.append(word)


def test_a_hook_may_remove_itself():
    events = []

    def once():
        events.append("once")
        handle.remove()

    handle = poptorch.registerPreCompileHook(once)
    poptorch.registerPreCompileHook(note(events, "always"))
    for _ in range(2):
        poptorch.inferenceModel(nn.Identity()).compile(ONE)
    assert events == ["once", "always", "always"]


def test_post_compile_hooks_run_after_a_failed_trace_too():
    events = []
    poptorch.registerPostCompileHook(note(events, "post"))
    with pytest.raises(poptorch.Error, match="on purpose"):
        poptorch.inferenceModel(Noting(events, fails=True)).compile(ONE)
    assert events == ["forward", "post"]


def test_post_compile_hooks_run_before_a_program_is_refused():
    events = []
    poptorch.registerPostCompileHook(note(events, "post"))
    executor = poptorch.trainingModel(nn.Linear(1, 1))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        executor.compile(torch.ones(1, 1))
    assert events == ["post"]


def test_hooks_are_called_while_the_model_counts_as_running_on_ipus():
    seen = []
    poptorch.registerPreCompileHook(lambda: seen.append(poptorch.isRunningOnIpu()))
    poptorch.registerPostCompileHook(lambda: seen.append(poptorch.isRunningOnIpu()))
    poptorch.inferenceModel(nn.Identity()).compile(ONE)
    assert seen == [True, True]


def test_an_error_in_a_hook_is_the_users():
    def fail():
        raise KeyError("mine")

    handle = poptorch.registerPreCompileHook(fail)
    executor = poptorch.inferenceModel(nn.Identity())
    with pytest.raises(KeyError, match="mine"):
        executor(ONE)
    assert not executor.isCompiled()
    handle.remove()
    assert executor(ONE).item() == 1
