# SPDX-License-Identifier: Apache-2.0
"""Pictures of schedules have the numbers of a simulation, wherever they are drawn."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ipufit.planning import PipelineSchedule
from tests.pictures.reading import (
    Page,
    Timetable,
    timetable_of_lines,
    timetable_of_svg,
    timetable_of_table,
)
from tests.planning.simulated_pipeline import simulated

MICRO_BATCHES = [1, 2, 3, 5, 7, 10, 16, 23, 24, 25, 64]
CASES = [
    (stages, micro_batches, trains)
    for stages in range(1, 9)
    for micro_batches in MICRO_BATCHES
    for trains in (True, False)
]
DRAWN = [(1, 1, True), (2, 64, False), (4, 10, True), (5, 3, True), (8, 64, True)]


def names_of(stages, trains, *, is_short):
    """Names of the rows, by what a slot computes."""
    names = {}
    for direction in ("forward", "backward") if trains else ("forward",):
        for stage in range(stages):
            is_last = trains and stage == stages - 1
            kinds = ("forward", "backward") if is_last else (direction,)
            if is_short:
                letters = "".join(kind[0].upper() for kind in kinds)
                names[direction, stage] = f"{stage} {letters}"
            else:
                names[direction, stage] = f"stage {stage}, {' and '.join(kinds)}"
    return names


def expected(case, *, is_short=False):
    """Every cell by a simulation, and the cycles that are left out of the picture."""
    stages, micro_batches, trains = case
    slots, started = simulated(stages, micro_batches, trains=trains)
    names = names_of(stages, trains, is_short=is_short)
    cells = {
        (names[slots[slot]], cycle): number for (number, slot), cycle in started.items()
    }
    busy = {}
    for _, cycle in cells:
        busy[cycle] = busy.get(cycle, 0) + 1
    full = [cycle for cycle in sorted(busy) if busy[cycle] == len(slots)]
    left_out = set(full[4:-4]) if len(full) > 8 else set()
    return Timetable(
        {key: number for key, number in cells.items() if key[1] not in left_out},
        {cycle: count for cycle, count in busy.items() if cycle not in left_out},
    ), names


def shown(schedule, width, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    schedule.show(Console(file=file, width=width, color_system=None))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [40, 64, 200])
def test_a_terminal_shows_the_numbers_of_a_simulation(width):
    for case in CASES:
        (cells, at_work), names = expected(case, is_short=True)
        lines = shown(PipelineSchedule(*case), width)
        assert max(map(len, lines)) <= width, case
        read = timetable_of_lines(lines, names.values())
        assert read.cells == cells, case
        assert read.at_work == at_work, case


def test_one_block_is_enough_for_the_walkthrough_on_forty_columns():
    lines = shown(PipelineSchedule(4, 10, trains=True), 40)
    assert sum(line.startswith("cycle") for line in lines) == 1


def test_without_unicode_it_is_the_same():
    schedule = PipelineSchedule(3, 40, trains=True)
    lines, plain = shown(schedule, 60), shown(schedule, 60, "ascii")
    signs = str.maketrans("·…", ".~")
    heads = [number for number, line in enumerate(plain) if line.startswith("cycle")]
    assert "".join(plain).isascii()
    assert plain[heads[0] :] == [line.translate(signs) for line in lines][heads[0] :]


@pytest.mark.parametrize("case", DRAWN, ids=str)
def test_svg_and_page_have_the_numbers_of_a_simulation(case, tmp_path):
    pytest.importorskip("matplotlib")
    (cells, at_work), _ = expected(case)
    PipelineSchedule(*case).save(tmp_path / "s.svg")
    PipelineSchedule(*case).save(tmp_path / "s.html")
    drawn = timetable_of_svg((tmp_path / "s.svg").read_text("utf-8"))
    assert drawn == (cells, at_work)
    page = (tmp_path / "s.html").read_text("utf-8")
    assert timetable_of_table(Page(page).tables[0]) == (cells, at_work)
    inline = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    assert timetable_of_svg(inline) == (cells, at_work)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_words_have_the_figures_of_a_simulation(case):
    stages, micro_batches, trains = case
    slots, started = simulated(stages, micro_batches, trains=trains)
    num_cycles = 1 + max(started.values())
    use = len(started) / (num_cycles * len(slots))
    text = " ".join(" ".join(shown(PipelineSchedule(*case), 200)).split())
    assert f"{num_cycles} cycle" in text
    assert f"{use:.1%} of the slots are in use, {1 - use:.1%} are idle" in text
    where = "training" if trains else "inference"
    assert f"{micro_batches} micro-batch" in text
    assert f"in {where}" in text
