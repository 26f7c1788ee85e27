# SPDX-License-Identifier: Apache-2.0
"""The page of the namespace: up to date, with a row for each of PopTorch's names."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from tests.golden.differences import DIFFERENT, MISSING
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


def test_every_section_has_names():
    assert all(inside for _, inside in sections(ROWS))


@pytest.mark.parametrize("pattern", REMARKS)
def test_a_remark_is_about_some_name_that_is_there(pattern):
    status, _ = REMARKS[pattern]
    assert status in LEGEND
    matching = [row for row in ROWS if fnmatchcase(row.name, pattern)]
    assert any(row.name not in MISSING for row in matching)


def test_what_is_missing_says_why():
    missing = {row.name: row.remark for row in ROWS if row.status == "missing"}
    assert missing == MISSING


def test_a_signature_that_differs_is_remarked():
    remarks = {row.name: row.remark for row in ROWS}
    for name, (_, why) in DIFFERENT.items():
        owner = name[: -len(".__init__")] if name.endswith(".__init__") else name
        assert why in remarks[owner]
