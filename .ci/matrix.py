# SPDX-License-Identifier: Apache-2.0
"""Run checks through tox; the last lines say how each ended, and after how long.

`make test` runs the everyday checks, `make test-all` the long ones (`--long`). Two
environment variables are read: `IPUFIT_PYTHON38` is the interpreter of the floor
(empty: the floor is skipped); with `IPUFIT_REQUIRE_FLOOR` set, a skipped floor is a
failure. Keras is skipped where the running Python is too old.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOX = [sys.executable, "-m", "tox", "run", "--root", str(ROOT)]
# Python 3.8 has no torch that compiles: what needs one runs on newer ones.
IS_OLD = sys.version_info < (3, 9)


class Check(NamedTuple):
    """Some commands of an environment of tox.ini, by their places in it."""

    environment: str
    places: tuple[int, ...]


EVERYDAY = {
    "lint": Check("lint", (0, 1)),
    "tests": Check("tests", (0,)),
    "doctests": Check("tests", (1,)),
    "modes": Check("modes", (0,) if IS_OLD else (0, 1)),
}
KERAS = {"keras": Check("keras", (0, 1))}
# Dropped from `LONG` where there is no Python 3.8.
ALL_FLOOR = {"all of floor": Check("all-floor", (0,))}
FLOOR = {"types": Check("floor", (0,)), "floor": Check("floor", (1,))}
NO_FLOOR = {"types": Check("types", (0,))}
LONG = {
    "thorough": Check("thorough", (0,)),
    "looped": Check("all-looped", (0,)),
    "folded": Check("all-folded", (0,)),
    **({} if IS_OLD else {"compiled": Check("all-compiled", (0, 1))}),
}


class Outcome(NamedTuple):
    """How an environment ended: exit codes of its commands, and seconds it took."""

    codes: list[int]
    seconds: float

    def of(self, check: Check) -> str:
        """How a check of this environment ended."""
        if len(self.codes) <= max(check.places):
            return "failed: not run, see above"
        is_bad = any(self.codes[place] for place in check.places)
        return "failed" if is_bad else "passed"


def run(environment: str) -> Outcome:
    """Run an environment with all its commands."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run([*TOX, "-e", environment, "--result-json", report], check=False)
        made = {}
        if report.exists():
            made = json.loads(report.read_text(encoding="utf-8"))["testenvs"]
    commands = made.get(environment, {}).get("test", [])
    codes = [command["retcode"] for command in commands]
    return Outcome(codes, time.monotonic() - started)


def run_all(environments: list[str], *, fetches_floor: bool) -> dict[str, Outcome]:
    """Run environments one after the other, since each keeps all cores busy.

    Args:
        environments: Names of environments in tox.ini.
        fetches_floor: Whether the floor's large wheels are fetched meanwhile.
    """
    if not fetches_floor:
        return {environment: run(environment) for environment in environments}
    fetch = [*TOX, "-e", "floor", "--notest", "--skip-pkg-install"]
    quiet = subprocess.DEVNULL  # if it fails, the floor's run tries again and says why
    *first, floor = environments
    with subprocess.Popen(fetch, stdin=quiet, stdout=quiet, stderr=quiet):
        outcomes = {environment: run(environment) for environment in first}
    return {**outcomes, floor: run(floor)}


def main(arguments: list[str]) -> int:
    """Run the checks that are asked for, and report on them."""
    is_long = "--long" in arguments
    has_floor = bool(os.environ.get("IPUFIT_PYTHON38"))
    has_keras = sys.version_info >= (3, 11)
    checks = {**LONG, **(ALL_FLOOR if has_floor else {})}
    if not is_long:
        last = FLOOR if has_floor else NO_FLOOR
        checks = {**EVERYDAY, **(KERAS if has_keras else {}), **last}
    environments = list(dict.fromkeys(check.environment for check in checks.values()))
    outcomes = run_all(environments, fetches_floor=has_floor and not is_long)

    results = {
        name: outcomes[check.environment].of(check) for name, check in checks.items()
    }
    if not is_long and not has_keras:
        results["keras"] = "skipped: Keras 3 needs Python 3.11"
    if not is_long and not has_floor:
        results["floor"] = (
            "skipped: no Python 3.8 by $IPUFIT_PYTHON38, on PATH or in pyenv; "
            "types were checked on the running interpreter instead"
        )
        if os.environ.get("IPUFIT_REQUIRE_FLOOR"):
            results["floor"] = f"failed: must not be {results['floor']}"

    print(f"\nOn Python {platform.python_version()}, in minutes and seconds:")
    for environment, outcome in outcomes.items():
        minutes, seconds = divmod(round(outcome.seconds), 60)
        print(f"  {environment:<12} {minutes:>2}:{seconds:02}")
    print("The checks:")
    for check, result in results.items():
        print(f"  {check:<12} {result}")
    return int(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
