# SPDX-License-Identifier: Apache-2.0
"""Hinge losses against scikit-learn."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import sklearn.metrics
import torch

from ipufit.errors import DataError
from ipufit.metrics import CategoricalHinge, resolve_metric
from tests.metrics.harness import Case, check, figure, labels, one_hot, scores, spread


def single(outputs, targets, weights):
    return sklearn.metrics.hinge_loss(
        targets.reshape(-1) > 0, outputs.reshape(-1), sample_weight=weights.numpy()
    )


def squared(outputs, targets, weights):
    sides = np.where(targets.reshape(-1) > 0, 1.0, -1.0)
    values = np.maximum(0, 1 - sides * outputs.reshape(-1).numpy()) ** 2
    return np.average(values, weights=weights)


def several(outputs, targets, weights):
    if targets.shape == outputs.shape:
        targets = targets.argmax(-1)
    return sklearn.metrics.hinge_loss(
        targets.reshape(-1),
        outputs.reshape(-1, outputs.shape[-1]),
        labels=range(outputs.shape[-1]),
        sample_weight=spread(weights, targets.reshape(outputs.shape[:-1])),
    )


TRUTHS = labels(1, num_classes=2)
CASES = [
    *(
        Case(name, partial(resolve_metric, name), outputs, targets, reference)
        for name, reference in [("hinge", single), ("squared_hinge", squared)]
        for outputs, targets in [
            (scores(0), TRUTHS),
            (scores(0, 1), 2.0 * TRUTHS - 1.0),
        ]
    ),
    *(
        Case("categorical_hinge", CategoricalHinge, outputs, targets, several)
        for outputs, targets in [
            (scores(2, 4), labels(3)),
            (scores(2, 4) - 3.0, labels(3, 1)),
            (scores(2, 4), one_hot(labels(3))),
            (scores(2, 5, 4), labels(3, 5)),
        ]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_hinge_is_scikit_learns(case):
    check(case)


def test_a_class_that_is_ruled_out_is_no_rival():
    outputs = torch.tensor([[1.0, float("-inf"), 0.5]])
    assert figure(CategoricalHinge(), outputs, torch.tensor([0])) == 0.5


def test_a_target_of_minus_100_does_not_count():
    outputs, targets = torch.tensor([[0.0, 1.0], [9.0, 0.0]]), torch.tensor([0, -100])
    assert CategoricalHinge().sums(outputs, targets).tolist() == [2.0, 1.0]


def test_scores_of_classes_need_classes():
    with pytest.raises(DataError, match=r"\(4, 1\)"):
        CategoricalHinge().sums(torch.zeros(4, 1), torch.zeros(4))
