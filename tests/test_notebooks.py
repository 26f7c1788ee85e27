# SPDX-License-Identifier: Apache-2.0
"""The page on notebooks: its cells run, and leave no emulator installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import ipufit.emulator

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "notebooks.md"


@pytest.mark.skipif(
    importlib.util.find_spec("poptorch") is not None, reason="PopTorch is installed"
)
def test_the_code_of_the_page_runs(capsys):
    pieces = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    assert len(pieces) == 4
    names = {}
    try:
        for piece in pieces:
            exec(compile(piece, PAGE.name, "exec"), names)
    finally:
        ipufit.emulator.uninstall()
    assert capsys.readouterr().out.endswith("torch.Size([40, 4])\n")
