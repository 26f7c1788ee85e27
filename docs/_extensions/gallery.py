# SPDX-License-Identifier: Apache-2.0
"""The page of the examples: their README, and then the code of each script.

The README has links to files beside it. Those to scripts lead to the code on the page,
and the others to the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PAGE = "examples"
DOCS = Path(__file__).resolve().parents[1]
FOLDER = DOCS.parent / "examples"


def page() -> str:
    """The page, as Markdown."""
    text = (FOLDER / "README.md").read_text("utf-8")
    text = re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)", moved, text)
    parts = [text, "## The scripts"]
    for path in sorted(FOLDER.glob("*.py")):
        code = f"```{{literalinclude}} ../examples/{path.name}\n:language: python\n```"
        parts.append(f"(script-{path.stem})=\n### {path.name}\n\n{code}")
    return "\n\n".join(parts) + "\n"


def moved(link: re.Match[str]) -> str:
    """A link of the README, as it is on the page."""
    words, target = link.groups()
    path = (FOLDER / target.partition("#")[0]).resolve()
    if path.parent == FOLDER and path.suffix == ".py":
        return f"[{words}](#script-{path.stem})"
    address = os.path.relpath(path, DOCS)
    if path.suffix == ".md" and DOCS not in path.parents:  # no page of the site
        return f"{{download}}`{words} <{address}>`"
    return f"[{words}]({address})"


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the README in the page's place."""
    if docname == PAGE:
        app.env.note_dependency(str(FOLDER / "README.md"))
        source[0] = page()


def setup(app: Sphinx) -> dict[str, Any]:
    """Replace the page when it is read."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
