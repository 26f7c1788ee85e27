# SPDX-License-Identifier: Apache-2.0
"""What `.ci/matrix.py` runs exists, and what it says of a run is so."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CI = ROOT / ".ci"
pytestmark = pytest.mark.not_in_mode(reason="it runs no program")
MATRIX = runpy.run_path(str(CI / "matrix.py"))
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


def environments():
    """The environments of tox.ini by their names, braces spelled out."""
    parser = configparser.RawConfigParser()
    parser.read(ROOT / "tox.ini", encoding="utf-8")
    found = {}
    for section in parser.sections():
        prefix, _, name = section.partition(":")
        if prefix != "testenv" or not name:
            continue
        stem, brace, factors = name.partition("{")
        for factor in factors.rstrip("}").split(","):
            found[f"{stem}{factor}" if brace else name] = parser[section]
    return found


def test_every_environment_that_is_run_is_in_tox_ini():
    groups = ("EVERYDAY", "FLOOR", "NO_FLOOR", "LONG", "MATRIX")
    checks = chain.from_iterable(MATRIX[group].values() for group in groups)
    assert {check.environment for check in checks} <= set(environments())


def test_every_environment_of_tox_ini_is_run():
    groups = ("EVERYDAY", "FLOOR", "NO_FLOOR", "LONG", "MATRIX")
    checks = chain.from_iterable(MATRIX[group].values() for group in groups)
    run = {check.environment for check in checks}
    assert set(environments()) - run == {"demo"}


def test_the_tests_that_tox_ini_names_exist():
    named = re.findall(r"(?<=[ =])tests/\S+", (ROOT / "tox.ini").read_text("utf-8"))
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_places_of_checks_are_those_of_commands():
    for group in ("EVERYDAY", "FLOOR", "NO_FLOOR"):
        for check in MATRIX[group].values():
            lines = environments()[check.environment]["commands"].splitlines()
            commands = [line for line in lines if line and not line.startswith("#")]
            assert max(check.places) < len(commands)


def test_the_matrix_has_every_python_that_is_declared():
    declared = re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    assert ["3.8", *MATRIX["VERSIONS"]] == declared


def test_the_matrix_has_every_extra_but_those_of_developers():
    (section,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.M | re.S
    )
    extras = set(re.findall(r"^(\w+) = \[", section, re.M))
    assert extras - {"dev", "docs", "examples"} == set(MATRIX["EXTRAS"])


# Reports ------------------------------------------------------------------------------


def test_counts_of_several_runs_are_added_up():
    output = (
        "....s [100%]\n4 passed, 1 skipped in 61.02s (0:01:01)\n"
        "\x1b[31m2 failed\x1b[0m, \x1b[32m20 passed\x1b[0m, 1 error in 0.5s\n"
        "he passed 3 of them in 1.0s\n"
    )
    counts = {"passed": 24, "skipped": 1, "failed": 2, "error": 1}
    assert MATRIX["counts_of"](output) == counts


def test_a_report_of_tox_is_read():
    report = {
        "python": {"version_info": [3, 13, 0, "final", 0]},
        "installed_packages": ["torch==2.15.0", "ipufit @ file:///x", "rich==15.0.0"],
        "test": [
            {"retcode": 0, "output": "3 passed in 1.00s"},
            {"retcode": 1, "output": "1 failed in 1.00s"},
        ],
    }
    outcome = MATRIX["outcome_of"](report, 61.0)
    assert outcome == ([0, 1], 61.0, "3.13.0", "2.15.0", {"passed": 3, "failed": 1})
    check = MATRIX["Check"]
    assert outcome.of(check("py313", (0,))) == "passed"
    assert outcome.of(check("py313", (1,))) == "failed"
    assert outcome.of(check("py313")) == "failed"
    assert outcome.of(check("py313", (2,))).startswith("failed: not run")
    assert MATRIX["outcome_of"]({}, 1.0).of(check("py313")).startswith("failed")
    heading, row = MATRIX["table"]({"py313": outcome}).splitlines()
    assert row.split() == ["py313", "3.13.0", "2.15.0", "1:01", "3", "1", "0"]
    assert len(heading) == len(row)


def test_what_cannot_run_says_why(monkeypatch):
    obstacle = MATRIX["obstacle"]
    for name in ("IPUFIT_PYTHON38", "IPUFIT_POPTORCH_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "no Python 3.13 by $IPUFIT_PYTHON313" in obstacle("py313", {"py313": ""})
    assert obstacle("py313", {"py313": "/usr/bin/python3.13"}) == ""
    assert "no PopTorch" in obstacle("ipu", {})
    assert "no Python 3.8" in obstacle("all-floor", {})
    monkeypatch.setenv("IPUFIT_PYTHON38", "/usr/bin/python3.8")
    assert obstacle("all-floor", {}) == ""
    assert obstacle("tests", {}) == ""


# Finding ------------------------------------------------------------------------------


def find(script, *arguments, **environment):
    done = subprocess.run(
        [str(CI / script), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


def test_an_interpreter_is_found_by_its_version():
    version = "{}.{}".format(*sys.version_info)
    variable = f"IPUFIT_PYTHON{version.replace('.', '')}"
    path = find("find-python", version, **{variable: sys.executable})
    assert Path(path) == Path(sys.executable)
    assert find("find-python", "3.1", IPUFIT_PYTHON31=sys.executable) == ""
    assert find("find-python", "2.99") == ""


@pytest.mark.parametrize("is_there", [True, False])
def test_poptorch_is_found_where_it_is_said_to_be(tmp_path, is_there):
    if is_there:
        (tmp_path / "poptorch").mkdir()
        (tmp_path / "poptorch" / "__init__.py").touch()
    found = find("find-poptorch", IPUFIT_POPTORCH_PATH=str(tmp_path))
    assert found == (str(tmp_path) if is_there else "")
