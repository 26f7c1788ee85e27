# SPDX-License-Identifier: Apache-2.0
"""The pages of results and of pods say what was measured or modelled, in every form."""

import doctest
import re
from xml.etree import ElementTree

import pytest

from benchmarks import page, pictures, pod_cost
from benchmarks.pod_cost import MODELS, exchange_seconds
from benchmarks.results import Row, Spread


def cells_of(table):
    """Medians of a table, by line and column."""
    heading, _, *lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {
        (line[0].strip(), column.strip()): float(cell.split()[0])
        for line in lines
        for column, cell in zip(heading[1:], line[1:])
    }


def part(name, path=page.PAGE):
    first, last = page.markers(name)
    return path.read_text("utf-8").partition(first)[2].partition(last)[0].strip()


def test_the_summary_has_the_measured_medians():
    summary = part("page")
    shown = cells_of(summary)
    settings, *tables = part("peers --write peers").split("\n\n")
    assert "turns each, threads: 1. W1 and W3 on MNIST." in settings
    for (workload, operation), column in page.COLUMNS.items():
        (table,) = (one for one in tables if one.startswith(f"| {operation};"))
        measured = cells_of(table)
        for name in {line for line, _ in shown}:
            digits = 0 if measured[name, workload] >= 10 else 2
            value = round(measured[name, workload], digits)
            assert shown[name, column] == pytest.approx(value, abs=0.01)


def test_the_sentences_of_the_page_are_true():
    shown = cells_of(part("page"))
    for name in ("ipufit, nothing set", "ipufit, iterations set"):
        mine = {
            column: value for (line, column), value in shown.items() if line == name
        }
        assert min(mine.values()) > 1.0
        training = {key: value for key, value in mine.items() if "evaluate" not in key}
        assert max(training, key=training.get) == "small MLP"
    others = {cell: v for cell, v in shown.items() if "ipufit" not in cell[0]}
    assert max(v for (_, column), v in others.items() if column != "ResNet-18") < 1.0
    told = re.search(r"on ResNet \((.*) and (.*)\);", page.PAGE.read_text("utf-8"))
    resnet = [v for (_, column), v in others.items() if column == "ResNet-18"]
    assert resnet == [float(one) for one in told.groups()]


def test_the_picture_is_small_and_can_be_read_at_page_width():
    path = page.DOCS / "benchmarks-peers.svg"
    assert path.stat().st_size <= 60_000
    root = ElementTree.parse(path).getroot()
    scale = pictures.WIDTH / float(root.get("viewBox").split()[2])
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    sizes = [
        re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", t.get("style")) for t in texts
    ]
    assert min(scale * float(size[1]) for size in sizes) >= 11
    drawn = {text.text for text in texts}
    for (_, column), cell in cells_of(part("page")).items():
        assert "evaluate" in column or f"{cell:.2f}" in drawn


def test_a_picture_is_the_same_for_the_same_results(tmp_path):
    pytest.importorskip("matplotlib")
    speed = Spread(1.5, 1.25, 2.0)
    rows = [
        Row(name, "train", one, speed, speed, speed, 1.0, 1.0, speed)
        for name in ("W1", "lstm")
        for one in ("plain", "ipufit", "keras")
    ]
    paths = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in paths:
        pictures.draw_speeds(rows, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    text = paths[0].read_text("utf-8")
    assert "MNIST CNN" in text
    assert "LSTM" in text


RESNET, BERT_BASE, BERT_LARGE = MODELS


def test_examples_are_right():
    result = doctest.testmod(pod_cost)
    assert (result.attempted > 0, result.failed) == (True, 0)


def test_the_page_has_what_is_printed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pod_cost"])
    pod_cost.main()
    printed = capsys.readouterr().out.strip()
    text = pod_cost.PAGE.read_text(encoding="utf-8")
    assert page.replaced(text, "pod_cost", printed) == text


def test_what_the_page_says_of_shares_is_so():
    def share(model, replicas, size):
        exchange = exchange_seconds(model, replicas, "float16")
        return exchange / pod_cost.update_seconds(model, replicas, size)

    assert share(RESNET, 64, 2_560) == pytest.approx(1 / 6, rel=0.05)
    assert share(RESNET, 64, 10_240) == pytest.approx(1 / 20, rel=0.05)
    assert share(BERT_LARGE, 64, 65_536) < 0.03
