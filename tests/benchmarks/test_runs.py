# SPDX-License-Identifier: Apache-2.0
"""Processes take turns; results are kept and compared; failures are said."""

import math

import pytest

from benchmarks import peers, workloads
from benchmarks.results import Measured, Spread, complaints
from benchmarks.runs import Runner
from benchmarks.worker import Job

WORKER = """
import json, os, sys
asked = json.loads(open(sys.argv[1]).read())
if asked["contestant"] == "keras":
    raise SystemExit("so it is")
answer = {"asked": asked, "threads": os.environ["OMP_NUM_THREADS"],
          "foreign": os.environ.get("IPUFIT_EMULATOR_IPUS"),
          "bytecode": not sys.dont_write_bytecode and sys.pycache_prefix is None}
open(sys.argv[2], "w").write(json.dumps(answer))
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A runner whose worker says what it was asked, and how."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "worker.py").write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr("benchmarks.runs.ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it may have the real worker
    monkeypatch.setattr("benchmarks.runs.import_seconds", lambda statement: 0.0)
    return Runner(tmp_path / "journal")


def test_a_process_gets_its_environment_and_answers_once(monkeypatch, capfd, runner):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")  # would change what is measured
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # and so would these
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "empty")
    job = Job("W2", "plain", ("train",), threads=2)
    answer = runner.run(job, 0)
    asked = answer.pop("asked")
    assert (asked["workload"], asked["operations"]) == ("W2", ["train"])
    assert answer == {"threads": "2", "foreign": None, "bytecode": True}
    assert Runner(runner.journal).run(job, 0)["threads"] == "2"
    assert capfd.readouterr().err == "W2: plain\n"


def test_a_process_that_fails_says_why_and_has_no_other_turn(runner):
    jobs = [Job("W2", "plain"), Job("W2", "keras")]
    turns = list(runner.interleaved(jobs, 2))
    assert [job.contestant for job, _ in turns] == ["plain", "keras", "plain"]
    assert turns[1][1] == {"failed": "exit 1: so it is"}


def test_a_contestant_that_does_less_fails_the_run(monkeypatch, capsys):
    def run(self, job, repeat):
        epochs = 1 + workloads.find(job.workload).epochs
        losses = [[2.0 / (1 + epoch), 0.5] for epoch in range(epochs)]
        if job.contestant == "ipufit":
            losses = losses[:-1]
        times = {"cpu": 1.0, "wall": 1.0}
        return {
            "operations": {"train": {"first": times, "measured": times}},
            "figures": {"train": losses},
            "peak_bytes": 1,
            "set_up": times,
        }

    monkeypatch.setattr(Runner, "run", run)
    switches = ["--workloads", "W2", "--operations", "train", "--contestants"]
    assert peers.main([*switches, "tuned"]) == 0
    assert peers.main([*switches, "tuned", "ipufit"]) == 1
    assert "W2 ipufit: 4 epochs instead of 5" in capsys.readouterr().out


def result(cpu, first=1.0, peak=100):
    times = {"cpu": cpu, "wall": 2 * cpu}
    one = {"first": {"cpu": first, "wall": first}, "measured": times}
    return {
        "operations": {"train": one},
        "figures": {},
        "peak_bytes": peak,
        "set_up": {"cpu": 0.25, "wall": 0.5},
    }


def measured(**results):
    found = Measured()
    for contestant, each in results.items():
        for one in each:
            found.add(Job("W2", contestant, ("train",)), one)
    return found


def test_a_repeat_is_compared_with_the_plain_loop_of_the_same_repeat():
    plain = [result(1.0), result(2.0), result(4.0)]
    mine = [result(0.5), result(0.5, first=0.75, peak=150), result(4.0)]
    rows = measured(plain=plain, ipufit=mine).rows()
    assert [row.contestant for row in rows] == ["plain", "ipufit"]
    assert rows[1].speed == Spread(2.0, 1.0, 4.0)
    assert rows[1].wall_speed == Spread(2.0, 1.0, 4.0)
    assert rows[1].memory == Spread(1.0, 1.0, 1.5)
    assert rows[1].first_seconds == 0.25


PLAIN = {
    "train": [[1.0, 0.5], [0.5, 0.75]],
    "evaluate": [0.4, 0.8],
    "predict": [16, [0.0, 1.0]],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train": [[1.0, 0.5]]}, "1 epochs instead of 2"),
        ({"train": [[1.0, 0.5], [1.0, 0.75]]}, "the loss went from 1 to 1"),
        ({"train": [[1.0, 0.5], [0.53, 0.75]]}, "loss differs by 0.06"),
        ({"train": [[1.01, 0.5], [0.5, 0.75]]}, "first loss differs by 0.01"),
        ({"train": [[1.0, 0.5], [0.5, 0.7]]}, "accuracy differs by 0.05"),
        ({"train": [[1.0, 0.5], [math.nan, 0.75]]}, "loss differs by inf"),
        ({"evaluate": [0.5, 0.8]}, "loss differs by 0.25"),
        ({"predict": [15, [0.0, 1.0]]}, "15 rows instead of 16"),
    ],
)
def test_less_work_or_other_work_is_noticed(change, said):
    assert said in complaints({**PLAIN, **change}, PLAIN, 2, 1000)
