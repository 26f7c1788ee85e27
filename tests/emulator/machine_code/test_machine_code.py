# SPDX-License-Identifier: Apache-2.0
"""Programs as machine code of a C++ compiler, against the same, run eagerly.

Each takes seconds to compile, so there are few, of all kinds.
"""

# ruff: noqa: N803 - D, G, R and B are the letters of the user guide
from __future__ import annotations

import os
import tempfile
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import OutputMode, optim
from ipufit.emulator._ground.switches import COMPILE_VARIABLE, FOLD_VARIABLE
from ipufit.emulator._machine_code import machine_functions as _machine_functions
from tests.emulator.folding import test_folding as programs
from tests.emulator.machine_code.test_machine_code_runner import (
    OPTIMIZERS,
    Network,
    assert_close,
    assert_same_state,
    call,
    executors,
    images,
    vectors,
)
from tests.modes import is_machine_code
from tests.strategies import examples

pytestmark = [
    pytest.mark.skipif(
        _machine_functions._missing() is not None,
        reason=str(_machine_functions._missing()),
    ),
    pytest.mark.not_in_mode(reason="it compiles, in all of them the same"),
]


@pytest.mark.thorough
def test_a_whole_update(tmp_path, monkeypatch):
    def options():
        return poptorch.Options().enableExecutableCaching(str(tmp_path))

    made = executors(monkeypatch, Network, OPTIMIZERS["adam"], options)
    for _ in range(3):
        call(monkeypatch, made, images(4))
    assert made[1][0]._executable.runner.updates.last is None
    assert_same_state(made)
    (eager, *_), (compiled, optimizer, _) = made
    module = compiled.model
    for executor in (eager, compiled):
        executor.destroy()
    # Another process finds it there.
    monkeypatch.setattr(_machine_functions, "_compile", None)
    again = poptorch.trainingModel(module, options(), optimizer=optimizer)
    again(*images(4))
    assert is_machine_code(again)
    again.destroy()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".origin", ".pt2"]


class Recurrent(nn.Module):
    """An LSTM, and dropout where it changes nothing."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        states, _ = self.lstm(x.unsqueeze(1).expand(-1, 3, -1))
        scores = nn.functional.dropout(states[:, -1], 0.5)
        return scores, self.loss(scores, y)


def test_updates_in_parts_that_draw_random_numbers(monkeypatch):
    def options():
        options = poptorch.Options().deviceIterations(2).randomSeed(1)
        options.Training.gradientAccumulation(2)
        return options.outputMode(poptorch.OutputMode.Sum)

    made = executors(monkeypatch, Recurrent, OPTIMIZERS["clipped"], options)
    for _ in range(2):
        call(monkeypatch, made, vectors(8))
    assert made[1][0]._executable.runner.updates.last is not None
    assert_same_state(made)
    assert made[1][0].rng_state == made[0][0].rng_state
    for executor, *_ in made:
        executor.destroy()


def test_folded_inference(monkeypatch):
    monkeypatch.setenv(FOLD_VARIABLE, "1")
    options = poptorch.Options().deviceIterations(3)
    options.outputMode(poptorch.OutputMode.Sum)
    module, batch, results = Network().eval(), images(6), []
    for mode in ("eager", "compiled"):
        monkeypatch.setenv(COMPILE_VARIABLE, mode)
        executor = poptorch.inferenceModel(module, options)
        results.append(executor(*batch))
    assert executor._executable.runner.folds.sums_over == 1
    assert_close(results[1], results[0])


# Random programs ------------------------------------------------------------------

# Random numbers may land on other elements of what a compiler lays out otherwise.
STEPS = sorted(programs.STEPS.keys() - {"dropout", "noise"})
small = st.integers(1, 2)


def run(mode, names, D, G, R, B, output_mode):
    """Train, or infer if no optimiser is asked for; what comes back and what stays."""
    os.environ[COMPILE_VARIABLE] = mode
    module = programs.Steps(["linear", *names])  # something to train
    options = programs.make_options(D, G or 1, R, output_mode)
    if G:
        sgd = optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        executor = poptorch.trainingModel(module, options, sgd)
    else:
        executor = poptorch.inferenceModel(module, options)
    try:
        outputs = []
        for seed in range(2):
            inputs = programs.make_inputs(D * (G or 1) * R * B, seed)
            outputs.append(executor(*(inputs if G else inputs[:1])))
        assert is_machine_code(executor) == (mode == "compiled")
        if G:
            executor.copyWeightsToHost()
        return outputs, module.state_dict()
    finally:
        executor.destroy()


# Nothing is made smaller: each try would be compiled.
@settings(max_examples=examples(3), phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.sampled_from(STEPS), min_size=2, max_size=4, unique=True),
    small,
    st.sampled_from([0, 1, 2]),
    small,
    st.integers(2, 3),
    st.sampled_from([OutputMode.All, OutputMode.Final, OutputMode.Sum]),
    st.sampled_from(["0", "1"]),
)
def test_random_programs_compute_the_same(names, D, G, R, B, output_mode, fold):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(
        os.environ, {FOLD_VARIABLE: fold, "POPTORCH_CACHE_DIR": folder}
    ):
        arguments = names, D, G, R, B, output_mode
        expected = run("eager", *arguments)
        programs.assert_close(run("compiled", *arguments), expected)
