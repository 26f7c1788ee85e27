# SPDX-License-Identifier: Apache-2.0
"""The page on what scripts write by hand: its arguments and its tests exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ipufit
from ipufit import IPUModel

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "by-hand.md").read_text(encoding="utf-8")
NUM_CONCERNS = 41
CALL = re.compile(r"`([A-Za-z_.]+)(?:\(([^`]*)\))?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows():
    """The cells of each row: number, concern, by hand, lines, in ipufit, test."""
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def found(name):
    """A public name, or a method of the model without its class."""
    owner, _, own = name.rpartition(".")
    if owner in ("", "IPUModel") and name not in ipufit.__all__:
        return getattr(IPUModel, own)
    return getattr(ipufit, name)


def test_every_concern_has_a_row():
    assert [int(row[0]) for row in rows()] == list(range(1, NUM_CONCERNS + 1))
    assert len({row[1] for row in rows()}) == NUM_CONCERNS


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1])
def test_arguments_and_tests_of_a_row_exist(row):
    _, _, by_hand, lines, cell, test = row
    assert re.search(r": `[\w/]+\.py`$", by_hand)
    assert re.fullmatch(r"\d+(\+|-\d+)?|-|all over", lines)
    names = [call for call in CALL.findall(cell) if call[0] != "requires_grad"]
    for name, inside in names:
        arguments = re.findall(r"(\w+)=", inside)
        assert set(arguments) <= set(inspect.signature(found(name)).parameters)
    assert names or "requires_grad" in cell
    file, function = TEST.fullmatch(test).groups()
    assert re.search(rf"^def {function}\(", (ROOT / file).read_text("utf-8"), re.M)


def test_what_is_not_there_is_found():
    with pytest.raises(AttributeError):
        found("IPUModel.fits")
    assert found("fit") is IPUModel.fit
    assert found("IPUConfig") is ipufit.IPUConfig


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(compile(code, "by-hand.md", "exec"), {})
    assert len(list((tmp_path / "run").iterdir())) == 3
