# SPDX-License-Identifier: Apache-2.0
"""Origins of functions, by which their machine code is found without a trace."""

from __future__ import annotations

import pytest
import torch

from ipufit.emulator import Options, inferenceModel
from ipufit.emulator._ground.switches import (
    CHANNELS_LAST_VARIABLE,
    uses_channels_last,
)
from ipufit.emulator._machine_code import machine_functions as _machine_functions
from ipufit.emulator._machine_code import origins as _origins
from ipufit.emulator._machine_code.origins import origin_of


class Scaled(torch.nn.Module):
    def __init__(self, factor=2.0, power=2):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.factor = torch.tensor([factor])
        self.power = power

    def forward(self, x):
        return (x * self.weight) ** self.power * self.factor.to(x.device)


def program_of(module, x=None):
    executor = inferenceModel(module, Options())
    executor.compile(torch.ones(2, 3) if x is None else x)
    return executor._state.executable.program


def test_programs_of_one_origin_are_alike(monkeypatch):
    parts = ["inference", 1]
    before = origin_of(program_of(Scaled()), parts)
    assert before is not None
    other_weights = Scaled()
    torch.nn.init.zeros_(other_weights.weight)
    assert origin_of(program_of(other_weights), parts) == before
    others = [
        origin_of(program_of(Scaled(power=3)), parts),
        origin_of(program_of(torch.nn.Linear(3, 3)), parts),
        origin_of(program_of(Scaled()), ["inference", 2]),
    ]
    monkeypatch.setenv(CHANNELS_LAST_VARIABLE, str(int(not uses_channels_last())))
    others.append(origin_of(program_of(Scaled()), parts))
    monkeypatch.undo()
    monkeypatch.setattr(_origins, "_own_code", lambda: "changed")
    others.append(origin_of(program_of(Scaled()), parts))
    assert len({before, *others}) == 1 + len(others)


def test_constants_count():
    ones, twos = (program_of(Scaled(factor)) for factor in (1.0, 2.0))
    if _origins.constants_of(ones.graph):
        assert origin_of(ones, []) != origin_of(twos, [])
    else:
        assert ones.graph.code != twos.graph.code


def test_a_function_that_no_name_stands_for_has_no_origin():
    program = program_of(Scaled())

    def closure(x, power=program.num_inputs):
        return x**power

    node = next(n for n in program.graph.graph.nodes if n.op == "placeholder")
    with program.graph.graph.inserting_after(node):
        program.graph.graph.call_function(closure, (node,))
    assert origin_of(program, []) is None


class Stub:
    """Machine code that runs the function itself, so that nothing is compiled."""

    def __init__(self, path, example):
        with open(path, encoding="utf-8") as file:
            self.factor = float(file.read())

    def run(self, arguments):
        x, total = arguments
        total.add_(x * self.factor)
        return [total.sum()]


def doubled_sum(x, total):
    total.add_(x * 2.0)
    return [total.sum()]


@pytest.fixture
def translated(tmp_path, monkeypatch):
    """Translate a function; give what the stub computes and how often it was traced."""
    traces = []

    def compile_it(graph, example, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write("2.0")

    def traced(function, example, table, trace=_machine_functions._traced):
        traces.append(function)
        return trace(function, example, table)

    monkeypatch.setattr(_machine_functions, "MachineFunction", Stub)
    monkeypatch.setattr(_machine_functions, "_compile", compile_it)
    monkeypatch.setattr(_machine_functions, "_traced", traced)

    def translate(origin, size=2, function=doubled_sum):
        code = _machine_functions.translate_function(
            "a sum",
            function,
            [torch.ones(size), torch.zeros(size)],
            str(tmp_path),
            origin,
            is_differentiated=False,
            is_random=False,
        )
        return float(code.run([torch.ones(size), torch.zeros(size)])[0]), len(traces)

    return translate


needs_torch = pytest.mark.skipif(
    _machine_functions._missing() is not None, reason=str(_machine_functions._missing())
)


@needs_torch
def test_what_has_an_origin_is_traced_once(translated):
    assert translated("one") == (4.0, 1)
    assert translated("one") == (4.0, 1)
    assert translated("another") == (4.0, 2)  # it has the same graph
    assert translated("another") == (4.0, 2)
    assert translated("one", size=3) == (6.0, 3)
    assert translated(None) == (4.0, 4)


@needs_torch
def test_code_that_gives_something_else_is_not_believed(translated, tmp_path):
    translated("one")
    (note,) = tmp_path.glob("*.origin")
    (code,) = tmp_path.glob("*.pt2")
    wrong = tmp_path / f"{'0' * len(code.stem)}.pt2"
    wrong.write_text("3.0")
    note.write_text(wrong.stem)
    assert translated("one") == (4.0, 2)
    assert note.read_text() == code.stem


@needs_torch
@pytest.mark.parametrize("text", ["", "../secret", "0" * 64, "é" * 64])
def test_notes_of_nothing_are_of_no_use(translated, tmp_path, text):
    translated("one")
    (note,) = tmp_path.glob("*.origin")
    note.write_text(text, encoding="utf-8")
    assert translated("one") == (4.0, 2)
