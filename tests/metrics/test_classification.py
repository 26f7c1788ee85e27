# SPDX-License-Identifier: Apache-2.0
"""Accuracies against scikit-learn."""

from functools import partial

import pytest
import torch

from ipufit.errors import ConfigError, DataError
from ipufit.metrics.classification import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKAccuracy,
    TopKCategoricalAccuracy,
)
from tests.metrics import peers
from tests.metrics.harness import (
    Case,
    check,
    check_device,
    figure,
    labels,
    one_hot,
    probabilities,
    scores,
)

pytestmark = pytest.mark.floor


accuracy = peers.of_classes(peers.CLASSES["accuracy"])


def binary(threshold):
    above = {"to": lambda outputs: outputs.double() - threshold}
    return peers.of_columns(peers.BITS["accuracy"], width=1, **above)


def top(k):
    return peers.of_classes(peers.top(k))


LABELS, TRUTHS = labels(1), labels(3).gt(1)
MANY = labels(4, num_classes=9)

CASES = [
    Case(
        "accuracy of probabilities",
        partial(Accuracy, from_logits=False),
        probabilities(0),
        TRUTHS.float(),
        binary(0.5),
    ),
    Case(
        "binary at 0.3",
        partial(BinaryAccuracy, 0.3, from_logits=False),
        probabilities(9, 1),
        TRUTHS.float(),
        binary(0.3),
    ),
    Case(
        "binary at logit of 0.3",
        partial(BinaryAccuracy, 0.3),
        probabilities(9, 1).logit(),
        TRUTHS.float(),
        peers.of_columns(peers.BITS["accuracy"], to=lambda x: x.sigmoid() - 0.3),
    ),
    Case("top 2", partial(TopKAccuracy, 2), scores(10, 9), MANY, top(2)),
    Case(
        "top 2 of one-hot",
        partial(TopKAccuracy, 2),
        scores(10, 9),
        one_hot(MANY, 9),
        top(2),
    ),
    Case(
        "sparse top 3",
        partial(SparseTopKCategoricalAccuracy, 3),
        scores(11, 9),
        MANY,
        top(3),
    ),
    Case(
        "categorical top 3",
        partial(TopKCategoricalAccuracy, 3),
        scores(11, 9),
        one_hot(MANY, 9),
        top(3),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_accuracy_with_settings_is_scikit_learns(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES)


@pytest.mark.parametrize(("k", "found"), [(1, 1), (3, 3), (9, 4)])
def test_equal_scores_rank_in_order_of_the_classes(k, found):
    """A model that tells nothing apart isn't right about everything."""
    sums = TopKAccuracy(k).sums(torch.zeros(4, 4), torch.arange(4))
    assert sums.tolist() == [found, 4]


def test_scores_that_are_no_numbers_are_never_right():
    scores_of_nothing = torch.full((4, 4), float("nan"))
    assert TopKAccuracy(3).sums(scores_of_nothing, torch.arange(4)).tolist() == [0, 4]


BAD = {
    "no indices": (Accuracy, scores(0, 4), labels(1, 2)),
    "other rows": (Accuracy, scores(0, 4), LABELS[:3]),
    "indices for one-hot": (CategoricalAccuracy, scores(0, 4), LABELS, "sparse_"),
    "one-hot for indices": (SparseCategoricalAccuracy, scores(0, 4), one_hot(LABELS)),
    "indices for one-hot top": (TopKCategoricalAccuracy, scores(0, 4), LABELS),
    "one-hot for top": (SparseTopKCategoricalAccuracy, scores(0, 4), one_hot(LABELS)),
    "other binary": (BinaryAccuracy, scores(0, 2), TRUTHS),
    "one class": (TopKAccuracy, scores(0, 1), TRUTHS),
    "two axes of classes": (
        Accuracy,
        scores(0, 5, 5),
        labels(2, 5),
        "as many classes as positions",
    ),
    "several outputs": (Accuracy, [scores(0, 4), scores(1, 4)], LABELS),
    "several targets": (Accuracy, scores(0, 4), {"a": LABELS}),
}


@pytest.mark.parametrize("name", BAD)
def test_shapes_that_do_not_fit_are_refused(name):
    make, outputs, targets, *words = BAD[name]
    with pytest.raises(DataError, match="".join(words) or None):
        make().sums(outputs, targets)


def test_an_axis_of_size_1_says_where_the_classes_are():
    outputs, targets = scores(0, 5, 5), labels(2, 5, num_classes=5)
    last = figure(Accuracy(), outputs.unsqueeze(-2), targets.unsqueeze(-1))
    assert last == pytest.approx(accuracy(outputs, targets, torch.ones(37)))


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(DataError, match="Sample weights of shape"):
        Accuracy().sums(scores(0, 4), LABELS, torch.ones(3))


@pytest.mark.parametrize("k", [0, 2.0, True])
def test_k_is_a_number_from_1(k):
    with pytest.raises(ConfigError, match="use a whole number of 1 or more"):
        TopKAccuracy(k)


@pytest.mark.parametrize("threshold", [0, 1, "a", True])
def test_a_threshold_is_a_probability(threshold):
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        BinaryAccuracy(threshold)


def test_a_top_k_accuracy_is_called_by_its_k():
    assert TopKAccuracy(3).name == "top_3_accuracy"
    assert SparseTopKCategoricalAccuracy(3).name == "sparse_top_k_categorical_accuracy"
