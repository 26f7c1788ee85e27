# SPDX-License-Identifier: Apache-2.0
"""Functions, methods and iterables are recorded, and left as they were."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from ipufit.profiling import TimedItems, Timeline, timed, timed_methods


@dataclass(frozen=True)
class Frozen:
    factor: int = 2

    def times(self, number):
        return self.factor * number


@pytest.fixture
def timeline():
    one = Timeline(map(float, itertools.count()).__next__)
    one.start("run")
    return one


def names(timeline):
    return [span.name for span in timeline.spans]


def test_a_function_that_fails_is_recorded_too(timeline):
    divide = timed(timeline, lambda x, y: x // y, "divide", "figures")
    assert divide(6, y=3) == 2
    with pytest.raises(ZeroDivisionError):
        divide(6, y=0)
    timeline.stop()
    assert names(timeline) == ["divide", "divide", "run"]
    assert divide(6, y=3) == 2
    assert names(timeline) == ["divide", "divide", "run"]


def test_methods_of_one_object_are_recorded_while_the_context_is_open(timeline):
    one, other = Frozen(), Frozen()
    with timed_methods(timeline, one, {"times": ("outer", "call")}), timed_methods(
        timeline, one, {"times": ("inner", "call")}
    ):
        assert one.times(3) == 6
        assert one.factor == 2
        assert other.times(3) == 6
    assert names(timeline) == ["outer", "inner"]  # the last context is around
    assert vars(one) == vars(other)
    assert one.times(3) == 6
    assert len(timeline.spans) == 2


def test_methods_are_as_before_after_an_error(timeline):
    one = Frozen()
    with pytest.raises(KeyError), timed_methods(
        timeline, one, {"times": ("times", "call")}
    ):
        raise KeyError
    assert "times" not in vars(one)


class Batches:
    num_calls = 3
    flag = False

    def __iter__(self):
        yield from range(self.num_calls)


def test_waits_for_items_are_recorded_and_the_rest_is_the_iterables_own(timeline):
    batches = Batches()
    items = TimedItems(timeline, batches, "batch", "host data")
    assert items.num_calls == 3
    items.flag = True
    assert batches.flag
    assert list(items) == list(items) == [0, 1, 2]
    assert timeline.spans[0].seconds == 1.0
    assert names(timeline) == ["batch"] * 8  # with the waits for the ends
    for item in items:
        if item == 1:
            break
    timeline.stop()
    assert names(timeline)[8:] == ["batch", "batch", "run"]


def test_an_iterable_that_fails_is_recorded_too(timeline):
    def failing():
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(TimedItems(timeline, failing(), "batch", "host data"))
    assert names(timeline) == ["batch", "batch"]
