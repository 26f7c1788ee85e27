# SPDX-License-Identifier: Apache-2.0
"""The ways in which the emulator runs a program, for all tests at once.

`pytest --emulator-mode looped --emulator-mode contiguous` runs whatever it is given as
if the variables of the modes were set. Numbers must be the same in all of them.

Compiling takes seconds for each program, so under `compiled` the graphs that a compiler
would be given are interpreted: all of the emulator's own work is tested, which is to
make one graph of a pass, or of an update, and to run it. What a compiler makes of such
graphs is tested in `emulator/test_machine_code.py` and in `test_compiling.py` beside
it.
"""

from __future__ import annotations

import os

import pytest
import torch

KEYS = {}
"""The names of the graphs of functions, by their origins."""

VARIABLES = {
    "folded": ("IPUFIT_EMULATOR_FOLD", "1"),
    "looped": ("IPUFIT_EMULATOR_FOLD", "0"),
    "contiguous": ("IPUFIT_EMULATOR_CHANNELS_LAST", "0"),
    "compiled": ("IPUFIT_EMULATOR_COMPILE", "compiled"),
}
"""What each mode sets. Without a mode, programs fold and change layout if it pays."""


def is_old():
    """Whether this torch can't lower programs to graphs."""
    from ipufit.emulator._machine_code import machine_functions as _machine_functions

    problem = _machine_functions._missing()
    return problem is not None and "torch" in problem


def enter(modes):
    """Run all programs from now on in these modes."""
    if {"folded", "looped"} <= set(modes):
        raise ValueError("the modes `folded` and `looped` exclude each other")
    for mode in modes:
        name, value = VARIABLES[mode]
        os.environ[name] = value
    if "compiled" in modes:
        from ipufit.emulator._machine_code import translation as _translation

        if is_old():
            raise ValueError(f"torch {torch.__version__} can't lower programs")
        _translation.translate_function = Interpreted.of
        _translation.require_compiler = lambda: None


def is_machine_code(executor):
    """Whether an executor runs a program as machine code."""
    return hasattr(executor._executable.runner, "folds")


def folding_of(executor):
    """What decides which micro-batches an executor folds; None if it can't fold any."""
    runner = executor._executable.runner
    runner = getattr(runner, "otherwise", runner)
    return getattr(runner, "folding", None)


class Interpreted:
    """Stands in for a compiled function: runs the graph that it is made of.

    Attributes:
        made: How many there have been.
    """

    made = 0

    def __init__(self, graph, example):
        Interpreted.made += 1
        self._graph = graph
        self._strides = [tensor.stride() for tensor in example]
        self._shapes = [tensor.shape for tensor in example]

    @classmethod
    def of(
        cls,
        name,
        function,
        example,
        folder,
        origin=None,
        *,
        is_differentiated,
        is_random,
    ):
        """In place of `translate_function`; functions of one origin must be alike."""
        from ipufit.emulator._machine_code import (
            machine_functions as _machine_functions,
        )

        table = _machine_functions.kernel_table() if is_differentiated else {}
        graph = _machine_functions._traced(function, example, table)
        if origin is not None:
            note = _machine_functions._note("", origin, example)
            key = _machine_functions._key(graph, example)
            if KEYS.setdefault(note, key) != key:
                pytest.fail(f"{name} has the origin of another function: {graph.code}")
        for node in graph.graph.nodes:
            # Inductor copies where a view isn't possible. A trace takes strides from
            # torch's meta functions; that of `mse_loss_backward` gives others than the
            # kernel, so a view that was possible in the trace may not be here.
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        graph.recompile()
        return cls(graph, example)

    def takes(self, first):
        known = zip(first, self._shapes, self._strides)
        return all(t.shape == shape and t.stride() == s for t, shape, s in known)

    def last_strides(self, count):
        return self._strides[len(self._strides) - count :]

    def run(self, arguments):
        for tensor, stride in zip(arguments, self._strides):
            assert tensor.stride() == stride
        with torch.no_grad():
            return list(self._graph(*arguments))
