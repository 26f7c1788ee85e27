# SPDX-License-Identifier: Apache-2.0
"""Areas under curves against scikit-learn and against integration by numbers."""

from functools import partial

import pytest
import sklearn.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipufit.errors import ConfigError, DataError
from ipufit.metrics.ranking import AUC, AveragePrecision, ExactAUC
from tests.metrics import peers
from tests.metrics.harness import (
    COUNT,
    Case,
    check,
    check_device,
    figure,
    generator,
    labels,
    probabilities,
    sample_weights,
    scores,
)


def of_labels(metric, **settings):
    """The mean over labels, or the metric of a single column."""
    return peers.of_columns(peers.by_column(partial(metric, **settings)))


exact = of_labels(peers.exact_area)
micro = peers.of_columns(peers.by_column(peers.area), width=1)
of_probabilities = peers.of_columns(peers.BITS["auc"], to=torch.logit)

TRUTHS, LABELS = labels(3).gt(1), labels(2, 3, num_classes=2)
PR = partial(AUC, curve="PR")
CASES = [
    Case("micro AUC", partial(AUC, average="micro"), scores(1, 3), LABELS, micro),
    Case(
        "weighted AP",
        partial(AveragePrecision, average="weighted"),
        scores(1, 3),
        LABELS,
        lambda x, y, w: sklearn.metrics.average_precision_score(
            y.numpy(), x.numpy(), sample_weight=w.numpy(), average="weighted"
        ),
    ),
    Case(
        "AUC of pairs",
        partial(AUC, from_logits=False),
        probabilities(1, 2),
        TRUTHS.long(),
        lambda x, y, w: of_probabilities(x[:, 1], y, w),
    ),
    Case(
        "AUC of probabilities",
        partial(AUC, from_logits=False),
        probabilities(4),
        TRUTHS.float(),
        of_probabilities,
    ),
    Case(
        "AUC of 7",
        partial(AUC, 7),
        scores(5),
        TRUTHS,
        of_labels(peers.area, num_thresholds=7),
    ),
    Case("AUC of 2", partial(AUC, 2), scores(5), TRUTHS, lambda x, y, w: 0.5),
    Case(
        "PR of 9",
        partial(AUC, 9, "pr"),
        scores(6, 1),
        TRUTHS.int(),
        of_labels(peers.precision_recall, num_thresholds=9),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_area_with_settings_is_the_references(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES)


def not_told_apart(probability, truths, weights, num_thresholds):
    """Share of pairs, a 1 and a 0, that may lie between the same two thresholds."""
    probability, weights = probability.double(), weights.double()
    gaps = (probability[truths, None] - probability[None, ~truths]).abs()
    pairs = weights[truths, None] * weights[None, ~truths]
    # A little wider, as thresholds are rounded. The area knows equal scores for equal.
    is_close = gaps.gt(0) & gaps.le(1 / (num_thresholds - 1) + 1e-6)
    return float(pairs[is_close].sum() / pairs.sum())


@given(
    seed=st.integers(0, 2**16),
    is_rounded=st.booleans(),
    num_thresholds=st.integers(2, 50) | st.integers(1000, 20001),
)
def test_the_area_misses_the_exact_one_by_pairs_not_told_apart(
    seed, is_rounded, num_thresholds
):
    """Such a pair counts 1/2 instead of 0 or 1, and every other pair as it should."""
    given = torch.rand(COUNT, generator=generator(seed))
    given = given.mul(8).round().div(8) if is_rounded else given
    weights = sample_weights()
    true = exact(given, TRUTHS, weights)
    assert figure(ExactAUC(), given, TRUTHS, weights) == pytest.approx(true)
    area = figure(AUC(num_thresholds, from_logits=False), given, TRUTHS, weights)
    share = not_told_apart(given, TRUTHS, weights, num_thresholds)
    assert abs(area - true) <= share / 2 + 1e-5


@pytest.mark.parametrize("make", [AUC, PR, ExactAUC])
@pytest.mark.parametrize("truth", [0, 1])
def test_without_both_0s_and_1s_there_is_no_area(make, truth):
    result = figure(make(), scores(0), torch.full((COUNT,), truth))
    assert result != result


@pytest.mark.parametrize("truth", [0, 1])
def test_average_precision_of_one_class_is_scikit_learns(truth):
    result = figure(AveragePrecision(), scores(0), torch.full((COUNT,), truth))
    assert result == truth


@pytest.mark.parametrize("make", [AUC, PR, ExactAUC, AveragePrecision])
@pytest.mark.parametrize("truths", [TRUTHS, LABELS])
def test_scores_that_are_no_numbers_have_no_rank(make, truths):
    given = scores(0, *truths.shape[1:])
    given[3] = float("nan")
    result = figure(make(), given, truths)
    assert result != result


def test_two_classes_may_be_on_axis_1():
    given, truths = scores(0, 2, 3), labels(1, 3, num_classes=2)
    margins = (given[:, 1] - given[:, 0]).reshape(-1)
    for make in (AUC, ExactAUC):
        found = figure(make(), given, truths)
        assert found == figure(make(), margins, truths.reshape(-1))


def test_several_classes_on_axis_1_are_refused():
    with pytest.raises(DataError, match="scores of 5 classes"):
        AUC().sums(scores(0, 5, 2), labels(1, 2))


def test_several_classes_by_index_are_refused():
    with pytest.raises(DataError, match="don't fit"):
        AUC().sums(scores(0, 4), labels(1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_thresholds": 1},
        {"num_thresholds": True},
        {"curve": "DET"},
        {"summation_method": "simpson"},
        {"thresholds": [0.5, 2]},
        {"thresholds": -1},
        {"thresholds": []},
        {"label_weights": 2.0},
        {"label_weights": [1.0, -1.0]},
        {"label_weights": [1.0, 2.0], "average": "weighted"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match="AUC"):
        AUC(**wrong)
