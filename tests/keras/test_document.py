# SPDX-License-Identifier: Apache-2.0
"""`docs/reference/keras.md` lists every deviation, and each has its test."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "reference" / "keras.md"


def names_of_tests(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def listed():
    """The test of every row of a table that has one, in order."""
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    return [
        name
        for row in rows
        if row.startswith("|")
        for name in re.findall(r"`(test_\w+)` \|$", row)
    ]


def test_every_deviation_that_is_tested_is_a_row():
    deviations = [names_of_tests(path) for path in HERE.glob("test_deviations_*.py")]
    assert len(deviations) > 1
    assert set().union(*deviations) - set(listed()) == set()


def test_every_row_has_a_test():
    tests = set().union(*(names_of_tests(path) for path in HERE.glob("test_*.py")))
    assert set(listed()) - tests == set()
    assert len(listed()) > 20


def test_every_row_of_deviations_names_its_test():
    page = PAGE.read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", page)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) == len(listed())
    assert [row for row in rows if not re.search(r"`test_\w+` \|$", row)] == []


def test_no_row_is_there_twice():
    assert len(set(listed())) == len(listed())
