# SPDX-License-Identifier: Apache-2.0
"""Crews answer together, and the benchmark of several processes reports."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from benchmarks import distributed
from benchmarks.crews import Crew, CrewError
from benchmarks.distributed import Layout, Measured, Turn


class Adder:
    """Answers with sums over the crew, or fails."""

    def __init__(self, index, count):
        self.index, self.count = index, count

    def __call__(self, number):
        if number < 0 and self.index:
            raise ValueError("so it is")
        total = torch.tensor(number + self.index)
        dist.all_reduce(total)
        return total.item(), torch.get_num_threads()


def test_a_crew_answers_together_and_says_why_it_fails():
    crew = Crew(Adder, 2, 1)
    try:
        assert crew.ask(3) == [(7, 1), (7, 1)]
        assert crew.ask(4) == [(9, 1), (9, 1)]
        with pytest.raises(CrewError, match="so it is"):
            crew.ask(-1)
    finally:
        crew.dismiss()


def measured():
    found = Measured()
    for layout in (Layout(1, 1), Layout(2, 1)):
        for name, wall in {"ipufit": 1.0, "ipufit-d1": 2.0, "loop": 3.0}.items():
            found.turns["mlp", layout, name] += [Turn(wall, wall, 3000.0, None)] * 2
        found.turns["mlp", layout, "usual"] += [Turn(4.0, 4.0, 9.0, None)] * 2
    return found


def test_tables_show_ratios_and_bytes_beside_a_ring():
    found = measured()
    layouts = [Layout(1, 1), Layout(2, 1)]
    lines = distributed._speeds(found, "mlp", layouts, quick=True).splitlines()
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells[0] == "2 processes"
    assert cells[5:] == ["3.00", "3.00", "3.00", "4.00"]
    lines = distributed._bytes(found, ["mlp"], layouts, quick=True).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:4] == ["mlp", "2", "2704", "2704"]
    assert distributed._verdict(found).endswith("1 of 1.")
    slow = [Turn(9.0, 9.0, None, None)] * 2
    found.turns["mlp", Layout(2, 1), "ipufit"] = slow
    assert distributed._verdict(found).endswith("slower: mlp with 2 processes (0.33).")


@pytest.mark.thorough
def test_the_benchmark_runs(capsys):
    switches = ["--quick", "--workloads", "mlp", "--processes", "2"]
    assert distributed.main(switches) == 0
    printed = capsys.readouterr().out
    for line in ("| 2 processes ", "| mlp ", "| end of an epoch "):
        assert line in printed
