# SPDX-License-Identifier: Apache-2.0
"""Who is told about a trace, and when."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ipufit.emulator as poptorch
from ipufit.emulator._tracing.state import (
    current_trace,
    enclosing_trace,
    is_tracing,
)
from tests.emulator._models import Function, X


def test_outside_a_trace_there_is_none():
    assert not is_tracing()
    assert enclosing_trace() is None
    assert current_trace() is None


def test_a_trace_is_current_but_not_within_a_call_that_it_records():
    seen = []

    def on_host(x):
        seen.append((is_tracing(), current_trace() is None))
        return x

    def forward(_, x):
        seen.append((is_tracing(), current_trace() is enclosing_trace()))
        return poptorch.CPU(on_host, "host")(x)

    poptorch.inferenceModel(Function(forward))(X)
    assert seen == [(True, True), (True, True), (False, True)]


class Mode(TorchFunctionMode):
    """A mode of the user's, which remembers what is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_mode_of_the_user_s_sees_one_call_which_is_recorded_as_one(depth):
    modes = [Mode() for _ in range(depth)]
    calls = []

    def on_host(x):
        calls.append(x.clone())
        return x + 1

    def forward(_, x):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return poptorch.CPU(on_host, "host")(x)

    executor = poptorch.inferenceModel(Function(forward))
    assert torch.equal(executor(X), X + 1)
    assert torch.equal(executor(X + 1), X + 2)
    assert len(calls) == 3  # in the trace, and in both calls
    for mode in modes:
        assert mode.names.count("call_on_host") == 1
        assert "add" not in mode.names


@pytest.mark.parametrize("is_training", [True, False])
def test_the_state_says_whether_it_is_for_training(is_training):
    seen = []

    def forward(self, x):
        seen.append(enclosing_trace().is_training)
        return poptorch.identity_loss(x * self.weight, "sum")

    module = Function(forward, weight=torch.nn.Parameter(torch.ones(1)))
    wrap = poptorch.trainingModel if is_training else poptorch.inferenceModel
    wrap(module)(X)
    assert seen == [is_training]


def test_an_error_ends_the_trace():
    def forward(_, x):
        raise KeyError

    with pytest.raises(KeyError):
        poptorch.inferenceModel(Function(forward))(X)
    assert not is_tracing()


def test_constructs_close_after_errors():
    def forward(_, x):
        trace = enclosing_trace()
        with pytest.raises(KeyError), trace.inside("for_loop"):
            raise KeyError
        return x + len(trace.open)

    assert torch.equal(poptorch.inferenceModel(Function(forward))(X), X)
