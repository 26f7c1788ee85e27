# SPDX-License-Identifier: Apache-2.0
"""The page of results, its pictures and its appendix say what was measured."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from benchmarks import page, peers, pictures
from benchmarks.contestants import CONTESTANTS
from benchmarks.results import Spread
from benchmarks.tables import spread

PARTS = {
    **{part: f"peers --write {part}" for part in peers.PARTS},
    "start": "start",
    "calls": "calls",
    "inputs": "inputs",
    "scaling": "scaling",
    "steps": "steps",
    "distributed": "distributed",
}
"""Commands that write parts of the docs, by part."""

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="draws by matplotlib"
)


def strings(path):
    """What is written in a picture, and the size of each, in pixels at page width."""
    root = ElementTree.parse(path).getroot()
    scale = pictures.WIDTH / float(root.get("viewBox").split()[2])
    found = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        size = re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", text.get("style"))
        found.append((text.text, scale * float(size[1])))
    return found


def parts_of_the_appendix():
    text = (page.DOCS / page.APPENDIX).read_text("utf-8")
    for part, command in PARTS.items():
        first, last = page.markers(command)
        yield part, text.partition(first)[2].partition(last)[0]


# What is in the docs ------------------------------------------------------------------


@pytest.mark.parametrize("part", pictures.PICTURES)
def test_pictures_are_small_and_can_be_read_at_page_width(part):
    path = page.DOCS / f"benchmarks-{part}.svg"
    assert path.stat().st_size <= 60_000
    found = strings(path)
    assert len(found) > 10
    assert min(size for _, size in found) >= 11
    shown = (page.DOCS / "benchmarks.md").read_text("utf-8")
    assert f"]({path.name})" in shown


@needs_matplotlib
@pytest.mark.parametrize("part", pictures.PICTURES)
def test_pictures_show_the_recorded_results(part, tmp_path):
    rows = page.read()[part]["rows"]
    drawn = pictures.draw(part, rows, tmp_path)
    in_docs = page.DOCS / drawn.name
    assert [one for one, _ in strings(drawn)] == [one for one, _ in strings(in_docs)]
    bytes_ = drawn.read_bytes()
    assert pictures.draw(part, rows, tmp_path).read_bytes() == bytes_


def test_the_appendix_has_the_recorded_results():
    results = page.read()
    for part, text in parts_of_the_appendix():
        assert results[part]["measured_on"] in text
        for row in results[part]["rows"]:
            cells = [
                spread(Spread(*value)) if key == "cpu_speed" else None
                for key, value in row.items()
            ]
            assert all(cell in text for cell in cells if cell)


def test_the_pages_have_the_summary_of_the_results():
    text = page.summary(page.read())
    assert text.splitlines()[0].startswith("| plain loop = 1 ")
    shown = []
    for name in page.SUMMARIES:
        said = (page.DOCS / name).read_text("utf-8")
        if page.markers("page")[0] in said:
            shown.append(name)
            assert text in said
    assert "benchmarks.md" in shown


def speed(workload, contestant="ipufit", operation="train", of="cpu_speed"):
    for part in ("peers", "networks"):
        for row in page.read()[part]["rows"]:
            name = row["workload"], row["contestant"], row["operation"]
            if name == (workload, contestant, operation):
                return row[of][0] if isinstance(row[of], list) else row[of]
    raise LookupError(workload)


def test_the_sentences_of_the_page_are_those_of_the_results():
    text = " ".join((page.DOCS / "benchmarks.md").read_text("utf-8").split())
    small, images = speed("W2"), speed("W1")
    assert small > images > 1.0  # "most where a network is so small"
    for operation in ("evaluate", "predict"):
        for contestant in ("ipufit", "ipufit-default"):
            assert speed("W1", contestant, operation=operation) > 1.5
            assert speed("W2", contestant, operation=operation) > 15
    assert "over one and a half times as fast as the plain loop's on the MNIST" in text
    assert "over fifteen times as fast on the small MLP, with nothing set, too" in text
    larger = [speed(name) for name in ("lstm", "transformer", "resnet18")]
    assert all(1.0 < one < 1.6 for one in larger)
    faster = [
        row["contestant"]
        for row in page.read()["peers"]["rows"]
        if row["operation"] == "train"
        and CONTESTANTS[row["contestant"]].package not in (None, "ipufit")
        and row["cpu_speed"][0] > 1.05
    ]
    assert faster == ["keras-compiled"]


def test_the_sentences_on_processes_are_those_of_the_results():
    text = " ".join((page.DOCS / "benchmarks.md").read_text("utf-8").split())
    speeds = {
        (row["workload"], row["processes"], row["threads"]): row["samples_per_second"]
        for row in page.read()["distributed"]["rows"]
    }
    ratios = {
        place: each["ipufit"] / each["loop"]
        for place, each in speeds.items()
        if place[1] > 1
    }
    said = f"{ratios['mlp', 2, 1]:.1f} times as fast as a tuned loop with DDP"
    assert said in text
    assert f"at worst {min(ratios.values()):.2f} times as fast" in text
    gains = {
        name: speeds[name, 2, 1]["ipufit"] / speeds[name, 1, 1]["ipufit"]
        for name in ("mlp", "cnn", "wide")
    }
    assert [name for name, gain in gains.items() if gain > 1] == ["cnn"]
    assert speeds["cnn", 1, 2]["ipufit"] > speeds["cnn", 2, 1]["ipufit"]
    assert all(
        speeds[name, 4, 1]["ipufit"] < speeds[name, 2, 1]["ipufit"] for name in gains
    )


# What --write does --------------------------------------------------------------------
