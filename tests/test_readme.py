# SPDX-License-Identifier: Apache-2.0
"""The README's example runs, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]


def code_blocks(page, language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S
    )


def test_the_example_of_the_readme_runs(capsys):
    (code,) = code_blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    results, shape = (line for line in lines if line[0] in "{t")  # not the progress
    assert re.fullmatch(r"\{'accuracy': 0\.\d+, 'loss': \d\.\d+\}", results)
    assert shape == "torch.Size([2000, 4])"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_there_are_links_to_check():
    assert re.search(r"\]\(docs/", (ROOT / "README.md").read_text("utf-8"))
