# SPDX-License-Identifier: Apache-2.0
"""Run the code of pages, and put what it prints and draws into them.

    python tools/screens.py

A comment says what the block below it is:

- `<!-- prints -->`: what the Python block above prints on a terminal of 80 columns.
- `<!-- prints, with other times -->`: the same, and each run takes other times.
- `<!-- prints: ipufit check train.py -->`: what this command prints.
- `<!-- file: train.py -->`: a file that is written, and not run.

A picture that the page shows is written anew if its code saves a file of that name. It
needs matplotlib. `tests/docs/test_screens_of_pages.py` fails where a page shows
something else.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Iterator, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PIECE = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```python\n(?P<code>.*?)^```$"
    r"|^(?P<mark><!-- prints(?P<times>, with other times)?(?:: (?P<command>.+))? -->\n)"
    r"```text\n(?P<text>.*?)^```$",
    re.M | re.S,
)
TIME = re.compile(r" *\d+(?:\.\d+)?(?: ?(?:s|ms|us)\b|%)")
SLOW = re.compile(r"^(?:Compil(?:ing the|ed in)|Predicted) .*\n", re.M)
"""Lines of what takes a second and more."""
PICTURE = re.compile(r"^!\[[^]]*\]\((?:docs/)?([\w-]+\.svg)\)$", re.M)
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
    """Whether a page shows what its code or a command prints."""
    text = page.read_text(encoding="utf-8")
    return any(piece["mark"] for piece in PIECE.finditer(text))


def picture_of(page: Path, name: str) -> Path:
    """The file of a picture: beside its page, or in docs for README.md."""
    return (ROOT / "docs" if page.parent == ROOT else page.parent) / name


def without_times(text: str) -> str:
    """A page without the times and shares that differ from run to run.

    Args:
        text: The page.
    """

    def without(piece: re.Match[str]) -> str:
        return TIME.sub(" #", SLOW.sub("", piece[0])) if piece["times"] else piece[0]

    return PIECE.sub(without, text)


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
            if piece["file"] is not None:
                (folder / piece["file"]).write_text(piece["code"], encoding="utf-8")
                new += piece[0]
            elif piece["code"] is not None:
                printed.seek(0)
                printed.truncate()
                exec(compile(piece["code"], str(page), "exec"), names)
                new += piece[0]
            else:
                command = piece["command"]
                screen = printed.getvalue() if command is None else output_of(command)
                lines = [line.rstrip() for line in screen.splitlines()]
                new += "\n".join([f"{piece['mark']}```text", *lines, "```"])
        drawn = {
            name: (folder / name).read_text(encoding="utf-8")
            for name in PICTURE.findall(text)
            if (folder / name).exists()
        }
    return Shown(new + text[end:], drawn)


def output_of(command: str) -> str:
    """What a command of ipufit prints in this folder, also where it finds faults.

    Args:
        command: The command line, such as `ipufit check train.py`.

    Raises:
        RuntimeError: It has failed, and printed nothing or ended with another exit
            status than 0 and 1.
    """
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    return done.stdout


@contextlib.contextmanager
def in_empty_folder() -> Iterator[Path]:
    """Work in a new folder, on a terminal of `COLUMNS` columns without colours.

    Modules can be imported from it, and are forgotten with it. Figures of pyplot become
    the same files each time, in which text stays text.
    """
    before, settings = Path.cwd(), dict(os.environ)
    folder = Path(tempfile.mkdtemp()).resolve()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ.update(COLUMNS=str(COLUMNS), SOURCE_DATE_EPOCH="0")
    try:
        if find_spec("matplotlib") is None:
            yield folder
        else:
            from matplotlib import rc_context

            style = {"svg.fonttype": "none", "svg.hashsalt": "ipufit", "backend": "agg"}
            with rc_context(style):
                yield folder
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for file in folder.glob("*.py"):
            sys.modules.pop(file.stem, None)
        shutil.rmtree(folder)
        os.environ.clear()
        os.environ.update(settings)


def main() -> None:
    """Write all pages with screens that have changed, and their pictures."""
    for page in filter(has_screens, PAGES):
        found, before = shown(page), page.read_text(encoding="utf-8")
        if without_times(found.text) != without_times(before):
            page.write_text(found.text, encoding="utf-8")
        for name, content in found.pictures.items():
            lines = [f"{line.rstrip()}\n" for line in content.splitlines()]
            picture_of(page, name).write_text("".join(lines), encoding="utf-8")
        print(page.relative_to(ROOT), *found.pictures)


if __name__ == "__main__":
    main()
