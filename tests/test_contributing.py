# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md tells where things are: its packages and files exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = runpy.run_path(str(ROOT / ".ci" / "packages.py"))["packages"]()
MOST_FILES = 3
ADVICE = "the table is outdated: run `make packages`"


def section(title):
    [found] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return found


def rows(text):
    """The cells of the rows of a table, without its heading."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_table_has_every_package():
    table = {path: cells for path, *cells in rows(section("Find your way"))}
    assert set(table) == {f"`{package.path}`" for package in PACKAGES}
    assert len(PACKAGES) > 20


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.path)
def test_a_package_is_as_large_as_the_table_says(package):
    table = {path: cells for path, *cells in rows(section("Find your way"))}
    files, lines, subject = table[f"`{package.path}`"]
    assert int(files) == package.files, "run `make packages`"
    assert subject == package.subject, "run `make packages`"
    assert abs(int(lines.replace(",", "")) - package.lines) <= 150, (
        "run `make packages`"
    )


def test_a_change_opens_at_most_three_files_and_they_are_there():
    table = rows(section("Where to put it"))
    assert len(table) >= 5
    for change, cell, *_ in table:
        files = re.findall(r"`([^`]*/[^`]*)`", cell)
        assert 1 <= len(files) <= MOST_FILES, change
        assert [file for file in files if not (ROOT / file).exists()] == [], change
