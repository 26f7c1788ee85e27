# SPDX-License-Identifier: Apache-2.0
"""Precision, recall and their like against scikit-learn."""

import warnings
from functools import partial

import numpy as np
import pytest
import sklearn.metrics
import torch

from ipufit.errors import ConfigError, DataError
from ipufit.metrics.confusion import (
    BalancedAccuracy,
    F1Score,
    FalseNegatives,
    FalsePositives,
    FBetaScore,
    IoU,
    MeanIoU,
    Precision,
    Recall,
    Specificity,
    TrueNegatives,
    TruePositives,
)
from tests.metrics.harness import (
    COUNT,
    Case,
    check,
    check_device,
    figure,
    labels,
    one_hot,
    probabilities,
    scores,
    spread,
)


def predicted(outputs, targets):
    """Predicted and true classes, flat."""
    if outputs.dim() == 1 or outputs.shape[-1] == 1:
        return (outputs > 0).int().reshape(-1), (targets > 0.5).int().reshape(-1)
    if targets.shape == outputs.shape:
        targets = targets.argmax(-1)
    return outputs.argmax(-1).reshape(-1), targets.reshape(-1)


def weights_of(outputs, weights):
    binary = outputs.dim() == 1 or outputs.shape[-1] == 1
    return spread(weights, outputs if binary else outputs[..., 0])


def by(score, average="macro", **settings):
    """Scikit-learn's `score` of what is predicted."""

    def reference(outputs, targets, weights):
        guess, true = predicted(outputs, targets)
        binary = outputs.dim() == 1 or outputs.shape[-1] == 1
        return score(
            true,
            guess,
            average="binary" if binary else average,
            sample_weight=weights_of(outputs, weights),
            zero_division=0,
            **settings,
        )

    return reference


def several(score, average):
    """Scikit-learn's `score` of labels that are each 0 or 1."""

    def reference(outputs, targets, weights):
        return score(
            targets.numpy() > 0.5,
            outputs.numpy() > 0,
            average=average,
            sample_weight=weights.numpy(),
            zero_division=0,
        )

    return reference


def cell(pick):
    """A function of scikit-learn's confusion matrix of each class."""

    def reference(outputs, targets, weights):
        guess, true = predicted(outputs, targets)
        binary = outputs.dim() == 1 or outputs.shape[-1] == 1
        matrices = sklearn.metrics.multilabel_confusion_matrix(
            true,
            guess,
            sample_weight=weights_of(outputs, weights),
            labels=[1] if binary else range(outputs.shape[-1]),
        )
        return pick(
            tp=matrices[:, 1, 1],
            fp=matrices[:, 0, 1],
            fn=matrices[:, 1, 0],
            tn=matrices[:, 0, 0],
        )

    return reference


def balanced(outputs, targets, weights):
    guess, true = predicted(outputs, targets)
    weights = weights_of(outputs, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are predicted and never true
        return sklearn.metrics.balanced_accuracy_score(
            true[weights > 0], guess[weights > 0], sample_weight=weights[weights > 0]
        )


def overlap(outputs, targets, weights):
    """Over the classes there are, of rows that count."""
    guess, true = predicted(outputs, targets)
    weights = weights_of(outputs, weights)
    return sklearn.metrics.jaccard_score(
        true[weights > 0],
        guess[weights > 0],
        average="macro",
        sample_weight=weights[weights > 0],
    )


precision = sklearn.metrics.precision_score
recall = sklearn.metrics.recall_score
f1 = sklearn.metrics.f1_score
jaccard = sklearn.metrics.jaccard_score

LABELS, TRUTHS = labels(1), labels(3).gt(1)
POSITIONS = labels(2, 5)
FEW = labels(4, num_classes=2)  # of four classes two never occur
MARKS = labels(5, 3, num_classes=2)

CASES = [
    *(
        Case(f"{make.__name__} {average}", partial(make, average=average), *data, ref)
        for make, score in ((Precision, precision), (Recall, recall), (F1Score, f1))
        for average in ("macro", "micro", "weighted")
        for data, ref in [((scores(0, 4), LABELS), by(score, average))]
    ),
    *(
        Case(make.__name__, make, *data, by(score))
        for make, score in (
            (Precision, precision),
            (Recall, recall),
            (F1Score, f1),
            (IoU, jaccard),
        )
        for data in (
            (scores(1, 1), TRUTHS.float()),
            (scores(2), TRUTHS.long()),
            (scores(3, 4), one_hot(LABELS)),
            (scores(4, 5, 4), POSITIONS),
            (scores(5, 2), labels(6, num_classes=2).unsqueeze(1)),
        )
    ),
    Case(
        "F2",
        partial(FBetaScore, beta=2.0),
        scores(6, 4),
        LABELS,
        by(sklearn.metrics.fbeta_score, beta=2.0),
    ),
    Case(
        "precision of class 2",
        partial(Precision, class_id=2),
        scores(7, 4),
        LABELS,
        cell(lambda tp, fp, fn, tn: tp[2] / (tp[2] + fp[2])),
    ),
    Case(
        "specificity",
        Specificity,
        scores(8),
        TRUTHS,
        cell(lambda tp, fp, fn, tn: tn[0] / (tn[0] + fp[0])),
    ),
    Case(
        "specificity",
        Specificity,
        scores(8, 4),
        LABELS,
        cell(lambda tp, fp, fn, tn: np.mean(tn / (tn + fp))),
    ),
    *(
        Case(make.__name__, make, *data, cell(pick))
        for make, pick in (
            (TruePositives, lambda tp, fp, fn, tn: tp.sum()),
            (FalsePositives, lambda tp, fp, fn, tn: fp.sum()),
            (FalseNegatives, lambda tp, fp, fn, tn: fn.sum()),
            (TrueNegatives, lambda tp, fp, fn, tn: tn.sum()),
        )
        for data in ((scores(9, 1), TRUTHS.float()), (scores(9, 4), LABELS))
    ),
    Case("balanced", BalancedAccuracy, scores(10), TRUTHS.float(), balanced),
    Case("balanced", BalancedAccuracy, scores(10, 4), LABELS, balanced),
    Case("balanced of few", BalancedAccuracy, scores(10, 4), FEW, balanced),
    Case("mean IoU", MeanIoU, scores(11, 4), LABELS, overlap),
    Case("mean IoU", partial(MeanIoU, 4), scores(11, 5, 4), POSITIONS, overlap),
    Case("mean IoU", partial(MeanIoU, 2), scores(11), TRUTHS, overlap),
    *(
        Case(
            f"{make.__name__} of labels, {average}",
            partial(make, average=average, multi_label=True),
            scores(12, 3),
            MARKS,
            several(score, average),
        )
        for make, score in ((Precision, precision), (Recall, recall), (F1Score, f1))
        for average in ("macro", "micro", "weighted")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_score_is_scikit_learns(case):
    check(case)


def test_devices_compute_it():
    check_device(CASES[::2])


@pytest.mark.parametrize(
    ("make", "score", "average"),
    [
        (Precision, precision, "macro"),
        (Recall, recall, "micro"),
        (F1Score, f1, "weighted"),
    ],
)
def test_classes_that_do_not_occur_are_no_part_of_an_average(make, score, average):
    outputs = scores(13, 6)
    outputs[:, 3:] = -9.0
    actual = figure(make(average=average), outputs, FEW)
    assert actual == pytest.approx(by(score, average)(outputs, FEW, torch.ones(COUNT)))


def test_probabilities_have_a_threshold():
    given = probabilities(14, 1)
    metric = Precision(0.7, from_logits=False)
    expected = precision(TRUTHS, given.reshape(-1) > 0.7)
    assert figure(metric, given, TRUTHS) == pytest.approx(expected)
    logits = figure(Precision(0.7), given.logit(), TRUTHS)
    assert logits == pytest.approx(expected)


@pytest.mark.parametrize("make", [Precision, Recall, F1Score, Specificity, IoU])
def test_what_is_divided_by_0_is_0_and_nothing_is_nan(make):
    empty = figure(make(), torch.full((4,), -1.0), torch.zeros(4))
    assert empty == (1.0 if make is Specificity else 0.0)
    nothing = make().result(torch.zeros(4, dtype=torch.float64))
    assert nothing != nothing
    assert make().direction == "max"


BAD_SETTINGS = {
    "an average that none knows": lambda: Precision(average="samples"),
    "no average": lambda: F1Score(average=None),
    "a threshold of 1": lambda: Recall(1.0),
    "beta of 0": lambda: FBetaScore(beta=0),
    "a negative class": lambda: Precision(class_id=-1),
    "a class by name": lambda: Precision(class_id="cat"),
    "one class": lambda: MeanIoU(1),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_mean_nothing_are_refused(name):
    with pytest.raises(ConfigError):
        BAD_SETTINGS[name]()


def test_another_number_of_classes_is_refused():
    with pytest.raises(DataError, match="scores of 4 classes"):
        MeanIoU(3).sums(scores(0, 4), LABELS)
    with pytest.raises(DataError, match="of 4 classes"):
        Precision(class_id=4).sums(scores(0, 4), LABELS)


@pytest.mark.parametrize("void", [255, -1, 2])
@pytest.mark.parametrize("second", [False, True])
def test_a_class_without_a_pixel_can_be_ignored(void, second):
    outputs, truths = torch.randn(3, 5, 4, 6), torch.randint(0, 6, (3, 5, 4))
    truths[:, :2] = void
    kept = truths.ne(void)
    plain = figure(MeanIoU(), outputs[kept], truths[kept])
    moved = outputs.movedim(-1, 1) if second else outputs
    metric = MeanIoU(6, ignore_class=void)
    assert figure(metric, moved, truths) == pytest.approx(plain)
    for score in (IoU, Precision, Recall, Specificity, F1Score, FBetaScore):
        of_third = figure(score(class_id=3), outputs[kept], truths[kept])
        third = score(class_id=3, ignore_class=void)
        assert figure(third, moved, truths) == pytest.approx(of_third)
    for count in (TruePositives, FalsePositives, TrueNegatives, FalseNegatives):
        number = figure(count(), outputs[kept], truths[kept])
        assert figure(count(ignore_class=void), moved, truths) == number
    if void > 0:
        assert figure(metric, moved, truths.byte()) == pytest.approx(plain)
    if void != 2:
        with pytest.raises(DataError, match=r"no class of the outputs.*ignore_class"):
            figure(MeanIoU(), moved, truths)


def test_an_ignored_class_of_a_mask_does_not_count():
    outputs, truths = torch.randn(3, 1, 4, 6), torch.randint(0, 2, (3, 4, 6))
    truths[:, :2] = 255
    kept = truths.ne(255)
    plain = figure(MeanIoU(), outputs[:, 0][kept], truths[kept])
    assert figure(MeanIoU(ignore_class=255), outputs, truths) == pytest.approx(plain)
    with pytest.raises(ConfigError, match="ignore_class='void': use a whole number"):
        MeanIoU(ignore_class="void")


def test_numbers_of_8_bits_are_no_other_class():
    outputs = torch.zeros(2, 200).index_fill(1, torch.tensor(156), 1.0)
    sums = TruePositives().sums(outputs, torch.full((2,), 156, dtype=torch.uint8))
    assert TruePositives().result(sums.double()) == 2
