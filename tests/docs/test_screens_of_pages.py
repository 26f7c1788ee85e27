# SPDX-License-Identifier: Apache-2.0
"""Pages show what their code prints and draws: `make screens` has put it there."""

import runpy
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "tools" / "screens.py"))
PAGES = [page for page in WRITER["PAGES"] if WRITER["has_screens"](page)]
ADVICE = "the page is outdated: run `make screens`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_its_code_prints_and_draws(page, monkeypatch):
    monkeypatch.setattr(
        subprocess, "run", lambda command, env, **_: run_python(*command[1:], env=env)
    )
    text = page.read_text("utf-8")
    pictures = WRITER["PICTURE"].findall(text)
    if pictures:
        pytest.importorskip("matplotlib")
    if "import pandas" in text:
        pytest.importorskip("pandas")
    found = WRITER["shown"](page)
    without_times = WRITER["without_times"]
    assert without_times(found.text) == without_times(text), ADVICE
    assert sorted(found.pictures) == sorted(pictures)
    for name, drawn in found.pictures.items():
        # Another matplotlib may write other bytes, and places that differ a little.
        here = WRITER["picture_of"](page, name).read_text("utf-8")
        assert words_of(drawn) == words_of(here), ADVICE


def words_of(picture):
    """The texts of an SVG, in their order."""
    texts = ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).split() for text in texts]
