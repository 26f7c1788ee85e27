# SPDX-License-Identifier: Apache-2.0
"""Masks and several labels per sample: each output is a 0 or 1 of its own."""

import pytest
import sklearn.metrics
import torch
from torch import nn

import ipufit
from ipufit import IPUModel
from ipufit.errors import DataError
from tests.metrics.harness import Through

METRICS = ["accuracy", "f1", "iou", "mean_iou"]


def dice(outputs, targets):
    return 1 - (outputs.sigmoid() * targets).mean()


def figures(x, y, loss, metrics=METRICS):
    """Figures of `fit` and of `evaluate` of a module that returns `x`."""
    model = IPUModel(Through())
    model.compile(ipufit.Optimizer("sgd", learning_rate=0.0), loss, metrics=metrics)
    history = model.fit(x, y, batch_size=4, verbose=0).history
    trained = {name: values[0] for name, values in history.items()}
    return trained, model.evaluate(x, y, batch_size=8, verbose=0)


def drawn(*shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    return x, (x + torch.randn(shape)).gt(0.5).float()


@pytest.mark.parametrize("loss", [dice, "mse"])
def test_a_channel_axis_of_1_makes_a_mask(loss):
    x, y = drawn(8, 1, 6, 5)
    expected = sklearn.metrics.jaccard_score(y.reshape(-1) > 0, x.reshape(-1) > 0)
    for found in figures(x, y, loss):
        assert found["iou"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "metric", ["accuracy", "iou", "categorical_hinge", "true_positives"]
)
def test_rows_that_are_not_one_hot_are_refused(metric):
    x, y = drawn(8, 6, 5)
    with pytest.raises(DataError, match=r"along the last axis.*'bce'"):
        figures(x, y, dice, [metric])


@pytest.mark.parametrize("shape", [(8, 5), (8, 1, 1, 5)])
def test_one_hot_rows_and_shares_are_classes(shape):
    x, _ = drawn(*shape)
    classes = (torch.arange(8) % 5).reshape(shape[:-1])
    for y in (
        nn.functional.one_hot(classes),
        nn.functional.one_hot(classes) * 0.9 + 0.02,
    ):
        for found in figures(x, y, "categorical_crossentropy"):
            accuracy = sklearn.metrics.accuracy_score(
                classes.flatten(), x.argmax(-1).flatten()
            )
            assert found["accuracy"] == pytest.approx(accuracy)


def by_label(x, y, score):
    """The mean over the labels of a score of scikit-learn."""
    x, y = (part.movedim(1, 0).flatten(1) for part in (x, y))
    return sum(score(*pair) for pair in zip(y, x.gt(0))) / len(x)


def mean_jaccard(truths, predicted):
    return sklearn.metrics.jaccard_score(truths, predicted, average="macro")


@pytest.mark.parametrize("shape", [(16, 5), (16, 5, 1, 1), (8, 3, 6, 4)])
def test_scores_of_several_labels_are_averaged(shape):
    x, y = drawn(*shape)
    names = ["f1", "balanced_accuracy", "mean_iou", "exact_auc"]
    expected = [
        by_label(x, y, score)
        for score in (
            sklearn.metrics.f1_score,
            sklearn.metrics.balanced_accuracy_score,
            mean_jaccard,
        )
    ]
    columns = zip(x.movedim(1, 0).flatten(1), y.movedim(1, 0).flatten(1))
    areas = [sklearn.metrics.roc_auc_score(truths, part) for part, truths in columns]
    expected.append(sum(areas) / len(areas))
    for found in figures(x, y, "bce", names):
        assert [found[name] for name in names] == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(16,), (16, 1), (4, 6, 5, 1), (4, 6, 5)])
@pytest.mark.parametrize("name", ["f1", "balanced_accuracy", "exact_auc"])
def test_one_output_is_one_label(shape, name):
    x, y = drawn(*shape)
    model = IPUModel(Through())
    model.compile("sgd", "bce", metrics=[name])
    expected = model.evaluate(x.reshape(-1), y.reshape(-1), verbose=0)[name]
    assert model.evaluate(x, y, verbose=0)[name] == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(16,), (16, 5), (4, 3, 6, 4)])
def test_a_setting_makes_several_labels(shape):
    x, y = drawn(*shape)
    metric = ipufit.metrics.F1Score(multi_label=True)
    (said, _), (known, _) = (
        figures(x, y, loss, [used]) for loss, used in [(dice, metric), ("bce", "f1")]
    )
    assert said["f1_score"] == known["f1"]


def test_a_setting_of_several_labels_refuses_indices():
    with pytest.raises(DataError, match="don't fit"):
        ipufit.metrics.F1Score(multi_label=True).sums(
            torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
        )
