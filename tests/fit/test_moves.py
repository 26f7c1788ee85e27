# SPDX-License-Identifier: Apache-2.0
"""Compiled and moved, and when: the table of `docs/concepts/calls.md`, counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ipufit import IPUConfig, IPUModel, Optimizer, SwapEMAWeights, poptorch
from tests import reference

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "calls.md"
X, Y = reference.samples(32)
FIT = {"batch_size": 8, "shuffle": False, "verbose": 0}


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)
    )


def make(optimizer="adam"):
    model = IPUModel(network(), IPUConfig(seed=1))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"])
    return model


def averaging():
    return make(Optimizer("adam", ema_momentum=0.9))


def looked(model, *sizes):
    for size in sizes:
        model.evaluate(X, Y, batch_size=size, verbose=0)


def trained(model, *sizes):
    for size in sizes:
        model.fit(X, Y, **{**FIT, "batch_size": size})


def fit(model, **more):
    model.fit(X, Y, **FIT, **more)


def compile_again(model):
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    fit(model)


def predict_on_batches(model):
    for _ in range(10):
        model.predict_on_batch(X[:8])


def train_on_batches(model):
    for _ in range(10):
        model.train_on_batch(X[:8], Y[:8])


def in_turns(model):
    model.train_on_batch(X[:8], Y[:8])
    model.test_on_batch(X[:8], Y[:8])


def fit_swapping(model):
    fit(model, epochs=2, validation_data=(X, Y), callbacks=SwapEMAWeights())


# The rows of the table: how the model is made ready, and what is counted.
ROWS = {
    "`fit`, 2 epochs of 4 calls": (make, lambda m: fit(m, epochs=2)),
    "`fit` once more": (lambda: ready(fit), fit),
    "`compile` with equal settings, `fit`": (lambda: ready(fit), compile_again),
    "`fit` with 3 validations": (
        make,
        lambda m: fit(m, epochs=3, validation_data=(X, Y)),
    ),
    "`predict` after `fit`": (
        lambda: ready(fit),
        lambda m: m.predict(X, batch_size=8, verbose=0),
    ),
    "`predict` once more": (
        lambda: ready(fit, lambda m: m.predict(X, batch_size=8, verbose=0)),
        lambda m: m.predict(X, batch_size=8, verbose=0),
    ),
    "ten `predict_on_batch`": (
        lambda: ready(lambda m: m.predict_on_batch(X[:8])),
        predict_on_batches,
    ),
    "ten `train_on_batch`": (lambda: ready(train_on_batches), train_on_batches),
    "`evaluate` with batches of 4, 8, 4, 8": (make, lambda m: looked(m, 4, 8, 4, 8)),
    "`fit` with batches of 4, 8, 4, 8": (make, lambda m: trained(m, 4, 8, 4, 8)),
    "`train_on_batch`, then `test_on_batch`": (lambda: ready(in_turns), in_turns),
    "`fit` with `ema_momentum`, 4 calls": (averaging, fit),
    "`fit` with `SwapEMAWeights`, 2 validations": (
        lambda: ready(fit_swapping, model=averaging()),
        fit_swapping,
    ),
}


def ready(*steps, model=None):
    model = model or make()
    for step in steps:
        step(model)
    return model


def documented():
    """Row -> the three counts of the page."""
    rows = re.findall(
        r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {row: tuple(map(int, counts)) for row, *counts in rows}


@pytest.mark.parametrize("row", ROWS)
def test_what_moves_is_what_the_page_says(moves, row):
    prepare, action = ROWS[row]
    model = prepare()
    moves.taken()
    action(model)
    assert tuple(moves.taken().values()) == documented()[row]


def test_the_page_has_these_rows_and_no_others():
    assert list(documented()) == list(ROWS)


def test_the_programs_used_last_are_kept(moves):
    model = make()
    sizes = [2**n for n in range(9)]  # one more than the programs that are kept
    looked(model, *sizes)
    moves.taken()
    looked(model, *sizes[1:])
    assert moves.taken()["compiled"] == 0
    looked(model, sizes[0])  # was dropped
    assert moves.taken()["compiled"] == 1


def scaled_by_options():
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Training.setAutomaticLossScaling(True)
    return IPUConfig(training_options=options, precision="16.32")


@pytest.mark.parametrize(
    ("optimizer", "config"),
    [
        (Optimizer("adam", loss_scaling="auto"), IPUConfig(precision="16.32")),
        ("adam", scaled_by_options()),
        (Optimizer("sgd", 0.1, momentum=0.9), IPUConfig()),
    ],
)
def test_an_optimizer_begins_at_the_beginning_when_compile_is_called(optimizer, config):
    histories = []
    for is_again in (False, True):
        model = IPUModel(network(), config)
        start = model.get_weights()
        for _ in range(1 + is_again):
            model.compile(optimizer, "cross_entropy")
            model.set_weights(start)
            history = model.fit(X, Y, **FIT, epochs=3).history
        histories.append(history)
    assert histories[0] == histories[1]
    assert histories[0]["loss"][2] != histories[0]["loss"][0]
