# SPDX-License-Identifier: Apache-2.0
"""Write the map of files in CONTRIBUTING.md, from the first lines of their docstrings.

python tools/packages.py          # `make packages`
python tools/packages.py --check  # `make lint`: fail where it would change the page
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ipufit"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- map: written by `make packages` -->\n"
END = "<!-- end of map -->\n"

# Headings in the order to read them, with the files and packages below each, likewise.
# Files that aren't named here belong to the ground.
SECTIONS = {
    "The model": "__init__ model config batching placement mixing",
    "Its data": "data",
    "Its program, and the run": "engine state",
    "Its losses, metrics and optimizers": "losses metrics optimizers",
    "Callbacks, and what is kept in files": "callbacks checkpoint resume",
    "Plans": "planning",
    "Processes, other libraries, the command line": "distributed integrations cli "
    "__main__ doctor",
}
GROUND = "The ground: no file above is imported here"
EMULATOR = "The emulator"


def subject(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def rows(name: str) -> Iterator[tuple[str, str]]:
    """Name and subject of a module, or of a package and all its modules."""
    if (PACKAGE / f"{name}.py").exists():
        yield f"{name}.py", subject(PACKAGE / f"{name}.py")
        return
    if (PACKAGE / name / "__init__.py").exists():
        yield f"{name}/", subject(PACKAGE / name / "__init__.py")
    for path in sorted((PACKAGE / name).glob("*.py")):
        if path.name != "__init__.py":
            yield f"{name}/{path.name}", subject(path)
    for folder in sorted({path.parent for path in (PACKAGE / name).glob("*/*.py")}):
        yield from rows(f"{name}/{folder.name}")


def sections() -> dict[str, list[tuple[str, str]]]:
    """The rows below each heading, in order."""
    named = " ".join(SECTIONS.values()).split()
    there = sorted(path.stem for path in PACKAGE.glob("*.py"))
    there += sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    ground = [name for name in there if name not in (*named, "emulator")]
    found = {
        heading: [row for name in names.split() if name in there for row in rows(name)]
        for heading, names in SECTIONS.items()
    }
    found[GROUND] = [row for name in ground for row in rows(name)]
    found[EMULATOR] = list(rows("emulator"))
    return found


def written() -> str:
    """The map as a page has it."""
    text = ""
    for heading, files in sections().items():
        text += f"\n**{heading}**\n\n| in `ipufit/` | holds |\n|---|---|\n"
        text += "".join(f"| `{file}` | {holds} |\n" for file, holds in files)
    return f"{text}\n"


def main() -> None:
    """Put the map into the page, or fail if the page has another one."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}{written()}{END}{after}"
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif new != page:
        sys.exit("the map of files in CONTRIBUTING.md is outdated: run `make packages`")


if __name__ == "__main__":
    main()
