# SPDX-License-Identifier: Apache-2.0
"""Docstrings name their subject: none is a riddle, at first sight at least."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ipufit"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SECTION = re.compile(
    r"^(?:Args|Attributes|Raises|Returns|Yields):\n((?:    .*\n?|\n)+)", re.M
)
ENTRY = re.compile(r"^    (\S.*(?:\n     +\S.*)*)", re.M)
# Beginnings without a subject: "What isn't left of a whole", "Those it had.".
RIDDLE = re.compile(
    r"What |Those |That of |Theirs\b|As many\.|Of |They (are|were|have)\b"
)


def beginnings(docstring):
    """The first line, and the text of each entry of a section."""
    yield docstring.partition("\n")[0]
    for section in SECTION.findall(docstring):
        for entry in ENTRY.findall(section):
            yield " ".join(entry.split()).partition(": ")[2]


def riddles(source):
    return [
        text
        for node in ast.walk(ast.parse(source))
        if isinstance(node, DOCUMENTED)
        for text in beginnings(ast.get_docstring(node) or "")
        if RIDDLE.match(text)
    ]


def test_docstrings_begin_with_their_subject():
    found = {path: riddles(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert len(found) > 100
