# SPDX-License-Identifier: Apache-2.0
"""Objects of torchmetrics, and what has their methods."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import sklearn.metrics
import torch

from ipufit.errors import DataError, UnsupportedError
from ipufit.metrics import TorchMetric, resolve_metric, resolve_metrics
from tests.metrics.harness import COUNT, figure, labels, scores


class Recorded:
    """Keeps what it's shown; the sum of all outputs is what it comes to."""

    higher_is_better = True

    def __init__(self, value=None):
        self.value = value
        self.shown, self.resets = [], 0

    def update(self, outputs, targets):
        self.shown.append((outputs, targets))

    def compute(self):
        if self.value is not None:
            return self.value
        return torch.stack([outputs.sum() for outputs, _ in self.shown]).sum()

    def reset(self):
        self.shown = []
        self.resets += 1


def test_it_is_shown_batches_and_asked_for_the_figure():
    recorded = Recorded()
    metric = resolve_metric(recorded)
    assert (metric.name, metric.direction) == ("recorded", "max")
    assert recorded.resets == 0  # as the user left it, until it is used
    assert figure(metric, torch.arange(7.0), torch.zeros(7), None, (3,)) == 21.0
    assert [len(outputs) for outputs, _ in recorded.shown] == [3, 3, 1]
    metric.reset()
    assert recorded.resets == 1
    assert np.isnan(metric.result())


def test_rows_of_weight_0_are_left_out_and_batches_of_them_not_shown():
    recorded = Recorded()
    weights = torch.tensor([1, 0, 1, 0, 0, 0, 1])
    metric = TorchMetric(recorded)
    assert figure(metric, torch.arange(7.0), torch.zeros(7), weights, (3,)) == 8.0
    assert [outputs.tolist() for outputs, _ in recorded.shown] == [[0.0, 2.0], [6.0]]


def test_it_has_no_other_weights():
    with pytest.raises(UnsupportedError, match="must be 0 or 1"):
        TorchMetric(Recorded()).update(
            torch.ones(2), torch.ones(2), torch.tensor([1.0, 0.5])
        )


def test_it_gets_the_types_and_shapes_that_it_expects():
    recorded = Recorded()
    metric = TorchMetric(recorded)
    outputs = torch.ones(2, 1, dtype=torch.float16, requires_grad=True)
    metric.update(outputs, torch.ones(2, dtype=torch.int32))
    metric.update(torch.ones(2), torch.ones(2, 1, dtype=torch.bool))
    metric.update(torch.ones(2, 3), torch.ones(2, dtype=torch.int32))
    types = [(x.dtype, y.dtype) for x, y in recorded.shown]
    assert types == [
        (torch.float32, torch.int64),
        (torch.float32, torch.bool),
        (torch.float32, torch.int64),
    ]
    shapes = [(tuple(x.shape), tuple(y.shape)) for x, y in recorded.shown]
    assert shapes == [((2,), (2,)), ((2,), (2,)), ((2, 3), (2,))]
    assert not any(x.requires_grad for x, _ in recorded.shown)


@pytest.mark.parametrize("value", [torch.ones(3), {"a": 1.0}, [1.0, 2.0], "x"])
def test_what_is_not_one_number_is_refused(value):
    metric = TorchMetric(Recorded(value))
    metric.update(torch.ones(2), torch.ones(2))
    with pytest.raises(DataError, match=r"'recorded'.*one number"):
        metric.result()


def test_what_lacks_a_direction_is_refused_with_the_way_out():
    class Worst:
        update = compute = reset = lambda self, *given: None

    for given in (Worst(), [Worst()]):
        with pytest.raises(UnsupportedError, match=r"Worst.*no higher_is_better.*None"):
            resolve_metrics(given)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Accuracy", "accuracy"),
        ("BinaryF1Score", "binary_f1_score"),
        ("MulticlassAUROC", "multiclass_auroc"),
        ("R2Score", "r2_score"),
        ("BLEUScore", "bleu_score"),
    ],
)
def test_names_are_in_snake_case(kind, name):
    assert resolve_metric(type(kind, (Recorded,), {})()).name == name


# torchmetrics itself ------------------------------------------------------------------


TRUTHS, LABELS = labels(0, num_classes=2).int(), labels(1).int()
REAL = {
    "binary_auroc": (
        lambda tm: tm.AUROC(task="binary"),
        (scores(2, 1), TRUTHS),
        lambda x, y: sklearn.metrics.roc_auc_score(y, x.reshape(-1)),
    ),
    "multiclass_f1_score": (
        lambda tm: tm.F1Score(task="multiclass", num_classes=4, average="macro"),
        (scores(3, 4), LABELS),
        lambda x, y: sklearn.metrics.f1_score(y, x.argmax(-1), average="macro"),
    ),
    "r2_score": (
        lambda tm: tm.R2Score(),
        (scores(4), scores(5)),
        lambda x, y: sklearn.metrics.r2_score(y, x),
    ),
    "mean_squared_error": (
        lambda tm: tm.MeanSquaredError(),
        (scores(6), scores(7)),
        lambda x, y: sklearn.metrics.mean_squared_error(y, x),
    ),
}


@pytest.fixture
def torchmetrics():
    return pytest.importorskip("torchmetrics")


@pytest.mark.parametrize("name", REAL)
def test_torchmetrics_own_are_scikit_learns(torchmetrics, name):
    make, (outputs, targets), reference = REAL[name]
    (metric,) = resolve_metrics([make(torchmetrics)]).values()
    assert metric.name == name
    assert metric.direction == ("min" if name == "mean_squared_error" else "max")
    weights = torch.ones(COUNT)
    weights[::4] = 0.0
    kept = weights > 0
    expected = pytest.approx(reference(outputs, targets), rel=1e-4)
    assert figure(metric, outputs, targets, None, (5, 9)) == expected
    copied = copy.deepcopy(metric)
    copied.reset()
    expected = pytest.approx(reference(outputs[kept], targets[kept]), rel=1e-4)
    assert figure(copied, outputs, targets, weights, (10,)) == expected
    assert metric.result() != copied.result()


def test_torchmetrics_figures_per_class_are_refused(torchmetrics):
    recall = torchmetrics.Recall(task="multiclass", num_classes=4, average="none")
    with pytest.raises(DataError, match=r"'multiclass_recall'.*one number"):
        figure(resolve_metric(recall), scores(0, 4), LABELS)
