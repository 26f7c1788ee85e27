# SPDX-License-Identifier: Apache-2.0
"""Functions called around every compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, Function


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


def test_post_compile_hooks_run_before_a_program_is_refused(register):
    events = []
    register("Post", lambda: events.append("post"))
    executor = poptorch.trainingModel(nn.Linear(1, 1))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        executor.compile(torch.ones(1, 1))
    assert events == ["post"]


def test_hooks_are_called_while_the_model_counts_as_running_on_ipus(register):
    seen = []
    register("Pre", lambda: seen.append(poptorch.isRunningOnIpu()))
    register("Post", lambda: seen.append(poptorch.isRunningOnIpu()))
    poptorch.inferenceModel(nn.Identity()).compile(ONE)
    assert seen == [True, True]


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
