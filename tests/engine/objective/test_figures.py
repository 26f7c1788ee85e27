# SPDX-License-Identifier: Apache-2.0
"""Figures: exact sums, names, orders."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit import ConfigError
from ipufit.data.structure import Labels
from ipufit.engine import Figures
from ipufit.engine.metric_state import vector_of
from ipufit.engine.objective import resolve_objective
from tests import reference


def figures(*arguments):
    return Figures(resolve_objective(*arguments))


def vector(mine, outputs, targets, scalars=None, **known):
    known = Labels(targets, **known)
    terms = mine.objective.loss_terms(outputs, known, len(outputs))
    values, entries = vector_of(
        mine.objective, outputs, known, len(outputs), terms, scalars or {}
    )
    mine.adopt(entries)
    return values


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_any_division_into_batches_gives_the_same(sizes, at_once):
    x, y = reference.samples(sum(sizes))
    outputs = reference.network()(x).detach()
    mine = figures("cross_entropy", None, ["accuracy"])
    vectors = [vector(mine, o, t) for o, t in zip(outputs.split(sizes), y.split(sizes))]
    if at_once:
        mine.add(torch.cat(vectors))
    else:
        for each in vectors:
            mine.add(each)
    assert mine.samples == sum(sizes)
    expected = reference.evaluate(reference.network(), x, y)
    assert mine.logs() == pytest.approx(expected, rel=1e-5)


@given(st.data())
def test_sums_have_the_same_bits_in_any_division_into_calls(data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    outputs = torch.randn(sum(sizes), 1, generator=generator).exp()
    one, other = figures("mse", None, ["mae"]), figures("mse", None, ["mae"])
    vectors = [vector(one, o, torch.zeros(1, 1)) for o in outputs.split(1)]
    vector(other, outputs[:1], torch.zeros(1, 1))  # for its entries
    for each in vectors:
        one.add(each)
    at = 0
    for size in sizes:
        other.add(torch.cat(vectors[at : at + size]))
        at += size
    assert one.logs() == other.logs()
    assert torch.equal(one.sums().vector, other.sums().vector)


def test_the_loss_after_each_part_of_a_call_is_known():
    mine = figures("mse", None, None)
    one = vector(mine, torch.ones(1, 1), torch.zeros(1, 1))
    bad = vector(mine, torch.full((1, 1), math.inf), torch.zeros(1, 1))
    mine.add(torch.cat([one, one, bad, one]))
    assert mine.losses(4) == [1.0, 1.0, math.inf, math.inf]
    assert mine.losses(2) == [1.0, math.inf]
    assert mine.losses(3) == [math.inf]  # three parts there aren't
    mine.add(one)
    assert mine.losses(1) == [math.inf]


def test_padding_does_not_count():
    x, y = reference.samples(6)
    outputs = reference.network()(x).detach()
    mine = figures("cross_entropy", None, ["accuracy"])
    share = torch.tensor([1.5, 1.5, 1.5, 1.5, 0.0, 0.0])
    mine.add(vector(mine, outputs, y, share=share))
    assert mine.samples == 4
    expected = reference.evaluate(reference.network(), x[:4], y[:4])
    assert mine.logs() == pytest.approx(expected, rel=1e-5)


def test_sums_are_kept_exactly_over_many_calls():
    mine = figures("mse", None, None)
    one = vector(mine, torch.ones(1, 1), torch.zeros(1, 1))
    mine.add(one.mul(2.0**24))  # where float32 can't count any more
    for _ in range(3):
        mine.add(one)
    assert mine.samples == 2**24 + 3


def test_before_anything_was_counted_there_is_nothing():
    mine = figures("mse", None, ["mae"])
    assert mine.logs() == {}
    assert mine.samples == 0
    mine.add(torch.zeros_like(vector(mine, torch.ones(1, 1), torch.zeros(1, 1))))
    assert all(math.isnan(value) for value in mine.logs().values())


def test_a_reset_forgets():
    mine = figures("mse", None, None)
    mine.add(vector(mine, torch.ones(1, 1), torch.zeros(1, 1)))
    mine.add_means({"other": 3.0}, 1)
    assert mine.logs() == {"loss": 1.0, "other": 3.0}
    mine.reset()
    assert mine.logs() == {}


def test_logs_are_in_the_alphabet_and_lists_in_the_order_given():
    mine = figures("mse", None, ["mse", "mae"])
    scalars = {"b": torch.tensor(2.0), "a": torch.tensor(1.0)}
    mine.add(vector(mine, torch.ones(1, 1), torch.zeros(1, 1), scalars))
    assert list(mine.logs()) == ["a", "b", "loss", "mae", "mse"]
    assert list(mine.in_order()) == ["loss", "mse", "mae", "b", "a"]


def test_figures_know_which_way_is_better():
    mine = figures("cross_entropy", None, ["accuracy"])
    x, y = reference.samples(3)
    outputs = reference.network()(x)
    mine.add(vector(mine, outputs, y, {"size": torch.tensor(1.0)}))
    assert mine.directions == {"loss": "min", "accuracy": "max"}


@pytest.mark.parametrize("name", ["loss", "mae"])
def test_two_figures_of_one_name_are_refused(name):
    mine = figures("mse", None, ["mae"])
    with pytest.raises(ConfigError, match=f"Two figures are called '{name}'"):
        vector(mine, torch.ones(1, 1), torch.ones(1, 1), {name: torch.tensor(1.0)})
