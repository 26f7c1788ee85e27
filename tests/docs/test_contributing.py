# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md tells where things are, and the files that it names exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = runpy.run_path(str(ROOT / "tools" / "packages.py"))
MOST_FILES = 3


def section(title):
    [found] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return found


def rows(text):
    """The cells of the rows of a table, without its heading."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_map_is_what_the_files_say():
    _, _, rest = PAGE.partition(MAP["BEGIN"])
    assert rest.partition(MAP["END"])[0] == MAP["written"](), "run `make packages`"


def test_the_map_has_every_file_once_and_says_what_it_holds():
    files = [row for rows in MAP["sections"]().values() for row in rows]
    names = [name for name, _ in files if name.endswith(".py")]
    package = ROOT / "ipufit"
    there = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    expected = {name for name in there if not name.endswith("/__init__.py")}
    assert sorted(names) == sorted(expected)
    assert [name for name, holds in files if not holds.endswith(".")] == []


@pytest.mark.parametrize(
    "path", re.findall(r"`(tests/[^`]*)`", section("What always holds"))
)
def test_what_holds_a_rule_is_there(path):
    assert (ROOT / path).exists()


def test_a_change_opens_at_most_three_files_and_they_are_there():
    table = rows(section("Where to put it"))
    assert len(table) >= 5
    for change, cell, *_ in table:
        files = re.findall(r"`([^`]*/[^`]*)`", cell)
        assert 1 <= len(files) <= MOST_FILES, change
        assert [file for file in files if not (ROOT / file).exists()] == [], change
