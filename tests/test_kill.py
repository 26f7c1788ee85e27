# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.kill` and `kill_processes`: nothing is lost or hangs after kills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import kill
from ipufit import Checkpoint, CheckpointStore
from tests.strategies import is_thorough

ROOT = Path(__file__).parent.parent


def numbers_of(pattern, program, times, *options, timeout):
    """The numbers in what a program of `benchmarks` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", "--times", times, *options],
        cwd=ROOT,
        env={**os.environ, "IPUFIT_BACKEND": "emulator", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = re.search(pattern, done.stdout, re.MULTILINE)
    assert said is not None, done.stdout
    return map(int, said.groups())


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not():
    times = "10" if is_thorough() else "6"
    during, others, starts, resumed, updates, runs = numbers_of(
        rf"^{times} kills in \d+ s: (\d+) during a write, (\d+) not .*\n"
        r"(\d+) starts, (\d+) of them with a checkpoint; they went on at (\d+) .*\n"
        r"(\d+) runs ended, each equal to the uninterrupted one byte by byte; no start "
        r"was without a usable checkpoint$",
        *("kill", times),
        timeout=300,
    )
    assert during + others == int(times)
    assert starts == int(times) + runs
    assert resumed > 1  # and not only runs that began anew
    assert updates > 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", [[], ["--fresh"]])
def test_processes_that_are_killed_end_and_go_on(how):
    times = "3" if how else "10"
    starts, _, runs = numbers_of(
        rf"^{times} processes killed in \d+ s: .*\n"
        r"the others ended .*; none hung\n"
        r"(\d+) starts of 4 processes, (\d+) of them with a checkpoint; .*\n"
        r"(\d+) runs ended, each equal to the uninterrupted one byte by byte; no "
        r"checkpoint was broken$",
        *("kill_processes", times, *how),
        timeout=900,
    )
    assert starts > runs > 0


# A loss is noticed --------------------------------------------------------------------


def store(folder, *updates):
    kept = CheckpointStore(folder / "backup")
    for update in updates:
        state = {"run": {"updates": update}}
        kept.save(Checkpoint({}, state), epoch=0, update=update)
    return kept


def test_a_checkpoint_that_is_lost_is_noticed(tmp_path):
    kept = store(tmp_path, 3, 6)
    assert kill.check_usable(tmp_path, 3) == 6
    with pytest.raises(AssertionError, match="of 9, and is of 6"):
        kill.check_usable(tmp_path, 9)
    kept.clear()
    assert kill.check_usable(tmp_path, None) is None
    with pytest.raises(AssertionError, match="of 6, and is of None"):
        kill.check_usable(tmp_path, 6)


def test_a_damaged_checkpoint_is_noticed(tmp_path):
    newest = store(tmp_path, 3, 6).latest()
    file = newest / "state.json"
    file.write_bytes(file.read_bytes().replace(b"6", b"7"))
    with pytest.raises(UserWarning, match=r"state\.json.*instead"):
        kill.check_usable(tmp_path, 3)


def test_a_start_at_another_place_is_noticed(tmp_path):
    tally = kill.Tally(1)
    kill.check_begun(tmp_path, 6, tally)  # it didn't come so far
    (tmp_path / "began").write_text("6")
    kill.check_begun(tmp_path, 6, tally)
    assert tally.updates == {6}
    with pytest.raises(AssertionError, match="went on at 6, the checkpoint is 3"):
        kill.check_begun(tmp_path, 3, tally)


def test_another_result_is_noticed(tmp_path):
    (tmp_path / "learnt").mkdir()
    (tmp_path / "history.json").write_text("[]")
    store(tmp_path, 3)
    expected = kill.left_behind(tmp_path)
    assert len(expected) == 2
    kill.check_equal(tmp_path, expected)
    (tmp_path / "history.json").write_text("[1]")
    with pytest.raises(AssertionError, match=r"differs: history\.json\.$"):
        kill.check_equal(tmp_path, expected)
