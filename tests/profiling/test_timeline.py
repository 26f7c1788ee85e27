# SPDX-License-Identifier: Apache-2.0
"""Spans nest, and the phases of a timeline add up to its length."""

from __future__ import annotations

import itertools
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.profiling import PHASES, Timeline
from tests.strategies import examples

trees = st.recursive(
    st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=20
)
ticks = st.lists(st.integers(0, 9), min_size=1, max_size=30)


def clock_of(steps):
    """A clock that goes on by so many seconds at each look, over and over."""
    return map(float, itertools.accumulate(itertools.cycle(steps))).__next__


def record(timeline, tree, phases):
    for inner in tree:
        span = timeline.begin("span", next(phases))
        record(timeline, inner, phases)
        timeline.end(span)


def recorded(tree, steps=(1,), **limits):
    timeline = Timeline(clock_of(steps), **limits)
    timeline.start("run")
    record(timeline, tree, itertools.cycle(PHASES))
    timeline.stop()
    return timeline


@settings(max_examples=examples(200))
@given(trees, ticks)
def test_phases_add_up_to_the_run_and_spans_lie_within_those_around_them(tree, steps):
    timeline = recorded(tree, steps)
    *inner, run = timeline.spans
    assert run.depth == 0
    assert run.start == 0
    assert timeline.seconds == run.seconds == sum(timeline.phases.values())
    for number, span in enumerate(inner):
        [around] = [
            other
            for other in itertools.islice(timeline.spans, number + 1, None)
            if other.depth == span.depth - 1
        ][:1]  # spans are in the order of their ends
        assert around.start <= span.start
        assert span.start + span.seconds <= around.start + around.seconds


def seconds_alone(span, spans):
    within = [
        other.seconds
        for other in spans
        if other.depth == span.depth + 1
        and span.start <= other.start
        and other.start + other.seconds <= span.start + span.seconds
    ]
    return span.seconds - sum(within)


@settings(max_examples=examples(100))
@given(trees)
def test_the_seconds_of_a_phase_are_without_those_of_inner_spans(tree):
    timeline = recorded(tree)  # no two looks at the clock are the same
    alone = dict.fromkeys(timeline.phases, 0.0)
    for span in timeline.spans:
        alone[span.phase] += seconds_alone(span, timeline.spans)
    assert alone == timeline.phases


@settings(max_examples=examples(60))
@given(trees, st.integers(0, 10))
def test_spans_that_are_not_kept_count_all_the_same(tree, most):
    whole, cut = recorded(tree), recorded(tree, most_spans=most)
    assert cut.phases == whole.phases
    assert len(cut.spans) + cut.num_left_out == len(whole.spans)
    assert cut.spans[-1] == whole.spans[-1]  # the run is always kept
    assert len(cut.spans) <= most + 1


def test_stop_ends_what_is_open_and_late_ends_do_nothing():
    timeline = Timeline(clock_of([1]))
    timeline.start("run")
    outer = timeline.begin("outer", "call")
    inner = timeline.begin("inner", "device")
    timeline.stop(reason="failed")
    timeline.end(inner)
    timeline.end(outer)
    assert [span.name for span in timeline.spans] == ["inner", "outer", "run"]
    assert timeline.spans[-1].details == {"reason": "failed"}
    timeline.start("next")
    timeline.end(outer)
    timeline.stop()
    assert [span.name for span in timeline.spans][3:] == ["next"]


def test_an_outer_end_ends_inner_spans():
    timeline = Timeline(clock_of([1]))
    timeline.start("run")
    outer = timeline.begin("outer", "call")
    timeline.begin("inner", "device")
    timeline.end(outer)
    timeline.end_named("outer")  # there is none any more
    timeline.end_named("run")  # only stop ends it
    assert timeline.is_on
    timeline.stop()
    assert [(s.name, s.depth) for s in timeline.spans] == [
        ("inner", 2),
        ("outer", 1),
        ("run", 0),
    ]


def test_nothing_is_recorded_before_the_start_or_after_the_stop():
    timeline = Timeline()
    timeline.end(timeline.begin("early", "call"))
    timeline.end_named("early")
    timeline.stop()
    assert timeline.spans == []
    timeline.start("run")
    timeline.stop()
    timeline.end(timeline.begin("late", "call"))
    assert [span.name for span in timeline.spans] == ["run"]
    timeline.forget()
    assert (timeline.spans, timeline.phases) == ([], {})


def test_other_threads_are_not_recorded():
    timeline = Timeline()
    timeline.start("run")
    span = timeline.begin("here", "call")

    def elsewhere():
        timeline.end(timeline.begin("there", "call"))
        timeline.end_named("here")
        timeline.end(span)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert timeline.spans == []
    timeline.end(span)
    timeline.stop()
    assert [one.name for one in timeline.spans] == ["here", "run"]
