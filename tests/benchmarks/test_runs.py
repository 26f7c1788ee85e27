# SPDX-License-Identifier: Apache-2.0
"""Processes take turns, what they measured is kept, and failures are said."""

from __future__ import annotations

import pytest

from benchmarks import peers, workloads
from benchmarks.runs import Runner

ECHO = """
import json, os, sys
asked = json.loads(open(sys.argv[1]).read())
if asked.get("fails"):
    raise SystemExit("so it is")
answer = {"asked": asked, "threads": os.environ["OMP_NUM_THREADS"],
          "terminal": os.isatty(1),
          "foreign": os.environ.get("IPUFIT_EMULATOR_IPUS"),
          "bytecode": not sys.dont_write_bytecode and sys.pycache_prefix is None}
open(sys.argv[2], "w").write(json.dumps(answer))
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """A module that says what it was asked, and how."""
    (tmp_path / "echo_for_runs.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.setattr("benchmarks.runs.ROOT", tmp_path)
    return "echo_for_runs"


def test_a_process_gets_its_environment_and_answers(tmp_path, monkeypatch, echo):
    monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")  # would change what is measured
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # and so would these
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "empty"))
    lines = []
    runner = Runner(tmp_path, report=lines.append)
    answer = runner.call(echo, {"a": 1}, 0, "title", 2)
    assert answer == {
        "asked": {"a": 1},
        "threads": "2",
        "terminal": False,
        "foreign": None,
        "bytecode": True,
    }
    assert runner.call(echo, {}, 0, "title", is_at_terminal=True)["terminal"] is True
    assert lines == ["title", "title"]


def test_a_process_that_fails_says_why(tmp_path, echo):
    answer = Runner(tmp_path).call(echo, {"fails": True}, 0, "title")
    assert answer == {"failed": "exit 1: so it is"}


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
    monkeypatch.setattr(peers, "measure_imports", lambda *arguments: "")
    switches = ["--workloads", "W2", "--operations", "train", "--contestants"]
    assert peers.main([*switches, "bare"]) == 0
    assert peers.main([*switches, "bare", "ipufit"]) == 1
    assert "W2 ipufit: 4 epochs instead of 5" in capsys.readouterr().out
