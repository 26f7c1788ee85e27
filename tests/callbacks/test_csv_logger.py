# SPDX-License-Identifier: Apache-2.0
"""`CSVLogger`: what is in the file, whatever became of the process."""

import os
import signal
from pathlib import Path

import pytest

from ipufit import FileError
from ipufit.callbacks import CallbackList, CSVLogger
from tests.callbacks.driving import play
from tests.interpreters import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "log.csv"


def rows(file):
    text = file.read_bytes().decode()
    assert text.endswith("\r\n")
    assert text.count("\n") == text.count("\r\n")
    return text.split("\r\n")[:-1]


def test_a_row_that_was_cut_short_stays_on_its_own_line(file):
    file.write_bytes(b"epoch,q\r\n0,1.0\r\n1,2")
    play(CSVLogger(file, append=True), [3.0], begin=2)
    assert rows(file) == ["epoch,q", "0,1.0", "1,2", "2,3.0"]


# Going on ---------------------------------------------------------------------------


def interrupted(file, done, **arguments):
    """The state after so many of three epochs; the file has all of them."""
    return play(CSVLogger(file, **arguments), [1.0, 2.0, 3.0]).states[done - 1]


def test_a_state_from_before_the_epoch_s_row_loses_no_row(file):
    """A checkpoint may be taken by a callback that comes before the logger."""
    state = CallbackList(CSVLogger(file)).state_dict()
    interrupted(file, 3)
    play(CSVLogger(file), [5.0], begin=2, state=state)
    assert rows(file) == ["epoch,q,val_q", "0,1.0,NA", "1,2.0,NA", "2,5.0,NA"]


def test_earlier_runs_stay_whatever_their_epochs(file):
    play(CSVLogger(file), [7.0, 8.0, 9.0])
    state = interrupted(file, 2, append=True)
    play(CSVLogger(file, append=True), [5.0], begin=2, state=state)
    assert [row[:5] for row in rows(file)[1:]] == [
        "0,7.0",
        "1,8.0",
        "2,9.0",
        "0,1.0",
        "1,2.0",
        "2,5.0",
    ]


@pytest.mark.parametrize("rest", [b"2,3.", b"\xc3"])
def test_a_row_that_the_killed_process_left_unfinished_is_cut_away(file, rest):
    state = interrupted(file, 2)
    file.write_bytes(file.read_bytes().replace(b"2,3.0,NA\r\n", rest))
    assert not file.read_bytes().endswith(b"\n")
    play(CSVLogger(file), [5.0], begin=2, state=state)
    assert rows(file)[1:] == ["0,1.0,NA", "1,2.0,NA", "2,5.0,NA"]


def test_a_killed_process_leaves_the_rows_of_its_epochs(file):
    script = f"""
import os
from ipufit.callbacks import CSVLogger, LambdaCallback
from tests.callbacks.driving import play
def die(epoch, logs):
    if epoch == 2:
        os.kill(os.getpid(), {signal.SIGKILL:d})
play([CSVLogger({os.fspath(file)!r}), LambdaCallback(die)], [1.0, 2.0, 3.0])
"""
    assert run_python("-c", script, cwd=ROOT).returncode == -signal.SIGKILL
    assert rows(file) == ["epoch,q,val_q", "0,1.0,NA", "1,2.0,NA"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_what_cannot_be_cut_or_written_is_an_error_and_no_endless_reading():
    with pytest.raises(FileError, match=r"^'/dev/full' can't be written"):
        play(CSVLogger("/dev/full"), [{"loss": 0.5}])
