# SPDX-License-Identifier: Apache-2.0
"""The code in the documentation's pages runs."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

import ipufit

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"traced.md": 2}
"""Pages whose code runs from top to bottom, with the number of its pieces."""


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    pieces = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    assert len(pieces) >= PAGES[page]
    names = {"torch": torch, "types": types, "ipufit": ipufit, "x": torch.rand(64, 8)}
    for piece in pieces:
        exec(compile(piece, page, "exec"), names)
    assert names["model"].module.beta == 1.0
