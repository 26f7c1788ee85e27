# SPDX-License-Identifier: Apache-2.0
"""Functions of torch without what imports its compiler."""

from __future__ import annotations

import functools

import pytest
import torch

from ipufit.emulator._folding.example_run import _NewMemory
from ipufit.emulator._ground.without_compiler import DispatchMode, without_compiler
from ipufit.emulator._program.strict import OperatorWatch
from ipufit.emulator._tracing.tracer import EscapeGuard

METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_optimisers_are_those_of_their_class(name):
    plain = without_compiler(getattr(torch.optim.Optimizer, name))
    assert plain.__globals__["__name__"] == "torch.optim.optimizer"
    assert plain.__name__ == name


def test_what_others_have_put_around_a_function_stays():
    def inner():
        pass

    @functools.wraps(inner)
    def outer():
        pass

    assert without_compiler(outer) is outer


@pytest.mark.parametrize("mode", [EscapeGuard, _NewMemory, OperatorWatch])
def test_modes_run_their_own_methods(mode):
    assert issubclass(mode, DispatchMode)
    code = mode.__torch_dispatch__.__code__
    assert code.co_name == "__torch_dispatch__"
