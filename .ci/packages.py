# SPDX-License-Identifier: Apache-2.0
"""Write the table of packages in CONTRIBUTING.md: files, lines, and what each holds.

`make packages` calls it; `tests/test_contributing.py` fails where it wasn't called.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN = "<!-- packages: written by `make packages` -->\n"
END = "<!-- end of packages -->\n"


class Package(NamedTuple):
    """A folder of modules.

    Attributes:
        path: Relative to the repository.
        files: Number of modules in the folder itself.
        lines: Of these modules, comments and blanks included.
        subject: The first line of the package's docstring.
    """

    path: str
    files: int
    lines: int
    subject: str

    def row(self) -> str:
        """The package's line in the table."""
        rounded = max(100, round(self.lines, -2))
        return f"| `{self.path}` | {self.files} | {rounded:,} | {self.subject} |\n"


def packages() -> list[Package]:
    """Every package of ipufit that holds code, by its path."""
    found = []
    for init in sorted((ROOT / "ipufit").rglob("__init__.py")):
        folder = init.parent
        if "_shim" in folder.parts:  # one line each, for other processes to find
            continue
        texts = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
        docstring = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        found.append(
            Package(
                str(folder.relative_to(ROOT)),
                len(texts),
                sum(text.count("\n") for text in texts),
                docstring.partition("\n")[0],
            )
        )
    return found


def table() -> str:
    """The table with its heading."""
    heading = "| package | files | lines, about | subject |\n|---|---|---|---|\n"
    return heading + "".join(package.row() for package in packages())


def main() -> None:
    """Put the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
