# SPDX-License-Identifier: Apache-2.0
"""What starts take, beside the plain loop's of the same turn."""

from __future__ import annotations

from benchmarks import start
from benchmarks.runs import Runner
from benchmarks.start import Start


def result(set_up, first, later):
    return {
        "set_up": {"cpu": set_up, "wall": 2 * set_up},
        "operations": {
            "train": {
                "first": {"cpu": first, "wall": 2 * first},
                "measured": {"cpu": later, "wall": 2 * later},
            }
        },
    }


def test_a_ratio_is_that_of_the_same_turn():
    plain = [Start(1.0, 1.0, 1.0), Start(2.0, 2.0, 2.0)]
    mine = [Start(1.0, 2.0, 1.0), Start(2.0, 2.0, 2.0)]
    found = start.row("W2", mine, plain)
    assert found["first_ratio"] == [1.5, 1.0, 2.0]
    assert found["whole_ratio"] == [1.25, 1.0, 1.5]
    assert found["ipufit_first_seconds"] == 2.0
    assert found["plain_first_seconds"] == 1.5


def test_the_command_measures_and_reports(monkeypatch, capsys):
    def run(self, job, repeat):
        taken = {"plain": 1.0, "ipufit-default": 1.5}
        return result(1.0, taken[job.contestant], 0.5)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(start, "import_seconds", lambda runner, statement: 0.125)
    assert start.main(["--networks", "encoder12", "--repeats", "2"]) == 0
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    plain, ours = ["1.00", "1.00", "0.50"], ["1.00", "1.50", "0.50"]
    assert ["encoder12", *plain, *ours, "1.50", "1.25"] in lines
    assert ["`import ipufit`", "0.12"] in lines
