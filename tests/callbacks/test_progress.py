# SPDX-License-Identifier: Apache-2.0
"""What a run shows, on a fixed console and a manual clock."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ipufit import ConfigError
from ipufit.callbacks import (
    ProgressBar,
    TerminateOnNaN,
    make_progress,
    progress,
)
from ipufit.callbacks.progress import (
    BarProgress,
    LineProgress,
    ProgressDisplay,
    format_logs,
    in_lines,
)
from ipufit.state import RunState
from tests.callbacks.driving import linear
from tests.reference import AtEpochEnd

LOGS = {"accuracy": 0.98765, "loss": 0.25}


class ManualClock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def console():
    def make(*, is_terminal, width=120):
        return Console(
            file=io.StringIO(),
            width=width,
            force_terminal=is_terminal,
            color_system=None,
            legacy_windows=False,
            _environ={},
        )

    return make


def shown(console):
    """What is on the screen at the end, as a terminal draws it."""
    lines, row = [""], 0
    tokens = re.findall(
        r"\x1b\[\??\d*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", console.file.getvalue()
    )
    for token in tokens:
        if token == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return [line.rstrip() for line in lines if line.strip()]


def play_fit(display, clock, coverage="", *, epochs=2, calls=2, steps=2, logs=LOGS):
    """Epochs of two calls of 50 samples, a second each; the length may be unknown."""
    run = RunState(coverage=coverage)
    run.params = {"epochs": epochs, "calls": calls, "steps": steps, "verbose": 1}
    display.set_run(run)
    display.compiling("training")
    display.compiled("training", 1.25)
    display.on_train_begin({})
    for epoch in range(epochs):
        display.on_epoch_begin(epoch, {})
        for call in range(2):
            display.on_train_batch_begin(call, {})
            clock.now += 1.0
            run.samples += 50
            display.on_train_batch_end(call, logs)
        display.on_test_begin({})
        display.on_test_batch_begin(0, {})
        display.on_test_batch_end(0, logs)
        display.on_test_end(logs)
        display.on_epoch_end(epoch, {**logs, "val_loss": 1e-4})
    display.on_train_end(logs)
    display.close()


FIGURES = "accuracy: 0.9877 - loss: 0.2500 - val_loss: 1.0000e-04"


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "width"),
    [(2, True, 120), (1, False, 24)],
)
def test_lines_are_one_per_compilation_and_epoch(
    console, clock, verbose, is_terminal, width
):
    """Also of bars that can't be redrawn."""
    screen = console(is_terminal=is_terminal, width=width)
    play_fit(make_progress(verbose, screen, clock), clock)
    assert screen.file.getvalue() == (
        "Compiled the training program in 1.2s\n"
        f"Epoch 1/2\n2/2 - 2s - 1s/step - {FIGURES}\n"
        f"Epoch 2/2\n2/2 - 2s - 1s/step - {FIGURES}\n"
    )


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("params", [{"calls": 4}, {"steps": None}])
def test_evaluate_and_predict_have_a_line_of_their_own(console, clock, method, params):
    screen = console(is_terminal=False)
    display = make_progress(2, screen, clock)
    display.set_run(RunState(params={"epochs": 1, **params}))
    kind = "test" if method == "evaluate" else "predict"
    getattr(display, f"on_{kind}_begin")({})
    for call in range(4):
        clock.now += 0.0025
        getattr(display, f"on_{kind}_batch_end")(call, LOGS)
    getattr(display, f"on_{kind}_end")(LOGS)
    figures = " - accuracy: 0.9877 - loss: 0.2500" if kind == "test" else ""
    assert screen.file.getvalue() == f"4/4 - 0s - 2ms/step{figures}\n"


@pytest.mark.parametrize("verbose", [1, 2])
def test_a_run_without_a_call_says_nothing_wrong(console, clock, verbose):
    screen = console(is_terminal=False)
    display = make_progress(verbose, screen, clock)
    display.set_run(RunState(params={"epochs": 3, "steps": 0, "calls": 0}))
    display.on_train_begin({})
    display.on_train_end({})
    display.on_predict_begin({})
    display.on_predict_end({})
    display.close()
    assert "step" not in screen.file.getvalue()


BARS = f"""
Compiling the training program ...
Compiled the training program in 1.2s
Epoch 1/2 {"━" * 20} 2/2 0:00:02 50 samples/s - {FIGURES}
Epoch 2/2 {"━" * 20} 2/2 0:00:02 50 samples/s - {FIGURES}
"""

# Narrow: the figures are below, and each of them is whole.

TINY_BARS = """
Compiling the training
program ...
Compiled the training
program in 1.2s
Epoch 1/2 2/2 0:00:02
50 samples/s
accuracy: 0.9877
loss: 0.2500
val_loss: 1.0000e-04
Epoch 2/2 2/2 0:00:02
50 samples/s
accuracy: 0.9877
loss: 0.2500
val_loss: 1.0000e-04
"""


@pytest.mark.parametrize(("width", "expected"), [(120, BARS), (24, TINY_BARS)])
def test_bars_stay_with_the_figures_of_their_epoch(console, clock, width, expected):
    screen = console(is_terminal=True, width=width)
    play_fit(make_progress(1, screen, clock), clock)
    assert shown(screen) == expected.strip().splitlines()


@pytest.mark.parametrize("has_widgets", [True, False])
def test_in_a_notebook_bars_need_widgets(monkeypatch, has_widgets):
    found = object() if has_widgets else None
    monkeypatch.setattr(progress, "find_spec", lambda name: found)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    assert progress.can_redraw(notebook) is has_widgets


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_dumb_terminal_redraws_nothing(term):
    screen = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert progress.can_redraw(screen) is (term == "xterm")


@given(
    figures=st.lists(st.text("ab: ", min_size=1, max_size=9), min_size=1),
    width=st.integers(1, 40),
)
def test_lines_have_all_figures_and_are_as_few_as_can_be(figures, width):
    lines = in_lines(" - ".join(figures), width).split("\n")
    assert " - ".join(lines) == " - ".join(figures)
    for line, after in zip(lines, lines[1:]):
        assert len(line) <= width or " - " not in line
        assert len(f"{line} - {after.split(' - ')[0]}") > width


@pytest.mark.parametrize("verbose", [1, 2])
def test_an_evaluation_shows_its_figures_and_what_they_cover(console, clock, verbose):
    screen = console(is_terminal=True)
    display = make_progress(verbose, screen, clock)
    display.set_run(RunState(coverage="half of them", params={"calls": 1}))
    display.on_test_begin({})
    display.on_test_batch_end(0, LOGS)
    display.on_test_end(LOGS)
    display.close()
    text = " ".join(shown(screen))
    assert text.startswith("Evaluating" if verbose == 1 else "1/1 - 0s - ")
    assert "accuracy: 0.9877 - loss: 0.2500 (half of them)" in text


def test_a_bar_of_unknown_length_says_so_while_it_runs(console, clock):
    screen = console(is_terminal=True)
    display = make_progress(1, screen, clock)
    display.set_run(RunState(params={"calls": None}))
    display.on_predict_begin({})
    display.on_predict_batch_end(0, {})
    display.close()  # as after an error
    assert "1/?" in shown(screen)[-1]


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "expected"),
    [
        (0, True, ProgressDisplay),
        (1, False, BarProgress),
        (2, True, LineProgress),
        ("auto", True, BarProgress),
        ("auto", False, LineProgress),
    ],
)
def test_auto_is_bars_on_a_terminal_and_lines_elsewhere(
    console, verbose, is_terminal, expected
):
    assert type(make_progress(verbose, console(is_terminal=is_terminal))) is expected


@pytest.mark.parametrize("verbose", [3, "1", None])
def test_an_unknown_verbosity_is_refused(verbose):
    with pytest.raises(ConfigError, match="none of 0, 1, 2 and 'auto'"):
        make_progress(verbose)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.5, "0.5000"),
        (-0.5, "-0.5000"),  # unlike Keras's verbose=2, which writes -5.0000e-01
        (12345.6, "12345.6000"),
        (0.001, "1.0000e-03"),
        (0.0, "0.0000e+00"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_kerass(value, expected):
    assert format_logs({"loss": value}) == f"loss: {expected}"


# In a fit -------------------------------------------------------------------------


def make_model():
    return linear(2)


DATA = torch.randn(8, 2), torch.randn(8, 1)


def test_a_fit_with_lines_prints_them_to_standard_output(capsys):
    model = make_model()
    model.fit(*DATA, batch_size=4, epochs=2, validation_split=0.5, verbose=2)
    model.evaluate(*DATA, batch_size=4, verbose=2)
    model.predict(DATA[0], batch_size=4, verbose=2)
    out, err = capsys.readouterr()
    lines = [re.sub(r"[\d.]+s", "_s", line) for line in out.splitlines()]
    assert [line.split(" - ")[0] for line in lines] == [
        "Compiled the inference program in _s",
        "Compiled the training program in _s: 1 update per call (device_iterations "
        "left open); not more because no larger number divides the one update of an "
        "epoch",
        "Epoch 1/2",
        "1/1",
        "Epoch 2/2",
        "1/1",
        "Compiled the inference program in _s: 2 passes per call (inference_iterations "
        "left open); not more because one call takes all 2",
        "2/2",
        "2/2",
    ]
    assert err == ""


@pytest.mark.parametrize("verbose", [1, "auto"])
def test_an_error_within_a_bar_leaves_the_terminal_usable(monkeypatch, capsys, verbose):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: behave as on a terminal

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model().fit(
            *DATA, batch_size=4, callbacks=AtEpochEnd(interrupt), verbose=verbose
        )
    out = capsys.readouterr().out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h")  # cursor hidden, shown
    assert out.endswith("\n") or out.endswith("\x1b[?25h")
    model = make_model()
    model.fit(*DATA, batch_size=4, verbose=verbose)  # a bar of its own starts


def test_what_callbacks_say_goes_above_the_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    display = make_progress(1, Console(file=screen, force_terminal=True, width=100))
    display.set_run(RunState(params={"calls": 2}))
    stopping = TerminateOnNaN()
    display.on_predict_begin({})
    stopping.on_train_batch_end(7, {"loss": float("nan")})
    display.on_predict_end({})
    text = screen.getvalue()
    said = text.index("Batch 7: Invalid loss, terminating training\n")
    assert said < text.rindex("Predicting")


# `ProgressBar`, in the place of the display that `verbose` asks for ----------------


def bar_and_text():
    text = io.StringIO()
    return ProgressBar(
        Console(file=text, width=120, force_terminal=True), clock=lambda: 0.0
    ), text


def fitted(callbacks, verbose):
    model = linear()
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
