# SPDX-License-Identifier: Apache-2.0
"""Files of recordings: a trace that parses, a page that needs nothing else."""

from __future__ import annotations

import itertools
import json
import os
import re
from html.parser import HTMLParser

import pytest

from ipufit.errors import FileError
from ipufit.profiling import PHASES, Recorder
from ipufit.profiling.report import text_of

SECONDS = 2.0 * len(PHASES) + 3
"""Length of what `record` records: the clock ticks at both ends of each span."""


def record(recorder, index=0, count=1, **details):
    recorder.start("fit")
    timeline = recorder.timeline
    outer = timeline.begin("call </script>", "call", {"first update": 3})
    for phase in PHASES:
        timeline.end(timeline.begin(f"{phase} & <b>", phase))
    timeline.end(outer)
    recorder.stop(index, count, {"module": "<Network>"}, **details)
    return recorder.paths


@pytest.fixture
def recorder(tmp_path):
    return Recorder(
        tmp_path / "deep" / "profile", map(float, itertools.count()).__next__
    )


def test_a_trace_has_complete_events_that_nest_in_microseconds(recorder):
    trace, _ = record(recorder, ended_by="KeyError")
    content = json.loads(trace.read_text())
    named, events = content["traceEvents"][:2], content["traceEvents"][2:]
    assert [event["ph"] for event in named] == ["M", "M"]
    assert {event["args"]["name"] for event in named} == {
        "ipufit process 0 of 1",
        "host",
    }
    assert {event["pid"] for event in content["traceEvents"]} == {os.getpid()}
    assert len({event["tid"] for event in content["traceEvents"]}) == 1
    assert {event["ph"] for event in events} == {"X"}
    assert {event["cat"] for event in events} == set(PHASES)
    run, *inner, call = events  # in the order of their ends, but the run
    assert call["name"] == "call </script>"
    assert run == {
        **{"name": "fit", "cat": "loop", "ph": "X", "pid": os.getpid(), "tid": 1},
        **{"ts": 0.0, "dur": SECONDS * 1e6, "args": {"ended_by": "KeyError"}},
    }
    assert call["args"] == {"first update": 3}
    for event in inner:
        assert event["dur"] == 1e6
        assert call["ts"] < event["ts"]
        assert event["ts"] + event["dur"] < call["ts"] + call["dur"]
    assert [event["ts"] for event in inner] == sorted(event["ts"] for event in inner)
    facts = content["otherData"]
    assert facts["module"] == "<Network>"
    assert sum(facts["seconds_by_phase"].values()) == SECONDS


class Reader(HTMLParser):
    """Collects tags and the text outside scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_is_whole_by_itself(recorder):
    _, path = record(recorder)
    text = path.read_text()
    assert not re.search(r"https?:|//\w|url\(|@import|\bsrc=|\bhref=|fetch\(", text)
    reader = Reader()
    reader.feed(text)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 1  # no name ends it
    assert "canvas" in tags
    assert "module: <Network>" in reader.text
    [script] = re.findall(r"<script>const DATA = (.*?);\n", text)
    data = json.loads(script)
    assert "call </script>" in data["names"]
    assert len(data["spans"]) == len(PHASES) + 2
    [run] = [row for row in data["spans"] if row[4] == 0]
    assert run[2:] == [0.0, SECONDS * 1e6, 0, None]
    assert data["names"][run[0]] == "fit"
    for phase in PHASES:
        assert phase in reader.text


def test_each_recording_has_files_of_its_own(recorder):
    assert [path.name for path in record(recorder)] == [
        "fit-001.trace.json",
        "fit-001.html",
    ]
    first = recorder.paths[0].read_text()
    assert record(recorder)[0].name == "fit-002.trace.json"
    again = Recorder(recorder.directory)
    assert record(again)[0].name == "fit-003.trace.json"
    assert (recorder.directory / "fit-001.trace.json").read_text() == first
    assert len(list(recorder.directory.iterdir())) == 6


def test_each_process_has_files_of_its_own(recorder):
    for index in range(2):
        trace, page = record(recorder, index, 2)
        assert trace.name == f"fit-001.process-{index}.trace.json"
        assert page.name == f"fit-001.process-{index}.html"
        assert f"process {index} of 2" in page.read_text()


def test_a_recording_that_was_not_begun_writes_nothing(recorder):
    recorder.stop(0, 1, {})
    assert not recorder.directory.exists()


def test_a_directory_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="can't be made for profiles"):
        Recorder(tmp_path / "file" / "profile").make_directory()


def test_text_has_a_line_for_each_phase():
    lines = text_of("fit-001", {"device": 1.5, "loop": 0.5, "own": 2.0}).split("\n")
    assert lines[0] == "fit-001: 4.000 s"
    assert [line.split()[0] for line in lines[1:]] == ["device", "loop", "own"]
    assert "37.5%" in lines[1]
