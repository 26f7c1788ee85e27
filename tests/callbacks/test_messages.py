# SPDX-License-Identifier: Apache-2.0
"""What callbacks say goes to standard output, above a bar."""

from __future__ import annotations

import io
import sys

from rich.console import Console

from ipufit.callbacks.messages import say
from ipufit.callbacks.progress import make_progress
from ipufit.state import RunState


def test_a_line_is_written_at_once(monkeypatch):
    class Flushed(io.StringIO):
        flushed = ""

        def flush(self):
            self.flushed = self.getvalue()

    monkeypatch.setattr(sys, "stdout", Flushed())
    say("\nEpoch 1: saved")
    assert sys.stdout.flushed == "\nEpoch 1: saved\n"


def test_a_line_goes_above_the_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    display = make_progress(1, Console(file=screen, force_terminal=True, width=100))
    display.set_run(RunState(params={"calls": 2}))
    display.on_predict_begin({})
    say("saved")
    display.on_predict_end({})
    text = screen.getvalue()
    assert "saved\n" in text
    assert text.index("saved\n") < text.rindex("Predicting")
