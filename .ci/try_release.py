# SPDX-License-Identifier: Apache-2.0
"""Build sdist and wheel, and try them as users would, where nothing else is.

`make release` calls it after `tests/package/test_release.py`, which looks into both
files. Here the wheel goes into an empty environment, with what it depends on, and runs
the first example of the README; `make` runs in the unpacked sdist.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Newer Pythons ask for it, older ones don't know it.
CAREFULLY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def call(*command: object, folder: Path) -> None:
    """Run a command without what could lead to the checkout."""
    hidden = ("PYTHONPATH", "TOX_", "VIRTUAL_ENV")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(hidden)
    }
    print("$", *command, flush=True)
    words = [str(word) for word in command]
    subprocess.run(words, cwd=str(folder), env=environment, check=True)


def build(work: Path) -> tuple[Path, Path]:
    """Build the sdist of the checkout, and the wheel of the unpacked sdist."""
    hatch = [sys.executable, "-m", "hatchling", "build"]
    call(*hatch, "-t", "sdist", "-d", work / "dist", folder=ROOT)
    (sdist,) = (work / "dist").glob("*.tar.gz")
    with tarfile.open(str(sdist)) as archive:
        archive.extractall(str(work), **CAREFULLY)
    source = work / sdist.name[: -len(".tar.gz")]
    call(*hatch, "-t", "wheel", "-d", work / "dist", folder=source)
    (wheel,) = (work / "dist").glob("*.whl")
    return source, wheel


def try_wheel(wheel: Path, pins: list[str], work: Path) -> None:
    """Install the wheel where nothing is, and run the first example of the README.

    Args:
        wheel: The wheel.
        pins: What to install before it, such as a certain torch.
        work: A folder to do it in.
    """
    empty, away = work / "empty", work / "away"
    away.mkdir()
    venv.create(str(empty), with_pip=True)
    python = empty / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet"]
    if pins:
        call(*install, *pins, folder=away)
    call(*install, wheel, folder=away)
    call(python, "-m", "pip", "check", folder=away)
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[0]
    (away / "first.py").write_text(code, encoding="utf-8")
    call(python, "first.py", folder=away)
    call(empty / "bin" / "ipufit", "--help", folder=away)


def main(arguments: list[str]) -> None:
    """Build, check and try."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--work", type=Path, required=True, help="a folder that is emptied first")
    add("--keep", type=Path, help="where sdist and wheel go in the end")
    add("--pin", action="append", default=[], help="installed before the wheel")
    add("--make", default="demo", help="targets of make to run in the sdist")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)

    # The date of the last commit, so that everyone who builds it gets the same bytes.
    dated = ["git", "log", "-1", "--format=%ct"]
    if "SOURCE_DATE_EPOCH" not in os.environ and (ROOT / ".git").exists():
        date = subprocess.run(dated, cwd=str(ROOT), capture_output=True, check=True)
        os.environ["SOURCE_DATE_EPOCH"] = date.stdout.decode().strip()

    source, wheel = build(work)
    try_wheel(wheel, options.pin, work)
    python = f"PYTHON={getattr(sys, '_base_executable', None) or sys.executable}"
    for target in options.make.split():
        call("make", target, python, folder=source)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for path in (work / "dist").iterdir():
            shutil.copy2(str(path), str(options.keep))
            print(f"{options.keep / path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
