# SPDX-License-Identifier: Apache-2.0
"""Which programs are compiled to machine code, and what is said of the others."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import optim
from ipufit.emulator._ground.switches import COMPILE_VARIABLE
from ipufit.emulator._machine_code import machine_functions as _machine_functions
from ipufit.emulator._machine_code import translation as _translation
from tests.modes import is_machine_code


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    """Compile a program for which nothing is compiled; give what is logged."""

    def traced(name, function, example, *args, is_differentiated, is_random):
        _machine_functions._traced(function, example, {})
        raise RuntimeError("it came to a compilation.\nAt length.")

    monkeypatch.setattr(_translation, "require_compiler", lambda: None)
    monkeypatch.setattr(_translation, "translate_function", traced)
    monkeypatch.setenv(COMPILE_VARIABLE, "compiled")
    caplog.set_level(logging.WARNING, logger="poptorch::python")

    def compile_program(executor, x, expected=None):
        result = executor(x)
        assert not is_machine_code(executor)
        if expected is not None:
            torch.testing.assert_close(result, expected)
        executor.destroy()
        lines = [r.getMessage() for r in caplog.records if "machine code" in r.msg]
        assert len(lines) == 1
        return lines[0]

    return compile_program


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


X = torch.ones(2, 3)


def branch(x):
    return poptorch.cond(x.sum() > 0, lambda y: y, [x], lambda y: -y, [x])[0]


@pytest.mark.parametrize(
    ("function", "expected", "reason"),
    [
        (branch, X, "it branches"),
        (lambda x: poptorch.for_loop(2, lambda y: y * 2, [x])[0], X * 4, "it loops"),
        (poptorch.CPU(lambda x: x * 2, "twice"), X * 2, "it calls the host"),
        (lambda x: poptorch.ipu_print_tensor(x), X, "it prints a tensor"),
        (lambda x: x * 2, X * 2, "RuntimeError: it came to a compilation."),
        (lambda x: x.add_(1) * 2, X * 4, "it writes to its inputs"),
        (lambda x: x.half() * 2, X.half() * 2, "float16"),
    ],
)
def test_programs(warnings_of, function, expected, reason):
    executor = poptorch.inferenceModel(Function(function))
    assert reason in warnings_of(executor, X.clone(), expected)


def test_inputs_of_half_precision(warnings_of):
    executor = poptorch.inferenceModel(Function(lambda x: x * 2))
    assert "it computes in float16" in warnings_of(executor, X.half(), X.half() * 2)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x), "mean")


def _anchored(options):
    options.anchorTensor("seen", "Gradient___layer.weight")


def _adaptive(options):
    options.Training.setAutomaticLossScaling(True)


def _stochastic(options):
    options.Precision.enableStochasticRounding(True)


def _stopping(options):
    options.Precision.enableFloatingPointExceptions(True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_anchored, "are anchored"),
        (_adaptive, "the loss scaling is automatic"),
        (_stochastic, "rounding is stochastic"),
        (_stopping, "floating-point exceptions"),
    ],
)
def test_options(warnings_of, change, reason):
    options = poptorch.Options()
    change(options)
    module = Trained()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    executor = poptorch.trainingModel(module, options, optimizer=optimizer)
    assert reason in warnings_of(executor, X)


def test_nothing_to_train(warnings_of):
    module = Trained().requires_grad_(False)
    module.unused = nn.Linear(1, 1)
    optimizer = optim.SGD(module.unused.parameters(), lr=0.1)
    executor = poptorch.trainingModel(module, optimizer=optimizer)
    assert "nothing is trained" in warnings_of(executor, X)


def test_nothing_is_compiled_unless_asked_for(monkeypatch):
    monkeypatch.delenv(COMPILE_VARIABLE, raising=False)
    monkeypatch.setattr(_translation, "require_compiler", None)
    executor = poptorch.inferenceModel(nn.Linear(3, 2))
    executor.compile(X)
    assert not is_machine_code(executor)


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv(COMPILE_VARIABLE, "yes")
    with pytest.raises(poptorch.Error, match="neither `eager` nor `compiled`"):
        poptorch.inferenceModel(nn.Linear(3, 2)).compile(X)


@pytest.fixture
def _not_asked_yet(monkeypatch):
    require = _machine_functions.require_compiler
    monkeypatch.setattr(_translation, "require_compiler", require)
    _machine_functions._missing.cache_clear()
    yield
    _machine_functions._missing.cache_clear()


@pytest.mark.usefixtures("_not_asked_yet")
def test_without_a_compiler_it_is_an_error(monkeypatch):
    monkeypatch.setenv(COMPILE_VARIABLE, "compiled")
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    monkeypatch.setenv("CXX", "no-such-compiler")
    executor = poptorch.inferenceModel(nn.Linear(3, 2))
    with pytest.raises(poptorch.Error, match="`no-such-compiler`"):
        executor(X)
    assert not executor.isCompiled()
    monkeypatch.setenv(COMPILE_VARIABLE, "eager")
    assert executor(X).shape == (2, 2)


@pytest.mark.usefixtures("_not_asked_yet")
def test_an_old_torch_is_an_error(monkeypatch):
    monkeypatch.setenv(COMPILE_VARIABLE, "compiled")
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    with pytest.raises(poptorch.Error, match="need torch"):
        poptorch.inferenceModel(nn.Linear(3, 2)).compile(X)
