# SPDX-License-Identifier: Apache-2.0
"""Run checks through tox; the last lines say what ran where, and how it ended.

`make test` runs the everyday checks, `make test-long` the long ones (`--long`), `make
test-all` the long ones and the matrix of versions and packages (`--long --matrix`).
Names behind the switches choose some environments: `--matrix py39 py313`.

Environment variables: `IPUFIT_PYTHON38` is the interpreter of the floor (empty: it is
skipped). `IPUFIT_PYTHON39` and so on are those of the matrix; where one isn't set,
`.ci/find-python` looks for it. With `IPUFIT_REQUIRE_FLOOR` set, a skipped floor is a
failure. What can't run here is skipped, and the last lines say why.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOX = [sys.executable, "-m", "tox", "run", "--root", str(ROOT)]
NO_FLOOR_HERE = (
    "skipped: no Python 3.8 by $IPUFIT_PYTHON38, on PATH or in pyenv; "
    "types were checked on the running interpreter instead"
)


class Check(NamedTuple):
    """Some commands of an environment of tox.ini, by their places in it.

    Attributes:
        environment: Name of the environment.
        places: Places of the commands among its commands; none for all of them.
    """

    environment: str
    places: tuple[int, ...] = ()


EVERYDAY = {
    "lint": Check("lint", (0, 1)),
    "tests": Check("tests", (0,)),
    "doctests": Check("tests", (1,)),
    "modes": Check("modes", (0,)),
    "keras": Check("keras", (0, 1)),
}
FLOOR = {"types": Check("floor", (0,)), "floor": Check("floor", (1,))}
NO_FLOOR = {"types": Check("types", (0,))}
LONG = {
    "thorough": Check("thorough", (0,)),
    "all modes": Check("all-modes", (0,)),
    "all of floor": Check("all-floor", (0,)),
    "docs": Check("docs"),
}
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
EXTRAS = (
    "lightning",
    "metrics",
    "mlflow",
    "plot",
    "tensorboard",
    "torchdata",
    "transformers",
    "wandb",
)
MATRIX = {
    "release": Check("release"),
    "examples": Check("examples"),
    **{f"extra {name}": Check(f"extra-{name}") for name in EXTRAS},
    "no extras": Check("no-extras"),
    "newest": Check("newest"),
    **{f"Python {one}": Check(f"py{one.replace('.', '')}") for one in VERSIONS},
    "ipu": Check("ipu"),
}
# Environments that may hold a torch for other processors, of several gigabytes each.
LARGE = ("newest", *(check.environment for check in MATRIX.values()))


# What is there ------------------------------------------------------------------------


def found(script: str, *arguments: str) -> str:
    """What a script in `.ci` finds; empty if nothing."""
    command = [str(ROOT / ".ci" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def defined() -> set[str]:
    """Names of the environments in tox.ini."""
    command = [sys.executable, "-m", "tox", "list", "--root", str(ROOT), "--no-desc"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def obstacle(environment: str, interpreters: dict[str, str]) -> str:
    """Why an environment can't run on this machine; empty if it can.

    Args:
        environment: Its name in tox.ini.
        interpreters: Paths of interpreters by their environments; empty if missing.
    """
    if environment == "keras" and sys.version_info < (3, 11):
        return "Keras 3 needs Python 3.11"
    if environment in ("floor", "all-floor") and not os.environ.get("IPUFIT_PYTHON38"):
        return "no Python 3.8 by $IPUFIT_PYTHON38, on PATH or in pyenv"
    if not interpreters.get(environment, "unasked"):
        name = f"{environment[2]}.{environment[3:]}"
        variable = f"$IPUFIT_PYTHON{environment[2:]}"
        return f"no Python {name} by {variable}, on PATH or in pyenv"
    if environment == "ipu" and not os.environ.get("IPUFIT_POPTORCH_PATH"):
        return "no PopTorch by $IPUFIT_POPTORCH_PATH or for a Python on PATH"
    return ""


# Running ------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """How an environment ended.

    Attributes:
        codes: Exit codes of its commands.
        seconds: Time that it took, with its installation.
        python: Version of its Python; empty if it wasn't made.
        torch: Version of its torch; empty if it has none.
        counts: Tests that passed, failed or were skipped, over all its commands.
    """

    codes: list[int]
    seconds: float
    python: str = ""
    torch: str = ""
    counts: dict[str, int] = {}  # noqa: RUF012 - a tuple's default, never changed

    def of(self, check: Check) -> str:
        """How a check of this environment ended."""
        if not self.codes or len(self.codes) <= max(check.places, default=0):
            return "failed: not run, see above"
        places = check.places or range(len(self.codes))
        return "failed" if any(self.codes[place] for place in places) else "passed"


def counts_of(output: str) -> dict[str, int]:
    """Add up the last lines of the runs of pytest in an output."""
    counts: dict[str, int] = {}
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)  # without colours
    for line in re.findall(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", plain, re.M):
        for count, kind in re.findall(r"(\d+) (\w+)", line):
            kind = {"errors": "error"}.get(kind, kind)
            counts[kind] = counts.get(kind, 0) + int(count)
    return counts


def outcome_of(report: dict[str, object], seconds: float) -> Outcome:
    """Read how an environment ended from its part of tox's report."""
    commands = report.get("test", [])
    output = "\n".join(command["output"] for command in commands)
    version = report.get("python", {}).get("version_info", [])
    packages = dict(
        line.split("==", 1)
        for line in report.get("installed_packages", [])
        if "==" in line
    )
    return Outcome(
        [command["retcode"] for command in commands],
        seconds,
        ".".join(str(part) for part in version[:3]),
        packages.get("torch", ""),
        counts_of(output),
    )


def run(environment: str, options: list[str]) -> Outcome:
    """Run an environment with all its commands."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*TOX, *options, "-e", environment, "--result-json", str(report)]
        subprocess.run(command, check=False)
        made = {}
        if report.exists():
            made = json.loads(report.read_text(encoding="utf-8"))["testenvs"]
    return outcome_of(made.get(environment, {}), time.monotonic() - started)


def run_all(
    environments: list[str], options: list[str], *, fetches_floor: bool, is_kept: bool
) -> dict[str, Outcome]:
    """Run environments one after the other, since each keeps all cores busy.

    Args:
        environments: Names of environments in tox.ini.
        options: Of tox.
        fetches_floor: Whether the floor's large wheels are fetched meanwhile.
        is_kept: Whether environments of the matrix stay on disk after their run.
    """
    fetching = None
    if fetches_floor:
        fetch = [*TOX, "-e", "floor", "--notest", "--skip-pkg-install"]
        quiet = subprocess.DEVNULL  # if it fails, the floor's run tries again
        fetching = subprocess.Popen(fetch, stdin=quiet, stdout=quiet, stderr=quiet)
    outcomes = {}
    for environment in environments:
        if environment == "floor" and fetching is not None:
            fetching.wait()
        outcomes[environment] = run(environment, options)
        if environment in LARGE and not is_kept:
            shutil.rmtree(ROOT / ".tox" / environment, ignore_errors=True)
    return outcomes


# Reporting ----------------------------------------------------------------------------


def table(outcomes: dict[str, Outcome]) -> str:
    """What ran where, an environment a line: minutes, versions, numbers of tests."""
    lines = [
        f"{'environment':<20} {'Python':<8} {'torch':<14} {'min:s':>6} "
        f"{'passed':>7} {'failed':>7} {'skipped':>7}"
    ]
    for environment, one in outcomes.items():
        minutes, seconds = divmod(round(one.seconds), 60)
        bad = one.counts.get("failed", 0) + one.counts.get("error", 0)
        numbers = (one.counts.get("passed", 0), bad, one.counts.get("skipped", 0))
        lines.append(
            f"{environment:<20} {one.python:<8} {one.torch or '-':<14} "
            f"{f'{minutes}:{seconds:02}':>6} "
            + " ".join(f"{number if one.counts else '-':>7}" for number in numbers)
        )
    return "\n".join(lines)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="the long checks")
    parser.add_argument("--matrix", action="store_true", help="versions and packages")
    parser.add_argument("--keep", action="store_true", help="keep large environments")
    parser.add_argument("names", nargs="*", help="environments; all by default")
    return parser.parse_args(arguments)


def chosen_checks(options: argparse.Namespace) -> dict[str, Check]:
    """The checks that the command line asks for, those that can't run included."""
    has_floor = not obstacle("floor", {})
    everyday = {**EVERYDAY, **(FLOOR if has_floor else NO_FLOOR)}
    checks = {**(LONG if options.long else {}), **(MATRIX if options.matrix else {})}
    checks = checks or everyday
    if options.names:
        known = {check.environment for check in checks.values()}
        unknown = sorted(set(options.names) - known)
        if unknown:
            sys.exit(f"no such environments: {unknown}; there are {sorted(known)}")
        checks = {k: v for k, v in checks.items() if v.environment in options.names}
    return checks


def main(arguments: list[str]) -> int:
    """Run the checks that are asked for, and report on them."""
    options = parse(arguments)
    is_everyday = not (options.long or options.matrix)
    interpreters = {}
    if options.matrix:
        interpreters = {
            f"py{one.replace('.', '')}": found("find-python", one) for one in VERSIONS
        }
        os.environ["IPUFIT_POPTORCH_PATH"] = found("find-poptorch")
    checks = chosen_checks(options)
    environments = dict.fromkeys(check.environment for check in checks.values())
    known = defined()
    obstacles = {
        name: obstacle(name, interpreters) if name in known else "not in tox.ini"
        for name in environments
    }
    discovered = [path for path in interpreters.values() if path]
    outcomes = run_all(
        [name for name in environments if not obstacles[name]],
        ["--discover", *discovered] if discovered else [],
        fetches_floor=is_everyday and "floor" in environments,
        is_kept=options.keep,
    )

    results = {
        name: f"skipped: {obstacles[check.environment]}"
        if obstacles[check.environment]
        else outcomes[check.environment].of(check)
        for name, check in checks.items()
    }
    if is_everyday and not options.names and obstacle("floor", {}):
        results["floor"] = NO_FLOOR_HERE
        if os.environ.get("IPUFIT_REQUIRE_FLOOR"):
            results["floor"] = f"failed: must not be {NO_FLOOR_HERE}"

    print(f"\nWhat ran where, started by Python {platform.python_version()}:")
    print(table(outcomes))
    print("\nThe checks:")
    for check, result in results.items():
        print(f"  {check:<18} {result}")
    return int(any(result.startswith("failed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
