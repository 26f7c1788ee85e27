# SPDX-License-Identifier: Apache-2.0
"""Figures against Keras's own metrics, and where they differ on purpose."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
import torch

from ipufit import DataError, IPUModel
from ipufit import metrics as ours
from tests.metrics.harness import (
    COUNT,
    check_device,
    figure,
    labels,
    one_hot,
    sample_weights,
    scores,
)
from tests.metrics.harness import Case as DeviceCase

keras = pytest.importorskip("keras")
theirs = keras.metrics


def same(outputs):
    return outputs


def softmax(outputs):
    return outputs.softmax(-1)


class Case(NamedTuple):
    """The same figure of both.

    Attributes:
        name: Of our metric.
        kind: Keras's.
        outputs: Ours, logits as a rule.
        targets: For both.
        to: From our outputs to Keras's.
        settings: Keras's.
        ours: Our settings, with which the class is taken and not the name.
    """

    name: str
    kind: str
    outputs: torch.Tensor
    targets: torch.Tensor
    to: Callable[..., Any] = same
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to
    ours: Any = None

    def __str__(self):
        return f"{self.name} {tuple(self.outputs.shape)} {tuple(self.targets.shape)}"

    def metric(self):
        return ours.resolve_metric(self.name if self.ours is None else self.ours())

    def expected(self, weights, sizes):
        metric = getattr(theirs, self.kind)(**self.settings)
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            start += size
            metric.update_state(
                self.targets[rows],
                self.to(self.outputs[rows]),
                None if weights is None else weights[rows],
            )
        assert start == COUNT
        return float(np.mean(keras.ops.convert_to_numpy(metric.result())))


LOGITS = {"from_logits": True}
TRUTHS, COLUMN = labels(1, num_classes=2), labels(1, 1, num_classes=2).float()
SINGLE, PAIRS, SEVERAL = scores(0), scores(0, 1), scores(2, 6)
INDICES = labels(3, num_classes=6)
DENSE, SHARES = one_hot(INDICES, 6), scores(4, 6).softmax(-1)
NUMBERS, TRUE = scores(5, 3), scores(6, 3) + 0.5
SIDES = 2.0 * COLUMN - 1.0
MARKS = labels(7, 6, num_classes=2).float()

CASES = [
    Case("binary_accuracy", "BinaryAccuracy", PAIRS, COLUMN, torch.sigmoid),
    Case("accuracy", "BinaryAccuracy", PAIRS, COLUMN, torch.sigmoid),
    Case(
        "binary_accuracy of probabilities",
        "BinaryAccuracy",
        PAIRS.sigmoid(),
        COLUMN,
        settings={"threshold": 0.7},
        ours=partial(ours.BinaryAccuracy, threshold=0.7, from_logits=False),
    ),
    Case("categorical_accuracy", "CategoricalAccuracy", SEVERAL, DENSE),
    Case("accuracy", "CategoricalAccuracy", SEVERAL, DENSE),
    Case("sparse_categorical_accuracy", "SparseCategoricalAccuracy", SEVERAL, INDICES),
    Case("acc", "SparseCategoricalAccuracy", SEVERAL, INDICES.unsqueeze(1)),
    Case("top_k_categorical_accuracy", "TopKCategoricalAccuracy", SEVERAL, DENSE),
    Case(
        "sparse_top_k_categorical_accuracy",
        "SparseTopKCategoricalAccuracy",
        SEVERAL,
        INDICES,
    ),
    Case(
        "top_2_accuracy",
        "SparseTopKCategoricalAccuracy",
        SEVERAL,
        INDICES,
        settings={"k": 2},
    ),
    Case("AUC", "AUC", PAIRS, COLUMN, settings=LOGITS),
    Case("auc", "AUC", 5 * SINGLE, TRUTHS, settings=LOGITS),
    Case(
        "auc of all labels together",
        "AUC",
        SEVERAL,
        DENSE,
        settings=LOGITS,
        ours=partial(ours.AUC, average="micro"),
    ),
    Case("pr_auc", "AUC", PAIRS, COLUMN, settings={**LOGITS, "curve": "PR"}),
    Case(
        "auc of probabilities",
        "AUC",
        PAIRS.sigmoid(),
        COLUMN,
        settings={"num_thresholds": 11},
        ours=partial(ours.AUC, num_thresholds=11, from_logits=False),
    ),
    *(
        Case(
            f"auc {settings}",
            "AUC",
            SEVERAL,
            MARKS,
            settings={**LOGITS, **settings},
            ours=partial(
                ours.AUC,
                average="macro" if settings.get("multi_label") else "micro",
                **{**settings, "multi_label": True},
            ),
        )
        for settings in [
            {"summation_method": "minoring"},
            {"summation_method": "majoring", "thresholds": [0.9, 0.2, 0.4]},
            {"curve": "PR", "summation_method": "minoring", "num_thresholds": 9},
            {"curve": "PR", "summation_method": "majoring"},
            {"label_weights": [1.0, 0.5, 2.0, 0.0, 0.1, 1.0]},
            {"multi_label": True},
            {"multi_label": True, "label_weights": [1.0, *5 * [0.3]]},
        ]
    ),
    *(
        Case(
            f"{kind} {value} {settings}",
            kind,
            SEVERAL,
            MARKS,
            torch.sigmoid,
            {kind.split("At")[1].lower(): value, **settings},
            partial(
                getattr(ours, kind),
                value,
                average="micro",
                multi_label=True,
                **settings,
            ),
        )
        for kind, value in [
            ("PrecisionAtRecall", 0.6),
            ("RecallAtPrecision", 0.5),
            ("SensitivityAtSpecificity", 0.7),
            ("SpecificityAtSensitivity", 0.99),
        ]
        for settings in [{}, {"num_thresholds": 7, "class_id": 2}]
    ),
    *(
        Case(
            f"{kind} {settings}",
            kind,
            SEVERAL,
            MARKS,
            torch.sigmoid,
            settings,
            partial(
                getattr(ours, kind),
                settings.get("thresholds"),
                "micro",
                multi_label=True,
                top_k=settings["top_k"],
                class_id=settings.get("class_id"),
            ),
        )
        for kind in ("Precision", "Recall")
        for settings in [
            {"top_k": 2},
            {"top_k": 3, "thresholds": 0.6},
            {"top_k": 3, "class_id": 1},
        ]
    ),
    Case(
        "R2 by variance",
        "R2Score",
        NUMBERS,
        TRUE,
        settings={"class_aggregation": "variance_weighted_average"},
        ours=partial(ours.R2Score, "variance_weighted_average"),
    ),
    Case("precision", "Precision", SINGLE, TRUTHS, torch.sigmoid),
    Case("recall", "Recall", PAIRS, COLUMN, torch.sigmoid),
    Case(
        "recall at 0.3",
        "Recall",
        SINGLE,
        TRUTHS,
        torch.sigmoid,
        {"thresholds": 0.3},
        partial(ours.Recall, threshold=0.3),
    ),
    *(
        Case(name, kind, SINGLE, TRUTHS, torch.sigmoid)
        for name, kind in [
            ("true_positives", "TruePositives"),
            ("true_negatives", "TrueNegatives"),
            ("false_positives", "FalsePositives"),
            ("false_negatives", "FalseNegatives"),
        ]
    ),
    Case("f1_score", "F1Score", PAIRS, COLUMN, torch.sigmoid, {"threshold": 0.5}),
    Case("f1_score", "F1Score", SEVERAL, DENSE, settings={"average": "macro"}),
    Case(
        "weighted f1_score",
        "F1Score",
        SEVERAL,
        DENSE,
        settings={"average": "weighted"},
        ours=partial(ours.F1Score, average="weighted"),
    ),
    Case(
        "fbeta_score",
        "FBetaScore",
        SEVERAL,
        DENSE,
        settings={"average": "micro", "beta": 2.0},
        ours=partial(ours.FBetaScore, average="micro", beta=2.0),
    ),
    *(
        Case(name, kind, NUMBERS, TRUE)
        for name, kind in [
            ("MSE", "MeanSquaredError"),
            ("rmse", "RootMeanSquaredError"),
            ("mean_absolute_error", "MeanAbsoluteError"),
            ("mape", "MeanAbsolutePercentageError"),
            ("msle", "MeanSquaredLogarithmicError"),
            ("log_cosh", "LogCoshError"),
            ("cosine_similarity", "CosineSimilarity"),
            ("R2Score", "R2Score"),
        ]
    ),
    Case("hinge", "Hinge", PAIRS, COLUMN),
    Case("hinge", "Hinge", PAIRS, SIDES),
    Case("squared_hinge", "SquaredHinge", PAIRS, COLUMN),
    Case("categorical_hinge", "CategoricalHinge", SEVERAL + 3, DENSE),
    Case("categorical_hinge", "CategoricalHinge", SEVERAL - 3, DENSE),
    Case("bce", "BinaryCrossentropy", PAIRS, COLUMN, settings=LOGITS),
    Case("ce", "BinaryCrossentropy", PAIRS, COLUMN, torch.sigmoid),
    Case(
        "bce of probabilities",
        "BinaryCrossentropy",
        PAIRS.sigmoid(),
        COLUMN,
        ours=partial(ours.BinaryCrossentropy, False),
    ),
    *(
        Case(name, kind, SEVERAL, given, settings=LOGITS)
        for name, kind, given in [
            ("categorical_crossentropy", "CategoricalCrossentropy", DENSE),
            ("categorical_crossentropy", "CategoricalCrossentropy", SHARES),
            ("crossentropy", "CategoricalCrossentropy", DENSE),
            (
                "sparse_categorical_crossentropy",
                "SparseCategoricalCrossentropy",
                INDICES,
            ),
            ("cross_entropy", "SparseCategoricalCrossentropy", INDICES),
        ]
    ),
    *(
        Case(kind, kind, SEVERAL.softmax(-1), given, ours=partial(make, False))
        for kind, given, make in [
            ("CategoricalCrossentropy", DENSE, ours.CategoricalCrossentropy),
            (
                "SparseCategoricalCrossentropy",
                INDICES,
                ours.SparseCategoricalCrossentropy,
            ),
            ("KLDivergence", SHARES, ours.KLDivergence),
        ]
    ),
    Case("kl_divergence", "KLDivergence", SEVERAL, SHARES, softmax),
    Case("poisson", "Poisson", NUMBERS, TRUE.abs().round(), torch.exp),
    Case(
        "poisson of rates",
        "Poisson",
        NUMBERS.exp(),
        TRUE.abs().round(),
        ours=partial(ours.Poisson, log_input=False),
    ),
]
BATCHES = (20, 10, 7)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_figure_is_keras(case, is_weighted):
    """In batches of different sizes, with weights of which some are 0."""
    weights = sample_weights() if is_weighted else None
    expected = case.expected(weights, BATCHES)
    actual = figure(case.metric(), case.outputs, case.targets, weights, (9, 4))
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "settings", "ours_settings"),
    [
        *(
            (kind, {"thresholds": [0.3, 0.5, 1.0]}, {"threshold": [0.3, 0.5, 1.0]})
            for kind in ("Precision", "Recall", "TruePositives", "FalseNegatives")
        ),
        ("F1Score", {"threshold": 0.4}, {"threshold": 0.4, "average": None}),
        ("R2Score", *2 * [{"class_aggregation": None}]),
    ],
)
def test_each_value_is_keras(kind, settings, ours_settings):
    metric, weights = getattr(theirs, kind)(**settings), sample_weights()
    outputs, targets = (NUMBERS, TRUE) if kind == "R2Score" else (SEVERAL, MARKS)
    if kind != "R2Score":
        ours_settings = {**ours_settings, "multi_label": True}
    if kind in ("Precision", "Recall"):
        ours_settings["average"] = "micro"
    is_logits = kind != "R2Score"
    metric.update_state(targets, outputs.sigmoid() if is_logits else outputs, weights)
    own = getattr(ours, kind)(**ours_settings)
    parts = figure(own, outputs, targets, weights, (9, 4))
    expected = keras.ops.convert_to_numpy(metric.result()).tolist()
    assert list(parts.values()) == pytest.approx(expected, rel=1e-5)


def test_devices_compute_the_figures():
    check_device(
        [
            DeviceCase(case.name, case.metric, case.outputs, case.targets, None)
            for case in CASES
            if case.targets is MARKS
        ]
    )


def test_an_adjusted_r2_is_keras_of_one_output():
    metric = theirs.R2Score(num_regressors=3)
    metric.update_state(TRUE[:, :1], NUMBERS[:, :1])
    own = figure(ours.R2Score(num_regressors=3), NUMBERS[:, :1], TRUE[:, :1])
    assert own == pytest.approx(float(metric.result()), rel=1e-5)
    few = figure(ours.R2Score(num_regressors=COUNT - 1), NUMBERS, TRUE)
    assert np.isnan(few)


def test_keras_counts_outputs_as_samples_of_an_adjusted_r2():
    keras_figure, plain = both("r2", "R2Score", NUMBERS, TRUE, num_regressors=3)
    own = figure(ours.R2Score(num_regressors=3), NUMBERS, TRUE)
    assert own == pytest.approx(1 - (1 - plain) * (COUNT - 1) / (COUNT - 4))
    assert keras_figure != pytest.approx(own, rel=1e-3)


def test_overlap_is_keras():
    """Keras's sees weights of whole numbers only."""
    metric = theirs.MeanIoU(num_classes=6, sparse_y_pred=False)
    weights = (sample_weights() * 2).round()
    metric.update_state(INDICES, SEVERAL, weights.int())
    actual = figure(ours.MeanIoU(), SEVERAL, INDICES, weights, (9, 4))
    assert actual == pytest.approx(float(metric.result()), rel=1e-6)


@pytest.mark.parametrize("void", [255, -1, 2])
def test_overlap_without_a_class_is_keras(void):
    targets = torch.where(torch.arange(COUNT) % 3 == 0, void, INDICES)
    metric = theirs.MeanIoU(num_classes=6, sparse_y_pred=False, ignore_class=void)
    metric.update_state(targets, SEVERAL)
    own = ours.MeanIoU(6, ignore_class=void)
    expected = pytest.approx(float(metric.result()), rel=1e-6)
    assert figure(own, SEVERAL, targets, None, (9, 4)) == expected


def test_names_are_those_keras_gives_its_own_objects():
    keras.utils.clear_session()  # it numbers names: auc_1
    for kind in (
        "AUC",
        "BinaryAccuracy",
        "CategoricalAccuracy",
        "CategoricalCrossentropy",
        "CategoricalHinge",
        "CosineSimilarity",
        "F1Score",
        "FBetaScore",
        "FalseNegatives",
        "KLDivergence",
        "Poisson",
        "Precision",
        "R2Score",
        "Recall",
        "RootMeanSquaredError",
        "SparseCategoricalAccuracy",
        "SparseTopKCategoricalAccuracy",
        "TopKCategoricalAccuracy",
        "TruePositives",
    ):
        assert getattr(ours, kind)().name == getattr(theirs, kind)().name


# On purpose different: docs/reference/metrics.md ------------------------------------


def both(name, kind, outputs, targets, **settings):
    case = Case(name, kind, outputs, targets, settings=settings)
    return case.expected(None, [COUNT]), figure(case.metric(), outputs, targets)


def test_keras_takes_an_area_without_0s_for_0():
    keras_figure, figure_ = both("auc", "AUC", SINGLE, torch.ones(COUNT), **LOGITS)
    assert keras_figure == 0.0
    assert np.isnan(figure_)


@pytest.mark.parametrize("kind", ["MeanIoU", "AUC", "Recall", "MeanSquaredError"])
def test_keras_takes_metrics_without_samples_for_0(kind):
    settings = {"num_classes": 6} if kind == "MeanIoU" else {}
    assert float(getattr(theirs, kind)(**settings).result()) == 0.0
    metric = ours.resolve_metric(kind)
    sums = metric.sums(SINGLE, TRUTHS, torch.zeros(COUNT)).double()
    assert np.isnan(metric.result(sums))


def test_keras_takes_a_divergence_of_what_sums_to_less_than_1():
    outputs = SEVERAL.softmax(-1)
    metric = theirs.KLDivergence()
    metric.update_state(SHARES, 0.5 * outputs)
    own = ours.KLDivergence(from_logits=False)
    whole, half = (figure(own, size * outputs, SHARES) for size in (1, 0.5))
    assert half == pytest.approx(whole, rel=1e-5)
    assert float(metric.result()) == pytest.approx(whole + np.log(2), rel=1e-5)


def test_keras_counts_targets_that_it_leaves_out_of_a_crossentropy():
    metric = theirs.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    metric.update_state(INDICES, SEVERAL)
    own = ours.SparseCategoricalCrossentropy(ignore_index=2)
    share = float((INDICES != 2).float().mean())
    actual = figure(own, SEVERAL, INDICES)
    assert float(metric.result()) == pytest.approx(share * actual, rel=1e-5)
    loss = torch.nn.functional.cross_entropy(SEVERAL, INDICES, ignore_index=2)
    assert actual == pytest.approx(float(loss), rel=1e-5)


def test_keras_compares_labels_by_the_class_accuracy():
    predicted = SEVERAL.argmax(-1)
    metric = theirs.Accuracy()
    metric.update_state(INDICES, predicted)
    expected = pytest.approx(float(metric.result()), rel=1e-6)
    assert figure(ours.Accuracy(), SEVERAL, INDICES) == expected
    with pytest.raises(DataError, match="accuracy"):
        figure(ours.Accuracy(), predicted.float(), INDICES)


def test_keras_takes_several_labels_together_for_an_area():
    keras_figure, figure_ = both("auc", "AUC", SEVERAL, DENSE, **LOGITS)
    assert keras_figure != pytest.approx(figure_, rel=1e-3)
    settings = {**LOGITS, "multi_label": True}
    keras_figure, figure_ = both("auc", "AUC", SEVERAL, DENSE, **settings)
    assert figure_ == pytest.approx(keras_figure, rel=1e-5)


def test_keras_averages_over_classes_that_never_occur():
    outputs, targets = SEVERAL.clone(), INDICES % 5
    outputs[:, 5] = -100.0
    keras_figure, _ = both(
        "f1", "F1Score", outputs, one_hot(targets, 6), average="macro"
    )
    assert figure(ours.F1Score(), outputs, targets) == pytest.approx(
        keras_figure * 6 / 5, rel=1e-5
    )


def test_keras_counts_ties_as_in_the_top_k():
    outputs = torch.zeros(COUNT, 6)
    keras_figure, figure_ = both(
        "top_2_accuracy", "SparseTopKCategoricalAccuracy", outputs, INDICES, k=2
    )
    assert keras_figure == 1.0
    assert figure_ == pytest.approx(float((INDICES < 2).float().mean()))


def test_keras_thresholds_scores_of_several_classes():
    keras_figure, figure_ = both("precision", "Precision", SEVERAL.softmax(-1), DENSE)
    assert keras_figure != pytest.approx(figure_, rel=1e-3)
    multi_label = ours.Precision(from_logits=False, multi_label=True, average="micro")
    same_figure = figure(multi_label, SEVERAL.softmax(-1), DENSE)
    assert same_figure == pytest.approx(keras_figure, rel=1e-6)


def test_keras_correlates_within_a_row():
    keras_figure, figure_ = both("pearson", "PearsonCorrelation", NUMBERS, TRUE)
    columns = [np.corrcoef(NUMBERS[:, i], TRUE[:, i])[0, 1] for i in range(3)]
    assert figure_ == pytest.approx(np.mean(columns), rel=1e-5)
    rows = [np.corrcoef(x, y)[0, 1] for x, y in zip(NUMBERS, TRUE)]
    assert keras_figure == pytest.approx(np.mean(rows), rel=1e-3)


def test_keras_weights_batches_alike_if_outputs_have_no_axis_of_their_own():
    case = Case("hinge", "Hinge", SINGLE, TRUTHS.float())
    whole = figure(case.metric(), SINGLE, TRUTHS)
    assert case.expected(None, [COUNT]) == pytest.approx(whole, rel=1e-5)
    assert case.expected(None, BATCHES) != pytest.approx(whole, rel=1e-3)
    assert figure(case.metric(), SINGLE, TRUTHS, None, BATCHES) == pytest.approx(whole)


def test_keras_cuts_weights_of_an_overlap_to_whole_numbers():
    weights = torch.full((COUNT,), 0.5)
    metric = theirs.MeanIoU(num_classes=6, sparse_y_pred=False)
    with pytest.warns(UserWarning, match="weight as `float`"):
        metric.update_state(INDICES, SEVERAL, weights)
    assert float(metric.result()) == 0.0
    plain = figure(ours.MeanIoU(), SEVERAL, INDICES)
    assert figure(ours.MeanIoU(), SEVERAL, INDICES, weights) == pytest.approx(plain)


def test_keras_leaves_out_targets_that_are_no_class():
    targets = torch.where(torch.arange(COUNT) % 3 == 0, 255, INDICES)
    metric = theirs.MeanIoU(num_classes=6, sparse_y_pred=False)
    metric.update_state(targets, SEVERAL)
    with pytest.raises(DataError, match="ignore_class=255"):
        figure(ours.MeanIoU(), SEVERAL, targets)
    own = figure(ours.MeanIoU(ignore_class=255), SEVERAL, targets)
    assert own == pytest.approx(float(metric.result()), rel=1e-6)


def test_keras_loses_the_variance_of_targets_far_from_0():
    outputs, targets = 2020 + scores(7, 1), 2020 + scores(7, 1) + 0.3 * scores(8, 1)
    keras_figure, figure_ = both("r2_score", "R2Score", outputs, targets)
    x, y = outputs.double(), targets.double()
    exact = float(1 - (x - y).square().sum() / (y - y.mean()).square().sum())
    assert figure_ == pytest.approx(exact, rel=1e-5)
    assert abs(keras_figure - exact) > 1e-3


def test_keras_takes_several_labels_for_one_class():
    targets = (scores(9, 6) > 0).float()
    model = keras.Sequential([keras.layers.Identity()])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"])
    keras_figure = model.evaluate(SEVERAL, targets, return_dict=True, verbose=0)
    highest = SEVERAL.argmax(1) == targets.argmax(1)
    assert keras_figure["accuracy"] == pytest.approx(float(highest.float().mean()))
    ipu = IPUModel(torch.nn.Identity())
    ipu.compile("sgd", "bce", metrics=["accuracy"])
    figures = ipu.evaluate(SEVERAL, targets, verbose=0)
    each = float(((SEVERAL > 0) == targets).float().mean())
    assert figures["accuracy"] == pytest.approx(each)
