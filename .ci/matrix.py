# SPDX-License-Identifier: Apache-2.0
"""Run the everyday matrix through tox; the last lines say how each check ended.

`make test` calls it. It reads two environment variables: `IPUFIT_PYTHON38` is the
interpreter of the floor (empty: the floor is skipped); with `IPUFIT_REQUIRE_FLOOR` set,
a skipped floor is a failure. Keras is skipped where the running Python is too old.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOX = [sys.executable, "-m", "tox", "run", "--root", str(ROOT)]

# Check -> the environment of tox.ini that makes it, and the places of its commands.
WITH_FLOOR = {
    "lint": ("lint", (0, 1)),
    "tests": ("tests", (0,)),
    "doctests": ("tests", (1,)),
    "examples": ("tests", (2,)),
    # Python 3.8 has no torch that compiles: it makes nothing of the last two commands.
    "modes": ("modes", (0, 1) if sys.version_info < (3, 9) else (0, 1, 2, 3)),
    "types": ("floor", (0,)),
    "floor": ("floor", (1,)),
}
WITHOUT_FLOOR = {**WITH_FLOOR, "types": ("types", (0,))}
del WITHOUT_FLOOR["floor"]
KERAS = {"keras": ("keras", (0, 1))} if sys.version_info >= (3, 11) else {}


def run_tox(*environments: str) -> dict[str, list[int]]:
    """Run environments one after the other; return the exit codes of their commands."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        names = ",".join(environments)
        subprocess.run([*TOX, "-e", names, "--result-json", report], check=False)
        if not report.exists():
            return {}
        made = json.loads(report.read_text(encoding="utf-8"))["testenvs"]
    return {
        name: [command["retcode"] for command in made.get(name, {}).get("test", [])]
        for name in environments
    }


def run_with_floor() -> dict[str, list[int]]:
    """Run everything; the floor's large wheels are fetched behind the other checks."""
    fetch = [*TOX, "-e", "floor", "--notest", "--skip-pkg-install"]
    quiet = subprocess.DEVNULL  # if it fails, the run below tries again and says why
    with subprocess.Popen(fetch, stdin=quiet, stdout=quiet, stderr=quiet):
        codes = run_tox("lint", "tests", "modes", *KERAS)
    return {**codes, **run_tox("floor")}


def verdict(codes: list[int], places: tuple[int, ...]) -> str:
    """How a check ended, by the exit codes of its environment's commands."""
    if len(codes) <= max(places):
        return "failed: not run, see above"
    return "failed" if any(codes[place] for place in places) else "passed"


def main() -> int:
    """Run the matrix and report on it."""
    python38 = os.environ.get("IPUFIT_PYTHON38", "")
    checks = {**(WITH_FLOOR if python38 else WITHOUT_FLOOR), **KERAS}
    if python38:
        codes = run_with_floor()
    else:
        codes = run_tox("lint", "tests", "modes", *KERAS, "types")
    results = {
        check: verdict(codes.get(environment, []), places)
        for check, (environment, places) in checks.items()
    }
    if not KERAS:
        results["keras"] = "skipped: Keras 3 needs Python 3.11"
    if not python38:
        results["floor"] = (
            "skipped: no Python 3.8 by $IPUFIT_PYTHON38, on PATH or in pyenv; "
            "types were checked on the running interpreter instead"
        )
        if os.environ.get("IPUFIT_REQUIRE_FLOOR"):
            results["floor"] = f"failed: must not be {results['floor']}"

    print(f"\nThe matrix on Python {platform.python_version()}:", flush=True)
    for check, result in results.items():
        print(f"  {check:<9} {result}")
    return int(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
