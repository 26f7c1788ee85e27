# SPDX-License-Identifier: Apache-2.0
"""Automatic stages are no less even than those of Graphcore's programs."""

from __future__ import annotations

import pytest

from benchmarks.splits import SUBJECTS, costs_of, layers, split_by_hand
from ipufit.planning.split import best_split

SMALL = [one for one in SUBJECTS if one.name != "ResNet-50"]
CASES = [
    pytest.param(one, marks=[] if not number else [pytest.mark.thorough])
    for number, one in enumerate(SMALL)
]


@pytest.mark.parametrize("subject", CASES, ids=lambda one: one.name)
def test_automatic_stages_are_no_less_even(subject):
    costs = costs_of(subject)
    by_hand = split_by_hand(costs, subject.by_hand)
    automatic = best_split(costs, len(by_hand.names))
    assert automatic.imbalance <= by_hand.imbalance
    assert sum(automatic.flops) == sum(by_hand.flops)


def test_the_tutorials_network_has_its_published_operations():
    subject = SMALL[0]
    by_hand = split_by_hand(costs_of(subject), subject.by_hand)
    assert by_hand.flops == (288_000, 640_000, 163_840, 5_120)


def test_layers_of_the_vision_transformer_are_cut_as_by_hand():
    subject = next(one for one in SMALL if one.name.startswith("ViT"))
    assert list(best_split(costs_of(subject), 4).names) == layers(3, 3, 3, 3)
