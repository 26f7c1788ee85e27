# SPDX-License-Identifier: Apache-2.0
"""Run the code of pages, and put what it prints and draws into them.

    python .ci/screens.py

A block of text after the line `<!-- prints -->` is what the Python block above it
prints on a terminal of 80 columns. A picture that the page shows is written anew if its
code saves a file of that name. It needs matplotlib.
`tests/test_screens_of_pages.py` fails where a page shows something else.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Iterator, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MARK = "<!-- prints -->\n"
PIECE = re.compile(
    rf"^```python\n(?P<code>.*?)^```$|^{MARK}```text\n(?P<text>.*?)^```$", re.M | re.S
)
PICTURE = re.compile(r"^!\[[^]]*\]\(([\w-]+\.svg)\)$", re.M)
COLUMNS = 80


class Shown(NamedTuple):
    """What a page shows when its code has been run.

    Attributes:
        text: The page with what its code prints.
        pictures: Name -> content of each picture that its code draws.
    """

    text: str
    pictures: dict[str, str]


def has_screens(page: Path) -> bool:
    """Whether a page shows what its code prints."""
    return MARK in page.read_text(encoding="utf-8")


def shown(page: Path) -> Shown:
    """Run all code of a page, in a folder of its own that is removed afterwards."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    new, end = "", 0
    with in_empty_folder() as folder, contextlib.redirect_stdout(printed):
        for piece in PIECE.finditer(text):
            new += text[end : piece.start()]
            end = piece.end()
            if piece["code"] is not None:
                printed.seek(0)
                printed.truncate()
                exec(compile(piece["code"], str(page), "exec"), names)
                new += piece[0]
            else:
                new += f"{MARK}```text\n{printed.getvalue()}```"
        drawn = {
            name: (folder / name).read_text(encoding="utf-8")
            for name in PICTURE.findall(text)
            if (folder / name).exists()
        }
    return Shown(new + text[end:], drawn)


@contextlib.contextmanager
def in_empty_folder() -> Iterator[Path]:
    """Work in a new folder, on a terminal of `COLUMNS` columns without colours."""
    before, columns = Path.cwd(), os.environ.get("COLUMNS")
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns


def main() -> None:
    """Write all pages with screens, and their pictures."""
    for page in filter(has_screens, PAGES):
        found = shown(page)
        page.write_text(found.text, encoding="utf-8")
        for name, content in found.pictures.items():
            (page.parent / name).write_text(content, encoding="utf-8")
        print(page.relative_to(ROOT), *found.pictures)


if __name__ == "__main__":
    main()
