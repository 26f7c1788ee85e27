# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans and schedules have their numbers, and those of a simulation."""

from __future__ import annotations

import io
import re
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from ipufit.errors import ConfigError
from ipufit.planning.pictures import amount_in_words
from ipufit.planning.schedule import PipelineSchedule
from tests.planning.simulated_pipeline import simulated
from tests.planning.test_model_plan import tutorial

CASES = [
    (stages, micro_batches, trains)
    for stages in (1, 2, 4, 8)
    for micro_batches in (1, 2, 5, 10, 25, 64)
    for trains in (True, False)
]


@pytest.fixture(scope="module")
def plan():
    return tutorial()


def shown(one, width, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    one.show(Console(file=file, width=width, color_system=None))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


def expected(stages, micro_batches, trains):
    """(stage, cycle) -> micro-batches by a simulation, without the cycles left out."""
    slots, started = simulated(stages, micro_batches, trains=trains)
    found, busy = {}, {}
    for (number, slot), cycle in started.items():
        found.setdefault((slots[slot][1], cycle), set()).add(number)
        busy[cycle] = busy.get(cycle, 0) + 1
    full = [cycle for cycle in sorted(busy) if busy[cycle] == len(slots)]
    left_out = set(full[4:-4]) if len(full) > 8 else set()
    cells = {key: numbers for key, numbers in found.items() if key[1] not in left_out}
    return cells, {c: count for c, count in busy.items() if c not in left_out}


def read(lines):
    """(stage, cycle) -> micro-batches, and cycle -> rows at work, in a terminal."""
    cells, at_work, cycles = {}, {}, None
    for line in lines:
        row = re.match(r"(cycle|at work|\d+ [FB]+) +([-\d.~ ]+)$", line)
        if row is None:
            continue
        numbers = row[2].split()
        if row[1] == "cycle":
            cycles = numbers
            continue
        assert len(numbers) == len(cycles)
        for cycle, number in zip(cycles, numbers):
            if not number.isdigit():
                assert number == ("~" if cycle == "~" else ".")
            elif row[1] == "at work":
                at_work[int(cycle)] = int(number)
            else:
                key = int(row[1].split()[0]), int(cycle)
                cells.setdefault(key, set()).add(int(number))
    return cells, at_work


def texts_of_svg(text):
    """(x, y, text) of each text of a picture."""
    return [
        (float(one.get("x")), float(one.get("y")), one.text)
        for one in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_shows_the_numbers_of_a_simulation(width):
    for case in CASES:
        lines = shown(PipelineSchedule(*case), width, "ascii")
        assert max(map(len, lines)) <= width, case
        assert read(lines) == expected(*case), case


def test_the_words_have_the_figures_of_a_simulation():
    for stages, micro_batches, trains in CASES:
        slots, started = simulated(stages, micro_batches, trains=trains)
        num_cycles = 1 + max(started.values())
        use = len(started) / (num_cycles * len(slots))
        lines = shown(PipelineSchedule(stages, micro_batches, trains), 400)
        assert f"{num_cycles} cycle" in lines[-1]
        assert f"{use:.1%} of the slots are in use, {1 - use:.1%} are idle" in lines[-1]
        where = "training" if trains else "inference"
        assert f"{micro_batches} micro-batch" in lines[0]
        assert lines[0].endswith(f" in {where}")


@pytest.mark.parametrize("case", [(2, 64, False), (4, 10, True), (5, 3, True)], ids=str)
def test_a_picture_has_the_numbers_of_a_simulation(case, tmp_path):
    pytest.importorskip("matplotlib")
    PipelineSchedule(*case).save(tmp_path / "s.svg")
    texts = texts_of_svg((tmp_path / "s.svg").read_text("utf-8"))
    left = min(x for x, _, told in texts if told == "at work")
    names = {y: told for x, y, told in texts if x == left}
    below = max(names)  # where the row "at work" is
    columns = {x: int(t) for x, y, t in texts if y > below + 5 and t.isdigit()}
    cells, at_work = {}, {}
    for x, y, told in texts:
        if x == left or not told.isdigit() or y > below + 5:
            continue
        name = names[min(names, key=lambda other: abs(other - y))]
        cycle = columns[min(columns, key=lambda other: abs(other - x))]
        if name == "at work":
            at_work[cycle] = int(told)
        else:
            cells.setdefault((int(name.split()[0]), cycle), set()).add(int(told))
    assert (cells, at_work) == expected(*case)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_shows_all_of_a_plan(plan, width):
    lines = shown(plan, width)
    assert max(map(len, lines)) <= width
    assert read(lines) == expected(4, 10, True)
    text = " ".join(" ".join(lines).split())
    for stage, (share, cost) in enumerate(zip(plan.flop_shares, plan.flops)):
        told = amount_in_words(cost, "FLOP")
        assert re.search(rf"stage {stage} █* ?{told}, {share:.1%}", text)
    for words in ("Plan of Sequential with AdamW", "recompute='off'", "2.50 MB"):
        assert words in text


def test_bars_of_memory_have_a_sign_for_each_kind(plan):
    lines = shown(plan, 200, "ascii")
    legend = next(line for line in lines if "= optimizer state" in line)
    assert "o activations (estimate)" in legend
    bar = next(line for line in lines if line.startswith("IPU 2  "))
    memory = plan.memory[2]
    scale = 80 / max(one.total.value for one in plan.memory)
    assert bar.count("#") == pytest.approx(memory.parameters * scale, abs=1)
    assert bar.count("=") == pytest.approx(memory.optimizer_state * scale, abs=1)
    assert bar.count("o") == pytest.approx(memory.activations.value * scale, abs=1)
    assert "  ~1.84 MB, 0.2%" in bar


@pytest.mark.parametrize(
    "ending", ["svg", "png", pytest.param("pdf", marks=pytest.mark.slow)]
)
def test_a_plan_is_drawn_in_each_format(plan, ending, tmp_path):
    pytest.importorskip("matplotlib")
    plan.save(tmp_path / f"plan.{ending}")
    first = (tmp_path / f"plan.{ending}").read_bytes()
    assert len(first) > 5000
    if ending == "svg":
        plan.save(tmp_path / "plan.svg")
        assert (tmp_path / "plan.svg").read_bytes() == first
        texts = [told for _, _, told in texts_of_svg(first.decode())]
        assert "~1.84 MB, 0.2%" in "".join(texts)
        assert {"stage 1", "IPU 3", "3 FB", "activations (estimate)"} <= set(texts)


def test_a_limit_that_is_near_is_drawn(plan, tmp_path):
    pytest.importorskip("matplotlib")
    for num_bytes, is_drawn in ((3_000_000, True), (30_000_000, False)):
        device = plan.device._replace(num_tiles=1, tile_bytes=num_bytes)
        plan.on(device).save(tmp_path / "plan.svg")
        text = (tmp_path / "plan.svg").read_text("utf-8")
        assert ("memory of one IPU" in text) == is_drawn


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_shows_a_limit_that_is_near(plan, width):
    assert "|" not in "".join(shown(plan, width))
    device = plan.device._replace(num_tiles=1, tile_bytes=2_000_000)
    lines = shown(plan.on(device), width, "ascii")
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if re.match(r"IPU \d [ #=o+|-]+ ~", line)]
    places = {line.index("|") - 5 for line in bars}
    assert len(bars) == 4
    assert len(places) == 1
    largest = max(memory.total.value for memory in plan.memory)
    room = max(line.rindex("o") for line in bars) - 5
    assert places.pop() == pytest.approx(room * 2_000_000 / largest, abs=2)
    assert "| memory of one IPU" in " ".join(" ".join(lines).split())


def test_cycles_are_filled_by_the_share_of_the_slowest_stage(plan):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    timeline = plan.schedule.timeline(plan.flops)
    timeline.draw(axes)
    names = [label.get_text() for label in axes.get_yticklabels()]
    work = {}
    for cycles, filled in zip(axes.collections[::2], axes.collections[1::2]):
        spans = [path.get_extents() for path in filled.get_paths()]
        starts = [path.get_extents().x0 for path in cycles.get_paths()]
        assert [span.x0 for span in spans] == starts
        (width,) = {round(span.width, 9) for span in spans}
        row = names[round((spans[0].y0 + spans[0].y1) / 2)]
        work.setdefault(int(row.split()[0]), set()).add(width)
    slowest = max(plan.flops)
    assert work == {i: {round(f / slowest, 9)} for i, f in enumerate(plan.flops)}
    assert len(axes.collections) == 2 * plan.schedule.num_slots


def test_numbers_on_colors_are_black_in_dark_styles_too(plan):
    matplotlib = pytest.importorskip("matplotlib")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    with matplotlib.rc_context({"text.color": "white"}):
        axes = figure.subplots()
        plan.schedule.timeline().draw(axes)
    colors = {}
    names = [label.get_text() for label in axes.get_yticklabels()]
    for text in axes.texts:
        colors.setdefault(names[text.get_position()[1]], set()).add(text.get_color())
    assert colors.pop("at work") == {"white"}
    assert set().union(*colors.values()) == {"black"}


def test_without_matplotlib_the_error_says_what_to_install(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install ipufit\[plot\]"):
        plan.save(tmp_path / "plan.svg")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plan.gif", "plan"])
def test_another_ending_is_refused(plan, name, tmp_path):
    with pytest.raises(ConfigError, match=r"\.svg, \.png or \.pdf"):
        plan.save(tmp_path / name)
