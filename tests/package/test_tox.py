# SPDX-License-Identifier: Apache-2.0
"""What tox.ini names is there, and it names what pyproject.toml declares."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOX = (ROOT / "tox.ini").read_text("utf-8")
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def label(name):
    return re.search(rf"^    {name} = (.*)$", TOX, re.M)[1].split(", ")


@pytest.mark.parametrize("file", ["tox.ini", "tests/modes.txt", "tests/floor.txt"])
def test_the_tests_that_a_file_names_exist(file):
    text = (ROOT / file).read_text("utf-8")
    named = re.findall(r"(?:^|(?<=[ =@]))tests/\S+?(?=[}\s])", text, re.M)
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_matrix_has_every_python_that_is_declared():
    declared = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    pythons = [one for one in label("matrix") if re.match(r"py3\d+$", one)]
    assert [f"py{one.replace('.', '')}" for one in declared] == ["py38", *pythons]


def test_the_matrix_has_every_extra_but_those_of_developers():
    (section,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.M | re.S
    )
    extras = set(re.findall(r"^(\w+) = \[", section, re.M))
    tried = {one[6:] for one in label("matrix") if one.startswith("extra-")}
    assert extras - {"dev", "docs", "examples"} == tried
