# SPDX-License-Identifier: Apache-2.0
"""The pictures of a plan have the plan's numbers, and those of a simulation."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ipufit.planning.plan_report import plan_report
from tests.pictures.reading import (
    Page,
    rectangles_of_svg,
    timetable_of_lines,
    timetable_of_table,
)
from tests.planning.simulated_pipeline import simulated
from tests.test_model_plan import digits, tutorial


@pytest.fixture(scope="module")
def plan():
    return tutorial()


def starts(stages, micro_batches):
    """(stage, cycle) -> micro-batches, of a simulation of an update."""
    slots, started = simulated(stages, micro_batches, trains=True)
    found = {}
    for (number, slot), cycle in started.items():
        found.setdefault((slots[slot][1], cycle), set()).add(number)
    return found


def by_stage(cells):
    """The same of a picture, by the first number in the name of a row."""
    found = {}
    for (name, cycle), number in cells.items():
        stage = int(re.search(r"\d+", name)[0])
        found.setdefault((stage, cycle), set()).add(number)
    return found


def test_a_terminal_of_forty_columns_shows_schedule_memory_and_flops(plan):
    file = io.StringIO()
    plan.show(Console(file=file, width=40))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    begin = lines.index("F is forward, B is backward.") + 2
    block = lines[begin : lines.index("", begin)]
    names = ["3 FB", *(f"{stage} {letter}" for stage in range(3) for letter in "FB")]
    read = timetable_of_lines(block, names)
    assert by_stage(read.cells) == starts(4, 10)
    text = " ".join(" ".join(lines).split())
    for stage, share in enumerate(plan.flop_shares):
        assert re.search(rf"stage {stage}: [\d.]+ .FLOP, {share:.1%}", text)


def test_a_page_has_the_schedule_of_a_simulation(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan.save(tmp_path / "plan.html")
    page = Page((tmp_path / "plan.html").read_text("utf-8"))
    (timetable,) = [rows for rows in page.tables if rows[0][0] == "cycle"]
    assert by_stage(timetable_of_table(timetable).cells) == starts(4, 10)


def test_bars_are_as_long_as_the_flops(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan.save(tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text("utf-8")
    *_, first, second, third, fourth = rectangles_of_svg(text)
    lengths = [one.right - one.left for one in (first, second, third, fourth)]
    assert [one / sum(lengths) for one in lengths] == pytest.approx(
        plan.flop_shares, abs=1e-4
    )


def test_bars_of_memory_add_up_to_the_totals(plan):
    (chart, *_) = plan_report(plan).pictures
    assert [bar.total for bar in chart.bars] == [m.total.value for m in plan.memory]
    assert chart.estimated_kinds == {"gradients", "activations"}
    assert chart.limit == plan.device.num_bytes


def test_one_stage_has_no_schedule():
    model, x, y = digits()
    report = plan_report(model.plan(x, y))
    assert len(report.pictures) == 2
