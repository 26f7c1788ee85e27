# SPDX-License-Identifier: Apache-2.0
"""Setting the rates of parameter groups."""

from __future__ import annotations

import pytest

from ipufit.callbacks.learning_rate import learning_rate, set_learning_rate
from tests.callbacks.driving import ScriptedModel


def test_the_first_group_has_the_learning_rate():
    assert learning_rate(ScriptedModel(rates=(0.5, 0.1)).optimizer) == 0.5


def test_the_others_keep_their_ratio_as_it_is_now():
    model = ScriptedModel(rates=(0.5, 1.0))
    ratios = set_learning_rate(model.optimizer, 0.25)
    assert model.rates == [0.25, 0.5]
    model.optimizer.param_groups[1]["lr"] = 0.25
    assert set_learning_rate(model.optimizer, 1.0, ratios) == [1.0, 1.0]
    assert model.rates == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ratios", "expected"), [([1.0, 3.0], [0.5, 1.5]), ([], [0.5, 0.5])]
)
def test_a_rate_of_zero_tells_no_ratio(ratios, expected):
    model = ScriptedModel(rates=(0.0, 0.0))
    set_learning_rate(model.optimizer, 0.5, ratios)
    assert model.rates == expected


def test_ratios_of_another_optimizer_are_not_taken():
    model = ScriptedModel(rates=(0.0, 0.0))
    set_learning_rate(model.optimizer, 0.5, [1.0, 2.0, 3.0])
    assert model.rates == [0.5, 0.5]
