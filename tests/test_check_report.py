# SPDX-License-Identifier: Apache-2.0
"""Reports of checks, as lines, as a table and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ipufit.model.checking import (
    SEVERITIES,
    CheckReport,
    Finding,
    _parted,
    report_of,
)

WORDS = st.text("abc", min_size=1, max_size=5)
FINDINGS = st.builds(Finding, st.sampled_from(SEVERITIES), WORDS, WORDS, WORDS, WORDS)


@given(st.lists(FINDINGS))
def test_reports_have_each_finding_once_and_the_gravest_first(findings):
    report = report_of("Net", findings)
    assert set(report.findings) == set(findings)
    assert len(report.findings) == len(set(findings))
    order = [SEVERITIES.index(one.severity) for one in report.findings]
    assert order == sorted(order)
    assert report.is_refused == any(one.severity == "refused" for one in findings)
    assert sum(len(report.of(severity)) for severity in SEVERITIES) == len(order)


@given(st.lists(FINDINGS))
def test_json_has_all_of_it(findings):
    report = report_of("Net", findings)
    data = json.loads(report.as_json())
    again = tuple(Finding(**one) for one in data["findings"])
    assert CheckReport(data["title"], again) == report
    assert data["is_refused"] is report.is_refused


def shown(report, width=100):
    file = io.StringIO()
    report.print(Console(file=file, width=width))
    return file.getvalue()


def test_the_table_shows_where_and_what():
    one = Finding("refused", "value", "It reads", "Leave it", "encoder", "train.py:3")
    text = shown(report_of("Net", [one, Finding("slow", "calls", "[many]")]))
    for part in ("Net", "refused", "train.py:3", "encoder", "It reads", "Leave it"):
        assert part in text
    assert "[many]" in text
    assert "Doesn't run: 1 refused, 1 slow." in text


def test_nothing_found_is_one_line():
    assert shown(report_of("Net", [])) == "Net: Nothing is refused.\n"


def test_a_finding_is_a_line():
    assert str(Finding("slow", "calls", "Many calls")) == "slow: Many calls"
    one = Finding("refused", "value", "It reads.", "Leave it.", "a.b", "x.py:3")
    assert str(one) == "refused: It reads (x.py:3, in a.b). Leave it."


@pytest.mark.parametrize(
    ("message", "what", "advice"),
    [
        ("No way.", "No way.", ""),
        ("It fails: bad", "It fails: bad", ""),
        ("It fails (a.b). Use `x.y`.", "It fails (a.b).", "Use `x.y`."),
        ("f fails. Then g. `h` helps.", "f fails. Then g.", "`h` helps."),
    ],
)
def test_messages_end_with_advice(message, what, advice):
    assert _parted(message) == (what, advice)
