# SPDX-License-Identifier: Apache-2.0
"""Count lines of code: without blank lines, comments and docstrings.

python examples/ports/count_lines.py examples/ports/*.py

Prints a line for each file, and the sum: the last line.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def lines_of_code(source: str) -> int:
    """Count the lines that have code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or 0) + 1))
    return len(lines)


def main(names: list[str]) -> None:
    """Print the lines of each file, and of all."""
    counts = [lines_of_code(Path(name).read_text(encoding="utf-8")) for name in names]
    for name, count in zip(names, counts):
        print(f"{count:6,} {name}")
    print(f"{sum(counts):6,} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
