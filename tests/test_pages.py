# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation's pages runs."""

from __future__ import annotations

import dataclasses
import re
import types
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import IPUConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"config.md": 4, "memory.md": 1, "traced.md": 2}
"""Pages whose code runs from top to bottom, with the number of its pieces."""


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    pieces = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    assert len(pieces) >= PAGES[page]
    names = {"torch": torch, "types": types, "ipufit": ipufit, "x": torch.rand(64, 8)}
    for piece in pieces:
        exec(compile(piece, page, "exec"), names)
    if page == "traced.md":
        assert names["model"].module.beta == 1.0


def test_the_page_on_the_config_has_every_field():
    page = (DOCS / "config.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) (?:\([TI]\) )?\|", page, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(one.name for one in dataclasses.fields(IPUConfig))
