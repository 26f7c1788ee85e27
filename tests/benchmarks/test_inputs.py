# SPDX-License-Identifier: Apache-2.0
"""Datasets that are read sample by sample, and what reading them takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks import inputs, reading
from benchmarks.reading import WAYS, Reading
from benchmarks.runs import Runner

SMALL = {"samples": 400, "epochs": 1, "source": "drawings"}


@pytest.fixture(autouse=True)
def _as_found():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", ["plain", "ipufit-default", "ipufit"])
def test_every_way_can_be_measured(way):
    found = reading.measure(Reading(way, 0, **SMALL))
    assert found["cpu"] > 0
    assert found["wall"] > 0
    assert found["source"] == "drawings like MNIST's"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is used")
def test_a_child_that_lives_is_counted():
    before = reading.family_seconds()
    spin = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < "
    child = subprocess.Popen(
        [sys.executable, "-c", spin + "end: pass\nprint(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        child.stdout.readline()
        found = reading.family_seconds()
        assert found - before >= 0.15  # 0.2 in hundredths, of two kinds of time
    finally:
        child.communicate(b"\n")


def test_ratios_are_to_the_plain_loop_with_as_many_workers(monkeypatch, capsys):
    def call(self, module, asked, repeat, title):
        seconds = {"plain": 1.0, "ipufit-default": 0.5, "ipufit": 0.25}
        taken = seconds[asked["way"]] * (1 + asked["workers"])
        return {"cpu": taken, "wall": 2 * taken, "source": "somewhere"}

    monkeypatch.setattr(Runner, "call", call)
    switches = ["--ways", "ipufit-default", "ipufit", "--repeats", "2"]
    assert inputs.main([*switches, "--samples", "1000", "--epochs", "1"]) == 0
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [WAYS["ipufit-default"], "0", "2.00", "2.00", "500"] in lines
    assert [WAYS["ipufit"], "2", "4.00", "4.00", "750"] in lines
    assert [WAYS["plain"], "2", "1.00", "1.00", "3000"] in lines
