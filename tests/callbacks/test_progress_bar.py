# SPDX-License-Identifier: Apache-2.0
"""`ProgressBar` in the place of the display that `verbose` asks for."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from ipufit import IPUModel
from ipufit.callbacks import LambdaCallback, ProgressBar


def bar_and_text():
    text = io.StringIO()
    return ProgressBar(
        Console(file=text, width=120, force_terminal=True), clock=lambda: 0.0
    ), text


def fitted(callbacks, verbose):
    model = IPUModel(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    x = torch.ones(4, 1)
    model.fit(x, x, batch_size=2, callbacks=callbacks, verbose=verbose)
    return model, x


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_it_shows_whatever_verbose_says_and_alone(verbose, capsys):
    bar, text = bar_and_text()
    fitted([bar], verbose)
    assert "Compiled the training program" in text.getvalue()
    assert "Epoch 1/1" in text.getvalue()
    assert "loss: " in text.getvalue()
    assert capsys.readouterr().out == ""


def test_it_can_be_used_again_for_other_runs():
    bar, text = bar_and_text()
    model, x = fitted([[bar]], 0)
    model.evaluate(x, x, callbacks=bar, verbose=0)
    model.predict(x, callbacks=bar, verbose=0)
    assert "Evaluating" in text.getvalue()
    assert "Predicting" in text.getvalue()


def test_it_leaves_the_terminal_after_an_error():
    """A bar that were still there would be a thread that outlives the test."""
    bar, _ = bar_and_text()
    failing = LambdaCallback(on_train_batch_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fitted([bar, failing], 0)


def test_standard_output_is_its_default(capsys):
    fitted(ProgressBar(), 0)
    assert "2/2 - " in capsys.readouterr().out  # lines, where no bar can be redrawn
