# SPDX-License-Identifier: Apache-2.0
"""The split is the best of all, by trying them all."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit import ConfigError
from ipufit.planning.split import BlockCost, TooFullError, best_split, smallest_split
from tests.strategies import examples

pytestmark = pytest.mark.floor

SMALL = st.integers(0, 4)


@st.composite
def blocks(draw, most=8):
    """Blocks with small numbers, so that there are ties, and some tied weights."""
    count = draw(st.integers(1, most))
    tied = draw(st.lists(st.sampled_from("vw"), max_size=2))
    users = {
        name: {draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))}
        for name in tied
    }
    return [
        BlockCost(
            f"{draw(st.sampled_from(['', 'a.', 'a.b.']))}b{index}",
            flops=draw(SMALL),
            weights=tuple(name for name, by in users.items() if index in by),
            held_bytes=draw(SMALL) + draw(SMALL),
            output_bytes=draw(SMALL),
        )
        for index in range(count)
    ]


def all_splits(costs, stages, capacity=None, step=1):
    """Every way to cut, by trying, with all that makes one better than another."""
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = [0, *cuts, len(costs)]
        parts = [costs[i:j] for i, j in zip(bounds, bounds[1:])]
        used = [{name for cost in part for name in cost.weights} for part in parts]
        if any(a & b for a, b in itertools.combinations(used, 2)):
            continue
        held = [sum(cost.held_bytes for cost in part) for part in parts]
        if capacity is not None and max(held) > capacity:
            continue
        flops = [sum(cost.flops for cost in part) for part in parts]
        crossing = sum(costs[cut - 1].output_bytes for cut in cuts)
        depth = sum(costs[cut].name.count(".") for cut in cuts)
        yield max(flops), math.ceil(max(held) / step), crossing, depth, cuts


@settings(max_examples=examples(200), deadline=None)
@given(
    costs=blocks(),
    stages=st.integers(1, 5),
    capacity=st.one_of(st.none(), st.integers(0, 20)),
    step=st.integers(1, 4),
)
def test_no_other_split_is_better(costs, stages, capacity, step):
    expected = min(all_splits(costs, stages, capacity, step), default=None)
    if expected is None:
        with pytest.raises(ConfigError):
            best_split(costs, stages, capacity=capacity, memory_step=step)
        return
    split = best_split(costs, stages, capacity=capacity, memory_step=step)
    names = [cost.name for cost in costs]
    first, *cuts = map(names.index, split.names)
    assert first == 0
    assert (max(split.flops), sum(split.crossing_bytes)) == expected[::2][:2]
    assert math.ceil(max(split.held_bytes) / step) == expected[1]
    assert tuple(cuts) == expected[-1]
    assert sum(split.flops) == sum(cost.flops for cost in costs)


@settings(max_examples=examples(100), deadline=None)
@given(costs=blocks(), capacity=st.integers(0, 30))
def test_the_fewest_ipus_are_taken(costs, capacity):
    fitting = [n for n in (1, 2, 4, 8) if any(all_splits(costs, n, capacity))]
    if not fitting:
        with pytest.raises(TooFullError):
            smallest_split(costs, capacity)
        return
    split = smallest_split(costs, capacity)
    assert len(split.names) == fitting[0]
    assert split == best_split(costs, fitting[0], capacity)


def test_errors_say_whether_more_ipus_help():
    costs = [BlockCost("a", 1, held_bytes=3), BlockCost("b", 1, held_bytes=20)]
    with pytest.raises(TooFullError, match="'b' can't be cut, and holds 20 bytes"):
        smallest_split(costs, capacity=10)
    costs = [BlockCost("a", 1, held_bytes=8), BlockCost("b", 1, held_bytes=8)]
    with pytest.raises(TooFullError, match=r"would hold 16 bytes .* Use more IPUs"):
        best_split(costs, 1, capacity=10)


def test_a_large_model_is_split_over_many_ipus():
    costs = [
        BlockCost(str(n), (n * 7919) % 101, output_bytes=n % 7) for n in range(600)
    ]
    split = best_split(costs, 32)
    assert len(split.names) == 32
    assert split.imbalance < 1.1


# Weights that several blocks use ------------------------------------------------------


def tied(*weights):
    return [BlockCost(f"b{n}", 1, tuple(names), 1) for n, names in enumerate(weights)]


def test_a_tie_that_forbids_nothing_more_is_left_out():
    with pytest.raises(ConfigError, match="u is used by b0, 1 more and b3") as raised:
        best_split(tied("u", "uw", "w", "u"), 3)
    assert "w is used" not in str(raised.value)


def test_errors_name_the_weight_its_users_and_the_cuts():
    costs = tied("v", "w", "", "w", "w")
    with pytest.raises(ConfigError) as few:
        best_split(costs, 3)
    held = zip(costs, (1, 9, 9, 9, 9))
    costs = [cost._replace(held_bytes=count) for cost, count in held]
    with pytest.raises(TooFullError) as full:
        smallest_split(costs, capacity=20)
    for raised in (few, full):
        assert (
            "w is used by b1, 1 more and b4: no stage may begin from b2 to b4"
        ) in str(raised.value)
        assert (
            "pipeline=['b1', 'b2', poptorch.Stage('b4').ipu(0)], with a name after 'b2'"
        ) in str(raised.value)
