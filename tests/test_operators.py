# SPDX-License-Identifier: Apache-2.0
"""The table of operators is complete in itself, and its page counts it right."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

from ipufit.emulator.core.rules import RULES

ROOT = Path(__file__).parent.parent
VERDICTS = {
    "same": "computes what torch does",
    "number": "computes another number",
    "gradient": "computes another gradient",
    "shape": "returns another shape",
    "type": "returns another type",
    "nan": "returns NaN or infinity where torch doesn't, or the reverse",
    "refused": "refuses",
}
ANSWERS = {"has", "reported", "lacks", "strict"}


def rows():
    with (ROOT / "ipufit/emulator/core/operators.tsv").open(
        encoding="utf-8", newline=""
    ) as file:
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "restval": ""}
        return list(csv.DictReader(file, **how))


def test_each_row_has_a_verdict_a_sentence_and_a_citation():
    for row in rows():
        assert None not in row, row
        assert None not in row.values(), row
        assert row["verdict"] in VERDICTS, row
        assert row["emulator"] in ANSWERS, row
        assert row["operator"], row
        assert bool(row["why"]) == (row["emulator"] == "lacks"), row
        assert row["device"], row
        assert re.search(r"\w\.(cpp|hpp|S|py|inc|yaml)\b|torch ", row["citation"]), row


def test_no_row_stands_twice():
    keys = Counter((row["source"], row["operator"], row["when"]) for row in rows())
    assert [key for key, count in keys.items() if count > 1] == []


def counts():
    """The lines of the page's table: rows by verdict, and what the emulator does."""
    ways = ("has", "reported", "strict", "lacks")
    lines = ["| a device | rows | does so | reported | strict | as torch |"]
    lines.append("|---|---|---|---|---|---|")
    for verdict, words in VERDICTS.items():
        found = Counter(row["emulator"] for row in rows() if row["verdict"] == verdict)
        numbers = [sum(found.values()), *(found[way] for way in ways)]
        lines.append(f"| {words} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def test_the_page_counts_them():
    assert counts() in (ROOT / "docs/reference/operators.md").read_text("utf-8")


def test_each_rule_is_a_row_that_the_emulator_has():
    rules = {one.row for found in RULES.values() for one in found}
    named = {row["rule"]: row for row in rows() if row["rule"]}
    assert rules == named.keys()
    assert {row["emulator"] for row in named.values()} <= {"has", "reported"}
    assert {row["verdict"] for row in named.values()} <= VERDICTS.keys() - {"same"}


def test_rows_that_warn_can_be_told_from_one_call():
    reported = {one.row for found in RULES.values() for one in found if one.is_reported}
    warned = [row for row in rows() if row["warns"]]
    assert {row["warns"] for row in warned} == {"yes"}
    assert {row["rule"] for row in warned} <= reported
    assert {row["verdict"] for row in warned} <= {"gradient", "nan", "number"}
