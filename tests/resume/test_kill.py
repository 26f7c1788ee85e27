# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.kill` and `kill_processes`: nothing is lost or hangs after kills."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]


def numbers_of(pattern, program, times, *options):
    """The numbers in what a program of `benchmarks` prints."""
    environment = {**os.environ, "IPUFIT_BACKEND": "emulator", "OMP_NUM_THREADS": "1"}
    arguments = ("-m", f"benchmarks.{program}", "--times", times, *options)
    done = run_python(*arguments, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    said = re.search(pattern, done.stdout, re.MULTILINE)
    assert said is not None, done.stdout
    return map(int, said.groups())


@pytest.mark.parametrize("times", ["6", pytest.param("10", marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(times):
    during, others, starts, resumed, updates, runs = numbers_of(
        rf"^{times} kills in \d+ s: (\d+) during a write, (\d+) not .*\n"
        r"(\d+) starts, (\d+) of them with a checkpoint; they went on at (\d+) .*\n"
        r"(\d+) runs ended, each equal to the uninterrupted one byte by byte; no start "
        r"was without a usable checkpoint$",
        *("kill", times),
    )
    assert during + others == int(times)
    assert starts == int(times) + runs
    assert resumed > 1  # and not only runs that began anew
    assert updates > 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--fresh"]])
def test_processes_that_are_killed_end_and_go_on(how):
    times = "2" if how else "5"
    starts, _, runs = numbers_of(
        rf"^{times} processes killed in \d+ s: .*\n"
        r"the others ended .*; none hung\n"
        r"(\d+) starts of 4 processes, (\d+) of them with a checkpoint; .*\n"
        r"(\d+) runs ended, each equal to the uninterrupted one byte by byte; no "
        r"checkpoint was broken$",
        *("kill_processes", times, *how),
    )
    assert starts > runs > 0
