# SPDX-License-Identifier: Apache-2.0
"""Tables, plots and the page of the docs."""

from __future__ import annotations

import doctest

import pytest

from benchmarks import page, scaling, steps, tables, workloads
from benchmarks.point import Point
from benchmarks.results import Row, Spread

ONE = Spread(1.0, 1.0, 1.0)


def row(contestant, speed):
    return Row("W2", "train", contestant, speed, ONE, ONE, 0.5, 1.0, None, ONE)


@pytest.mark.parametrize("module", [page, tables, workloads])
def test_examples_are_right(module):
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


def test_the_tables_show_medians_ranges_and_who_is_missing():
    rows = [row("plain", ONE), row("ipufit", Spread(2.0, 1.5, 2.5))]
    assert "| ipufit, iterations set    |     2.00 |" in tables.overview(rows)
    assert "| CPU speed, ipufit, iteration" in tables.overview(rows, "ipufit")
    full = tables.details(rows)
    assert "2.00 (1.50-2.50)" in full
    assert full.count("\n") == 3


def test_cost_that_grows_with_the_square_is_seen():
    def result(point, power):
        cpu = (point.samples * 1e-6) ** power * point.epochs
        return {"cpu": cpu, "wall": cpu, "peak_bytes": 3e6, "start_bytes": 1e6}

    for power in (1, 2):
        costs = [
            scaling.cost(point, [result(point, power)])
            for point in scaling.points("samples")
        ]
        assert scaling.exponent(costs) == pytest.approx(power)
    assert costs[0].memory_mb.median == 2.0
    point = Point(samples=1024, epochs=4)
    found = scaling.cost(point, [{**result(point, 1), "cpu": 1.0}])
    assert found.sample_us.median == pytest.approx(1e6 / 4096)
    assert found.call_us.median == pytest.approx(1e6 / 16)  # 256 samples in a call


def test_a_layer_adds_what_it_takes_more_than_those_under_it():
    taken = {
        "torch": [100.0, 110.0],
        "executor": [130.0, 120.0],
        "data": [5.0, 5.0],
        "fit": [150.0, 160.0],
        "metrics": [170.0, 180.0],
        "callbacks": [171.0, 182.0],
        "bar": [190.0, 200.0],
    }
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in steps.report(taken).splitlines()[2:]
    ]
    added = {line[0].partition(":")[0]: line[2] for line in lines}
    assert added == {
        "torch": "105.0 (100.0-110.0)",
        "executor": "20.0 (10.0-30.0)",
        "data": "5.0",
        "engine": "25.0 (15.0-35.0)",
        "metrics": "20.0",
        "callbacks": "1.5 (1.0-2.0)",
        "bar": "20.0",
    }


def test_every_layer_can_be_measured(monkeypatch):
    monkeypatch.setattr(steps, "UPDATES", 20)
    short = workloads.W2.__class__(**{**vars(workloads.W2), "train_samples": 640})
    monkeypatch.setattr(steps, "W2", short)
    taken = steps.measure(1)
    assert set(taken) == {layer.way for layer in steps.LAYERS}
    assert all(value > 0 for (value,) in taken.values())
