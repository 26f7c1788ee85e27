# SPDX-License-Identifier: Apache-2.0
"""Ties name each cut that a shared weight forbids, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError
from ipufit.planning import BlockCost
from ipufit.planning.split import TooFullError, best_split, smallest_split
from ipufit.planning.ties import about_ties, ties_of


def blocks(*weights):
    return [BlockCost(f"b{n}", 1, tuple(names), 1) for n, names in enumerate(weights)]


@given(st.lists(st.sets(st.sampled_from("uvwx")), min_size=1, max_size=9))
def test_each_cut_through_a_shared_weight_is_forbidden(weights):
    ties = ties_of(blocks(*weights))
    forbidden = {
        f"b{cut}"
        for cut in range(1, len(weights))
        if set().union(*weights[:cut]) & set().union(*weights[cut:])
    }
    assert {name for tie in ties for name in tie.forbidden} == forbidden
    assert [len(tie.forbidden) for tie in ties] == sorted(
        (len(tie.forbidden) for tie in ties), reverse=True
    )
    for tie in ties:
        users = [f"b{n}" for n, names in enumerate(weights) if tie.weight in names]
        assert list(tie.users) == users
        begin, last = (int(name[1:]) for name in (users[0], users[-1]))
        assert list(tie.forbidden) == [f"b{n}" for n in range(begin + 1, last + 1)]


def test_a_tie_that_forbids_nothing_more_is_left_out():
    assert [tie.weight for tie in ties_of(blocks("u", "uw", "w", "u"))] == ["u"]


def test_errors_name_the_weight_its_users_and_the_cuts():
    costs = blocks("v", "w", "", "w", "w")
    with pytest.raises(ConfigError) as few:
        best_split(costs, 3)
    with pytest.raises(TooFullError) as full:
        smallest_split(costs, [1, 9, 9, 9, 9], capacity=20)
    for raised in (few, full):
        assert (
            "w is used by b1, 1 more and b4: no stage may begin from b2 to b4"
        ) in str(raised.value)
        assert (
            "pipeline=['b1', 'b2', poptorch.Stage('b4').ipu(0)], with a name after 'b2'"
        ) in str(raised.value)


def test_many_ties_are_summed_up():
    words = about_ties(blocks("u", "uv", "vw", "wx", "x"))
    assert "at b1; v is used by b1 and b2: no stage may begin at b2; 2 more" in words
    assert "Stage" not in words


def test_without_ties_nothing_is_said_of_them():
    with pytest.raises(ConfigError) as raised:
        best_split(blocks("u", "v"), 3)
    assert str(raised.value).endswith("pipeline=(...).")
    assert "weight" not in str(raised.value)
