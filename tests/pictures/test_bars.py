# SPDX-License-Identifier: Apache-2.0
"""Pictures of bars have the amounts that they were given, and are as long."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ipufit.pictures import Bar, BarChart, Part, Report, amount_in_words
from tests.pictures.reading import Page, rectangles_of_svg, texts_of_svg
from tests.strategies import examples

KINDS = ("parameters", "optimiser state", "accumulators", "activations")
FILLS = "█▓▒░"
MB = 10**6
CHART = BarChart(
    "Memory per IPU",
    "Code isn't counted.",
    "B",
    (
        Bar("IPU 0", (Part("parameters", 100 * MB), Part("activations", 0, True))),
        Bar("IPU 1", (Part("parameters", 300 * MB), Part("activations", MB, True))),
        Bar("IPU 2", (Part("activations", 1200 * MB, True),)),
        Bar("IPU 3", ()),
    ),
    897 * MB,
    "memory of one IPU",
)


@st.composite
def charts(draw):
    amounts = st.integers(0, 10**12) | st.just(0)
    bars = tuple(
        Bar(
            f"IPU {number}",
            tuple(Part(kind, draw(amounts), kind == KINDS[3]) for kind in kinds),
        )
        for number, kinds in enumerate(
            draw(st.lists(st.lists(st.sampled_from(KINDS), unique=True), max_size=9))
        )
    )
    limit = draw(st.none() | st.integers(10**10, 10**12))
    return BarChart("Memory", "", draw(st.sampled_from(["B", "FLOP"])), bars, limit)


def shown(chart, width, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, color_system=None)
    Report(chart.title, (), (chart,)).show(console)
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


@settings(max_examples=examples(60))
@given(charts(), st.integers(40, 130))
def test_lines_fit_and_parts_are_as_long_as_they_are_large(chart, width):
    lines = shown(chart, width)
    assert max(map(len, lines)) <= width
    fill_of = dict(zip(chart.kinds, FILLS))
    longest = max([0, *(bar.total for bar in chart.bars)])
    is_drawn = chart.limit is not None and chart.limit < 10 * longest
    rows = iter(lines[2:])
    for bar in chart.bars:
        row = next(rows)
        assert row.startswith(bar.label)
        if ":" in row:  # name and total have a line of their own
            row = next(rows)
        assert row.count("┃") == is_drawn
        for part in bar.parts:
            share = part.amount / chart.scale
            assert row.count(fill_of[part.kind]) <= share * min(width, 80) + 2


def test_the_longest_bar_is_as_wide_as_the_picture():
    bars = (Bar("a", (Part("x", 3), Part("y", 1))), Bar("b", (Part("y", 2),)))
    lines = shown(BarChart("Work", "", "FLOP", bars), 60)
    first, second = lines[2], lines[3]
    whole = first.count("█") + first.count("▓")
    room = first.index("4 FLOP") - len("a  ") - len("  ")
    assert whole == room - 1  # one column is left for a limit
    assert first.count("█") == pytest.approx(0.75 * whole, abs=1)
    assert second.count("▓") == pytest.approx(0.5 * whole, abs=1)


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_tells_all_numbers_and_what_is_too_much(width):
    text = " ".join(" ".join(shown(CHART, width)).split())
    for told in ("100 MB, 11.1%", "~301 MB, 33.6%", "0 B, 0.0%"):
        assert told in text
    assert "~1.20 GB, 133.8% (too much)" in text
    assert text.count("too much") == 1
    assert "activations (estimate)" in text
    assert "memory of one IPU: 897 MB" in text


@pytest.mark.parametrize("width", [40, 100])
def test_a_limit_far_beyond_all_bars_is_told_and_not_drawn(width):
    lines = shown(CHART._replace(limit=100 * 1200 * MB), width)
    text = " ".join(" ".join(lines).split())
    assert "┃" not in text
    assert "memory of one IPU: 120 GB, far beyond these bars" in text
    assert any(line.count("▓") >= 20 for line in lines)


def test_one_kind_needs_no_table_beside_its_bars():
    bars = (Bar("a", (Part("x", 3),)), Bar("b", (Part("x", 1),)))
    lines = shown(BarChart("Work", "", "FLOP", bars), 60)
    assert [line.split()[0] for line in lines[2:]] == ["a", "b", "█"]


def test_without_unicode_each_kind_has_another_sign():
    lines = shown(CHART, 80, "ascii")
    assert "".join(lines).isascii()
    assert any("# parameters" in line and "= activations" in line for line in lines)
    bar = next(line for line in lines if line.startswith("IPU 2  "))
    assert bar.count("=") > 20
    assert bar.count("|") == 1


def test_other_letters_of_labels_do_not_stop_a_plain_terminal():
    chart = CHART._replace(title="Speicher für …", bars=(Bar("Ω", ()),))
    assert shown(chart, 40, "ascii")[0] == "Speicher f?r ?"


# SVG and page -------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    pytest.importorskip("matplotlib")

    def save(chart):
        report = Report("Memory", (), (chart,))
        report.save(tmp_path / "bars.svg")
        report.save(tmp_path / "bars.html")
        return [
            (tmp_path / name).read_text("utf-8") for name in ("bars.svg", "bars.html")
        ]

    return save


def test_rectangles_are_as_long_as_their_parts(files):
    plain = CHART._replace(
        bars=tuple(
            bar._replace(
                parts=tuple(part._replace(is_estimate=False) for part in bar.parts)
            )
            for bar in CHART.bars
        )
    )
    svg, _ = files(plain)
    legend, bars = _legend_and_bars(svg, plain)
    parts = [part for bar in plain.bars for part in bar.parts]
    assert len(bars) == len(parts)
    per_byte = (bars[-1].right - bars[-1].left) / parts[-1].amount
    for part, rectangle in zip(parts, bars):
        assert rectangle.right - rectangle.left == pytest.approx(
            part.amount * per_byte, abs=0.01
        )
        assert rectangle.colour == legend[part.kind]
    first, second = bars[2:4]
    assert second.left == pytest.approx(first.right)
    assert second.middle == pytest.approx(first.middle)


def _legend_and_bars(svg, chart):
    """Colour of each kind in the legend, and the rectangles of the bars."""
    found = rectangles_of_svg(svg)
    count = len(chart.kinds)
    names = [told for _, _, told in texts_of_svg(svg)]
    place = names.index(chart.kinds[0])
    assert names[place : place + count] == list(chart.kinds)
    legend = dict(zip(chart.kinds, (one.colour for one in found[:count])))
    return legend, found[count:]


def test_estimates_are_hatched(files):
    svg, _ = files(CHART)
    assert svg.count("<pattern") == 1
    exact = BarChart("Work", "", "FLOP", (Bar("a", (Part("x", 1),)),))
    assert "<pattern" not in files(exact)[0]


def test_the_page_has_the_numbers_of_the_bars(files):
    svg, page = files(CHART)
    (table,) = Page(page).tables
    assert table == [
        ["", "parameters", "activations", "total", "of 897 MB"],
        ["IPU 0", "100 MB", "0 B", "100 MB", "11.1%"],
        ["IPU 1", "300 MB", "~1.00 MB", "~301 MB", "33.6%"],
        ["IPU 2", "", "~1.20 GB", "~1.20 GB", "133.8%"],
        ["IPU 3", "", "", "0 B", "0.0%"],
    ]
    texts = [told for _, _, told in texts_of_svg(svg)]
    assert "~1.20 GB, 133.8% !" in texts
    assert "memory of one IPU: 897 MB" in texts


@settings(max_examples=examples(12))
@given(charts())
def test_any_chart_can_be_drawn(chart):
    pytest.importorskip("matplotlib")
    from ipufit.pictures.vector import svg_file

    texts = [told for _, _, told in texts_of_svg(svg_file([chart], "", []))]
    assert {bar.label for bar in chart.bars} <= set(texts)


# Amounts ------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(st.integers(0, 10**18), st.sampled_from(["B", "FLOP"]))
def test_an_amount_is_told_to_within_half_a_percent(amount, unit):
    told = amount_in_words(amount, unit)
    value, prefix = re.fullmatch(rf"([\d.]+) (\w*?){unit}", told).groups()
    power = ["", *"KMGTP"].index(prefix)
    assert float(value) * 1000**power == pytest.approx(amount, rel=0.0051)
    assert len(value) <= 5
