# SPDX-License-Identifier: Apache-2.0
"""Precision, recall and their like against scikit-learn."""

import math
from functools import partial

import pytest
import torch

from ipufit.errors import ConfigError, DataError
from ipufit.metrics.confusion import (
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
from tests.metrics import peers
from tests.metrics.harness import (
    COUNT,
    Case,
    check,
    check_device,
    figure,
    labels,
    probabilities,
    scores,
)
from tests.metrics.peers import sk

precision, recall, f1 = sk.precision_score, sk.recall_score, sk.f1_score


def by(score, average="macro", **settings):
    """Scikit-learn's `score` of what is predicted: one column, or classes."""
    settings = {"zero_division": 0, **settings}
    binary = peers.of_columns(peers.hard(score, **settings), width=1)
    classes = peers.of_classes(peers.best(score, average=average, **settings))
    return either(binary, classes)


def either(binary, classes):
    def reference(outputs, targets, weights):
        is_binary = outputs.dim() == 1 or outputs.shape[-1] == 1
        return (binary if is_binary else classes)(outputs, targets, weights)

    return reference


def several(score, average):
    """Scikit-learn's `score` of labels that are each 0 or 1."""

    def metric(outputs, truths, weights):
        settings = {"average": average, "zero_division": 0}
        return score(truths, outputs > 0, sample_weight=weights[:, 0], **settings)

    return peers.of_columns(metric)


overlap = either(
    peers.of_columns(peers.BITS["mean_iou"], width=1),
    peers.of_classes(peers.CLASSES["mean_iou"]),
)
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
    Case(
        "F2",
        partial(FBetaScore, beta=2.0),
        scores(6, 4),
        LABELS,
        by(sk.fbeta_score, beta=2.0),
    ),
    Case(
        "precision of class 2",
        partial(Precision, class_id=2),
        scores(7, 4),
        LABELS,
        by(precision, labels=[2]),
    ),
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


@pytest.mark.parametrize("make", [Precision, Recall, F1Score, IoU])
@pytest.mark.parametrize("targets", [LABELS, MARKS])
def test_each_class_and_threshold_has_a_value_of_its_own(make, targets):
    given, settings = scores(12, *targets.shape[1:] or (4,)), {}
    settings["multi_label"] = targets is MARKS
    parts = figure(make(average=None, **settings), given, targets, None, (9, 4))
    for index in range(given.shape[1]):
        one = figure(make(class_id=index, **settings), given, targets)
        assert parts.pop(str(index)) == pytest.approx(one)
    assert parts == {}
    thresholds = [0.3, 0.5, 1.0]
    values = figure(make(threshold=thresholds, **settings), given, targets, None, (9,))
    expected = [
        figure(make(threshold=t, **settings), given, targets) for t in thresholds
    ]
    assert list(values.values()) == pytest.approx(expected)
    nothing = make(average=None).sums(given, LABELS, torch.zeros(COUNT)).double()
    assert all(math.isnan(part) for part in make(average=None).result(nothing).values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_score_with_settings_is_scikit_learns(case):
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
    "a threshold of 0": lambda: Recall(0.0),
    "a threshold above 1": lambda: Recall([0.5, 1.5]),
    "none of the highest": lambda: Recall(top_k=0),
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
    for setting in ({"class_id": 4}, {"top_k": 5}):
        with pytest.raises(DataError, match=r"[45]\).* of 4 classes"):
            Precision(**setting).sums(scores(0, 4), LABELS)


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
        with pytest.raises(DataError, match=r"classes of the outputs.*ignore_class"):
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
