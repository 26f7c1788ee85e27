# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.kill_processes`: nothing is lost or hangs when processes are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.thorough
@pytest.mark.parametrize("how", [[], ["--fresh"]])
def test_processes_that_are_killed_end_and_go_on(how):
    times = 3 if how else 10
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.kill_processes",
            "--times",
            str(times),
            *how,
        ],
        cwd=ROOT,
        env={**os.environ, "IPUFIT_BACKEND": "emulator", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.search(
        rf"^{times} processes killed in \d+ s: .*\n"
        r"the others ended .*; none hung\n"
        r"(\d+) starts of 4 processes, (\d+) of them with a checkpoint; .*\n"
        r"(\d+) runs ended, each equal to the uninterrupted one byte by byte; no "
        r"checkpoint was broken$",
        done.stdout,
        re.MULTILINE,
    )
    assert said is not None, done.stdout
    starts, _, runs = map(int, said.groups())
    assert starts > runs > 0
