# SPDX-License-Identifier: Apache-2.0
"""Crews answer together, and the benchmark of several processes reports."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from benchmarks import distributed
from benchmarks.crews import Crew, CrewError


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


@pytest.mark.thorough
def test_the_benchmark_runs(capsys):
    switches = ["--quick", "--workloads", "mlp", "--processes", "2"]
    assert distributed.main(switches) == 0
    printed = capsys.readouterr().out
    for line in ("| 2 processes ", "| mlp ", "| end of an epoch "):
        assert line in printed
