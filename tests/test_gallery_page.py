# SPDX-License-Identifier: Apache-2.0
"""The page of the examples says what the scripts say, and has a picture of each."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.test_examples import MODULES
from tests.test_examples import SCRIPTS as IN_PROCESSES
from tests.test_gallery import SCRIPTS as GALLERY

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
WRITER = runpy.run_path(str(ROOT / ".ci" / "gallery.py"))
SCRIPTS = [script for scripts in WRITER["SECTIONS"].values() for script in scripts]
ADVICE = "the page is outdated: run `python .ci/gallery.py`"


def test_every_script_has_its_place_on_the_page():
    found = {path.name for path in EXAMPLES.glob("*.py")} - MODULES
    assert sorted(SCRIPTS) == sorted(found)
    assert len(SCRIPTS) >= 16


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_row_has_the_title_and_a_last_line_as_the_test_wants_it(script):
    link = re.escape(f"| [{script}]({script}) | ")
    [(title, number, _)] = re.findall(rf"^{link}(.*) \| (.*) \| (\d+) \|$", PAGE, re.M)
    assert title == WRITER["title"](script), ADVICE
    _, pattern, least = {**IN_PROCESSES, **GALLERY}[script]
    match = re.fullmatch(pattern, number)
    assert match is not None, number
    assert float(match.group(1)) >= least


def test_each_script_has_a_small_picture_and_no_other_is_there():
    pictures = sorted((EXAMPLES / "pictures").iterdir())
    assert {path.stem for path in pictures} == {Path(one).stem for one in SCRIPTS}
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size <= WRITER["LARGEST_PICTURE"], path


def test_the_page_is_its_own_parts_in_order():
    rows = re.findall(r"^\| \[.*\]\(.*\) \| .* \| (.*) \| (\d+) \|$", PAGE, re.M)
    results = {
        script: WRITER["Result"](number, float(seconds))
        for script, (number, seconds) in zip(SCRIPTS, rows)
    }
    assert WRITER["page"](results) == PAGE, ADVICE
