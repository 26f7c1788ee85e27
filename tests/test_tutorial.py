# SPDX-License-Identifier: Apache-2.0
"""The tutorial runs from top to bottom, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text("utf-8")
PIECES = re.findall(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", PAGE, re.S)
NUMBER = re.compile(r"\d+\.\d+")
WORDS_A_MINUTE = 200


def test_every_piece_prints_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for code, expected in PIECES:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "tutorial.md", "exec"), names)
        assert_alike(printed.getvalue(), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["spirals.safetensors"]


def assert_alike(printed, expected):
    """The same text; decimals may differ as rounding on another machine makes them."""
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
    numbers = [float(number) for number in NUMBER.findall(printed)]
    said = [float(number) for number in NUMBER.findall(expected)]
    assert numbers == pytest.approx(said, abs=0.03)


def test_results_are_shown():
    assert sum(bool(expected) for _, expected in PIECES) >= 7
    with pytest.raises(AssertionError):
        assert_alike("accuracy 0.90\n", "accuracy 0.95\n")
    with pytest.raises(AssertionError):
        assert_alike("", "True\n")


def test_it_is_read_in_ten_minutes():
    assert len(PAGE.split()) < 10 * WORDS_A_MINUTE
