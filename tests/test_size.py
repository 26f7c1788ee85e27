# SPDX-License-Identifier: Apache-2.0
"""Each room of the package has a budget of code lines and tokens, and only a few files.

Docstrings, comments and blank lines cost nothing. Tokens are counted beside lines, so
that long lines gain nothing. A change that needs more raises a number of `ROOMS` in the
same commit, and says there what users get for it. A change that makes a room much
smaller lowers its numbers: a failing test prints them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "ipufit"


class Size(NamedTuple):
    files: int
    lines: int
    tokens: int


# Room -> its limits, and the packages and modules right under `ipufit` that it has.
ROOMS = {
    "emulator": (Size(77, 13321, 104021), "emulator"),
    "engine and model": (Size(20, 8328, 65682), "engine model"),
    "data": (Size(5, 2784, 22584), "data"),
    "metrics and losses": (Size(12, 1955, 16816), "metrics losses"),
    "optimizers": (Size(4, 1691, 12887), "optimizers"),
    "callbacks": (Size(9, 2035, 16685), "callbacks"),
    "checkpoint and resume": (Size(5, 2137, 16671), "checkpoint resume"),
    "config, placement, batching": (
        Size(4, 1301, 9842),
        "batching config mixing placement",
    ),
    "planning": (
        Size(7, 1207, 9233),
        "planning",
    ),
    "conformance": (Size(5, 1495, 15579), "conformance"),
    "command lines, distributed, Lightning, ground": (
        Size(18, 2913, 20112),
        "__init__ cli __main__ _env _files _kinds _lazy _poptorch "
        "_torchrun _tree _version distributed doctor errors "
        "integrations state types",
    ),
}
MAX_TOKENS_PER_LINE = 7.85  # of the emulator
# A limit may be that much above what a room has: several people may make rooms smaller
# at the same time, and not each of them touches this file.
SLACK = 1.10
SLACK_LINES = 50

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(source):
    """Count a module's lines of code and its tokens.

    From Python 3.12 on the parts of an f-string are tokens. They count as one, as they
    do before.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    lines, tokens, open_strings = set(), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NO_CODE or token.start[0] in docstrings:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        kind = tokenize.tok_name[token.type]
        tokens += not open_strings
        open_strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return Size(1, len(lines), tokens)


def total(sizes):
    return Size(*map(sum, zip(*sizes)))


SIZES = {
    path.relative_to(PACKAGE).with_suffix("").parts: count(
        path.read_text(encoding="utf-8")
    )
    for path in sorted(PACKAGE.rglob("*.py"))
}


def size_of(room):
    _, names = ROOMS[room]
    return total(size for path, size in SIZES.items() if path[0] in names.split())


def test_every_module_belongs_to_one_room():
    rooms = " ".join(names for _, names in ROOMS.values()).split()
    assert len(rooms) == len(set(rooms))
    assert {path[0] for path in SIZES} == set(rooms)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room):
    limits, _ = ROOMS[room]
    size = size_of(room)
    assert all(has <= limit for has, limit in zip(size, limits)), (
        f"{room}: {size} is more than {limits}"
    )


@pytest.mark.parametrize("room", ROOMS)
def test_a_budget_follows_a_room_that_got_smaller(room):
    limits, _ = ROOMS[room]
    size = size_of(room)
    assert not is_loose(size, limits), f"{room}: lower the limits {limits} to {size}"


def is_loose(size, limits):
    """Whether a limit of lines is far above the lines of a room."""
    return limits.lines > size.lines * SLACK + SLACK_LINES


def test_the_lines_of_the_emulator_are_short():
    size = size_of("emulator")
    assert size.tokens / size.lines <= MAX_TOKENS_PER_LINE
