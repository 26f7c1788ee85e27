# SPDX-License-Identifier: Apache-2.0
"""The page of the namespace: up to date, with a row for each of PopTorch's names."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from tests.golden.differences import MISSING
from tests.golden.namespace_remarks import LEGEND, REMARKS
from tests.golden.namespace_table import GOLDEN, PAGE, names, page, sections

GOLDEN_NAMES = json.loads(GOLDEN.read_text(encoding="utf-8"))
ROWS = names(GOLDEN_NAMES)


def test_the_page_is_up_to_date():
    current = PAGE.read_text(encoding="utf-8")
    assert current == page(GOLDEN_NAMES), "run python -m tests.golden.namespace_table"


def test_every_public_name_has_one_row():
    expected = {
        name[: -len(".__init__")] if name.endswith(".__init__") else name
        for part in ("signatures", "enums", "others")
        for name in GOLDEN_NAMES[part]
    }
    shown = [row.name for _, inside in sections(ROWS) for row in inside]
    assert sorted(shown) == sorted(expected)
    lines = page(GOLDEN_NAMES).splitlines()
    for row in ROWS:
        assert lines.count(f"| `{row.text}` | {row.status} | {row.remark} |") == 1


@pytest.mark.parametrize("pattern", REMARKS)
def test_a_remark_is_about_some_name_that_is_there(pattern):
    status, _ = REMARKS[pattern]
    assert status in LEGEND
    matching = [row for row in ROWS if fnmatchcase(row.name, pattern)]
    assert any(row.name not in MISSING for row in matching)
