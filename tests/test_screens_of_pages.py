# SPDX-License-Identifier: Apache-2.0
"""Pages show what their code prints and draws: `make screens` has put it there."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.pictures.reading import texts_of_svg

ROOT = Path(__file__).parent.parent
WRITER = runpy.run_path(str(ROOT / ".ci" / "screens.py"))
PAGES = [page for page in WRITER["PAGES"] if WRITER["has_screens"](page)]
ADVICE = "the page is outdated: run `make screens`"


def test_there_are_pages_with_screens():
    assert "pipelines.md" in [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_code_prints_and_draws(page):
    pytest.importorskip("matplotlib")
    found = WRITER["shown"](page)
    assert found.text == page.read_text("utf-8"), ADVICE
    assert found.pictures
    for name, drawn in found.pictures.items():
        # Another matplotlib may write other bytes, and places that differ a little.
        here = texts_of_svg((page.parent / name).read_text("utf-8"))
        assert [told for _, _, told in texts_of_svg(drawn)] == [
            told for _, _, told in here
        ], ADVICE


def test_only_the_block_above_is_printed(tmp_path):
    page = tmp_path / "page.md"
    mark = WRITER["MARK"]
    page.write_text(
        f"```python\nprint(1)\n```\n```python\nprint(2)\n```\n\n{mark}```text\nold\n```\n"
    )
    new = page.read_text().replace("old", "2")
    assert WRITER["has_screens"](page)
    assert WRITER["shown"](page) == (new, {})
