# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page: pictures, tables beside them, nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Iterator, Sequence

from .contents import Content, Picture
from .tables import Table, table_of_bars, table_of_timeline
from .timeline import Timeline
from .vector import svg_element

_STYLE = """\
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #c4cbd2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --paper: #15181c; --line: #454c54; }
}
body { color: var(--ink); background: var(--paper); margin: 2rem auto; padding: 0 1rem;
  max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 0; }
.wide { overflow-x: auto; }
svg { height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 0.875rem; margin: 0.5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: 0.15rem 0.5rem;
  text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
summary { cursor: pointer; }
"""


def html_page(contents: Sequence[Content], title: str, lines: Sequence[str]) -> str:
    """The text of a page that needs no other file, no script and no network.

    Args:
        contents: Pictures and tables from top to bottom.
        title: Title of the page. A content of the same title has no heading.
        lines: Sentences under the title.

    Raises:
        ConfigError: matplotlib, which draws its pictures, isn't installed.
    """
    return "\n".join(_page(contents, escape(title), lines)) + "\n"


def _page(
    contents: Sequence[Content], title: str, lines: Sequence[str]
) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield '<head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>"
    yield f"<style>\n{_STYLE}</style></head>"
    yield f"<body><main><h1>{title}</h1>"
    for line in lines:
        yield f"<p>{escape(line)}</p>"
    for number, one in enumerate(contents, 1):
        yield "<section>"
        if escape(one.title) != title:
            yield f"<h2>{escape(one.title)}</h2>"
        if one.caption:
            yield f"<p>{escape(one.caption)}</p>"
        if isinstance(one, Table):
            yield from _table(one)
        else:
            yield f'<figure><div class="wide">{svg_element(one, f"p{number}")}</div>'
            yield "<figcaption><details open><summary>Numbers</summary>"
            yield from _table(_numbers(one))
            yield "</details></figcaption></figure>"
        yield "</section>"
    yield "</main></body></html>"


def _numbers(picture: Picture) -> Table:
    if isinstance(picture, Timeline):
        return table_of_timeline(picture)
    return table_of_bars(picture)


def _table(table: Table) -> Iterator[str]:
    """A table whose first column and first row are headings."""
    yield '<div class="wide"><table>'
    heads = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.header)
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for name, *texts in table.rows:
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        yield f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    yield "</tbody></table></div>"
