# SPDX-License-Identifier: Apache-2.0
"""Models that end in a sigmoid or softmax: metrics are those of the logits."""

import pytest
import sklearn.metrics
import torch
from torch import nn
from torch.nn import functional

import ipufit
from ipufit import IPUModel, metrics
from ipufit.errors import ConfigError
from tests.metrics.harness import Through

BINARY = [
    *("accuracy", "binary_accuracy", "precision", "recall", "f1", "iou", "mean_iou"),
    *("balanced_accuracy", "specificity", "fbeta_score", "true_positives", "auc"),
    *("pr_auc", "exact_auc", "average_precision", "binary_crossentropy", "ce"),
]
CLASSES = ["accuracy", "f1", "crossentropy", "sparse_categorical_crossentropy"]


def figures(function, x, y, loss, names, replicas=1):
    """Figures of `fit`, and of `evaluate` and as validation data."""
    model = IPUModel(Through(function), ipufit.IPUConfig(replicas=replicas))
    model.compile(ipufit.Optimizer("sgd", learning_rate=0.0), loss, metrics=names)
    history = model.fit(x, y, batch_size=8, validation_data=(x, y), verbose=0).history
    found = {name: values[0] for name, values in history.items() if name != "loss"}
    found.pop("val_loss")
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    return {**found, **{f"test_{n}": v for n, v in evaluated.items() if n != "loss"}}


def dice(outputs, targets):
    return 1 - (outputs * targets).flatten(1).mean(1)


def drawn(*shape):
    torch.manual_seed(0)
    x = torch.randn(shape) - 1
    return x, (x + torch.randn(shape)).gt(-0.5).float()


def test_metrics_take_a_sigmoids_probabilities():
    x, y = drawn(32, 1)
    logits = figures(nn.Identity(), x, y, "bce", BINARY)
    assert len(logits) == 3 * len(BINARY)
    for loss in (nn.BCELoss(), dice):
        assert figures(nn.Sigmoid(), x, y, loss, BINARY, 2) == pytest.approx(
            logits, rel=1e-4
        )


@pytest.mark.parametrize("shape", [(32,), (32, 1, 3, 2)])
def test_a_loss_of_probabilities_says_what_outputs_are(shape):
    x, y = drawn(*shape)
    names = ["accuracy", "iou", "auc"]
    logits = figures(nn.Identity(), x, y, "bce", names)
    squashed = figures(lambda x: 1 / (1 + (-x).exp()), x, y, nn.BCELoss(), names)
    assert squashed == pytest.approx(logits)


def nll(outputs, targets):
    return functional.nll_loss(outputs.log(), targets)


def test_metrics_take_a_softmaxs_probabilities():
    x, _ = drawn(32, 3)
    y = torch.arange(32) % 3
    squashed = figures(nn.Softmax(-1), x, y, nll, CLASSES)
    assert squashed == pytest.approx(
        figures(nn.Identity(), x, y, "cross_entropy", CLASSES), rel=1e-5
    )


def test_a_part_of_probabilities_is_probabilities():
    x, _ = drawn(32, 2)
    y = (torch.arange(32) % 2).float()
    whole = figures(nn.Softmax(-1), x, y.long(), nll, ["accuracy"])
    column = figures(lambda x: x.softmax(-1)[:, 1:], x, y, dice, ["accuracy"])
    assert column == whole


def test_a_metric_may_say_what_it_takes():
    x, y = drawn(32, 1)
    one = metrics.Accuracy(from_logits=True)
    said = figures(nn.Sigmoid(), x, y, nn.BCELoss(), [one])["accuracy"]
    assert said == pytest.approx(float(y.mean()))


@pytest.mark.parametrize(
    "kind", [metrics.Accuracy, metrics.BinaryCrossentropy, metrics.Poisson]
)
def test_a_name_in_a_settings_place_is_refused(kind):
    with pytest.raises(ConfigError, match=r"='mine': use True or False.*name="):
        kind("mine")


def test_areas_of_a_saturated_softmax_are_scikit_learns():
    x = 12 * drawn(64, 2)[0]  # the smaller probability is far below 1e-7
    y = (x[:, 1] - x[:, 0] + 12 * torch.randn(64) > 0).long()
    ones = x.softmax(-1)[:, 1]
    for name, score in (
        ("exact_auc", sklearn.metrics.roc_auc_score),
        ("average_precision", sklearn.metrics.average_precision_score),
    ):
        found = figures(nn.Softmax(-1), x, y, nll, [name])
        assert list(found.values()) == pytest.approx([score(y, ones)] * 3)
