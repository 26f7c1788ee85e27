# SPDX-License-Identifier: Apache-2.0
"""Pages that are made of files outside docs: the gallery, and the changelog.

The gallery has a card for each example, and a page with its description and code. Both
are made of `examples/README.md`, where each script has a row of the table, and a
section with its description and picture.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
FOLDER = DOCS.parent / "examples"
PAGES = DOCS / "examples"
ROW = re.compile(r"^\| \[(\w+)\.py\]\(\w+\.py\) \| (.+?) \|.*$", re.M)
SECTION = re.compile(r"^### (\w+)\n\n(.+?)(?=^##|\Z)", re.M | re.S)
GROUP = re.compile(r"^## ([^\n]+)\n\n(###.+?)(?=^## |\Z)", re.M | re.S)
CARD = """\
:::{{grid-item-card}} {name}
:link: examples/{name}
:link-type: doc
:img-top: ../examples/pictures/{name}.png

{title}
:::
"""


def gallery(readme: str) -> str:
    """Make the page of cards from the README."""
    titles = dict(ROW.findall(readme))

    def grid(section: re.Match[str]) -> str:
        names = re.findall(r"^### (\w+)$", section[2], re.M)
        cards = "\n".join(CARD.format(name=n, title=titles[n]) for n in names)
        return f"## {section[1]}\n\n::::{{grid}} 1 2 3 3\n:gutter: 3\n\n{cards}::::\n"

    page = re.sub(r"(?:^\|.*\n)+\n", "", readme, flags=re.M)
    page = GROUP.sub(grid, page)
    pages = "\n".join(f"examples/{name}" for name in titles)
    tree = f"```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    return f"{with_links(page, FOLDER, DOCS)}\n{tree}"


def script_page(name: str, title: str, description: str) -> str:
    """Make the page of a script."""
    return (
        f"# {title.rstrip('.')}\n\n{with_links(description, FOLDER, PAGES)}\n"
        f"```{{literalinclude}} ../../examples/{name}.py\n:language: python\n```\n"
    )


def with_links(text: str, home: Path, folder: Path) -> str:
    """Change the links of a file in one folder to those of a page in another."""

    def changed(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        path = (home / target.partition("#")[0]).resolve()
        address = os.path.relpath(path, folder)
        if not mark and DOCS not in path.parents:  # no page of the site
            return f"{{download}}`{words} <{address}>`"
        return f"{mark}[{words}]({address})"

    return re.sub(r"(!?)\[([^]]*)\]\((?!https?:|#)([^)]*)\)", changed, text)


def write_pages(app: Sphinx) -> None:
    """Write the pages of the scripts, where they differ from what is there."""
    readme = (FOLDER / "README.md").read_text("utf-8")
    titles = dict(ROW.findall(readme))
    PAGES.mkdir(exist_ok=True)
    for path in PAGES.glob("*.md"):
        if path.stem not in titles:
            path.unlink()
    for name, description in SECTION.findall(readme):
        path, page = PAGES / f"{name}.md", script_page(name, titles[name], description)
        if not path.exists() or path.read_text("utf-8") != page:
            path.write_text(page, encoding="utf-8")


def replace_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the cards, or the changelog, in the place of a page that points to them."""
    if page == "examples":
        app.env.note_dependency(str(FOLDER / "README.md"))
        source[0] = gallery((FOLDER / "README.md").read_text("utf-8"))
    elif page == "changelog":
        app.env.note_dependency(str(DOCS.parent / "CHANGELOG.md"))
        text = (DOCS.parent / "CHANGELOG.md").read_text("utf-8")
        source[0] = with_links(text, DOCS.parent, DOCS)


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the pages before Sphinx looks for them."""
    app.connect("config-inited", lambda app, config: write_pages(app))
    app.connect("source-read", replace_page)
    return {"parallel_read_safe": True}
