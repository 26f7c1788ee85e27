# SPDX-License-Identifier: Apache-2.0
"""The page of errors: each section's code fails as it says, and its fix works."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import ipufit

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "reference" / "errors.md").read_text("utf-8")
PRELUDE, *SECTIONS = re.split(r"^## ", PAGE, flags=re.M)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMON = {"Error": ipufit.poptorch.Error}


def run(code, names):
    exec(compile(code, "errors.md", "exec"), names)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_a_section_says_what_happens(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    run(BLOCK.search(PRELUDE).group(2), names)
    (_, fails), (_, message), *fixes = BLOCK.findall(section)
    name, _, words = message.strip().partition(": ")
    kind = COMMON.get(name) or getattr(ipufit, name)
    if issubclass(kind, Warning):
        with pytest.warns(kind, match=re.escape(words)):
            run(fails, names)
    else:
        with pytest.raises(kind) as raised:
            run(fails, names)
        assert type(raised.value) is kind
        assert words in str(raised.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ipufit.IpufitWarning)
        for _, code in fixes:
            run(code, names)


def test_there_are_sections():
    assert len(SECTIONS) >= 18


def test_the_other_errors_and_warnings_have_a_text():
    """Each class has its entry among the public names, with its docstring."""
    classes = [
        getattr(ipufit, name)
        for name in ipufit.__all__
        if name.endswith(("Error", "Warning"))
    ]
    assert all(one.__doc__ for one in classes)
    assert len(classes) > 20
