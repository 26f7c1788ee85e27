# SPDX-License-Identifier: Apache-2.0
"""Label smoothing against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from ipufit import IPUConfig, IPUModel, Optimizer
from ipufit.losses import resolve_loss, smoothed
from tests.reference import NUM_CLASSES, assert_same_weights, network, samples


@pytest.mark.parametrize(
    "loss", ["cross_entropy", torch.nn.CrossEntropyLoss(), "CrossEntropyLoss"]
)
@pytest.mark.parametrize("pads", [False, True])
def test_smoothing_is_that_of_torch(loss, pads):
    x, y = samples(22 if pads else 24)
    y[3] = -100  # ignored
    model = IPUModel(network(), IPUConfig(micro_batch_size=8))
    drop_last = "pad" if pads else True
    with torch.no_grad():
        expected = F.cross_entropy(network()(x), y, label_smoothing=0.2)
    model.compile(Optimizer("sgd", lr=0.0), loss, label_smoothing=0.2)
    history = model.fit(x, y, 8, verbose=0, drop_last=drop_last)
    assert history.history["loss"] == pytest.approx([float(expected)])


def test_smoothed_gradients_are_those_of_torch():
    x, y = samples(8)
    model, other = IPUModel(network()), network()
    model.compile(Optimizer("sgd", lr=0.1), "cross_entropy", label_smoothing=0.2)
    model.fit(x, y, 8, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    F.cross_entropy(other(x), y, label_smoothing=0.2).backward()
    optimizer.step()
    assert_same_weights(model.module, other)


@pytest.mark.parametrize(
    ("loss", "of_log_probabilities"),
    [("nll", True), (torch.nn.NLLLoss(), True), ("sparse_categorical_crossentropy", 0)],
)
def test_other_losses_of_classes_are_smoothed(loss, of_log_probabilities):
    outputs, targets = torch.randn(4, NUM_CLASSES), torch.tensor([0, 2, 1, 1])
    expected = F.cross_entropy(outputs, targets, label_smoothing=0.1)
    if of_log_probabilities:
        outputs = outputs.log_softmax(1)
    terms = smoothed(resolve_loss(loss), 0.1).terms(outputs, targets, 4)
    torch.testing.assert_close(terms.value, expected)


def test_binary_targets_are_smoothed_towards_a_half():
    outputs, targets = torch.randn(4, 2), torch.tensor([[0.0, 1.0]] * 4)
    expected = F.binary_cross_entropy_with_logits(outputs, targets * 0.9 + 0.05)
    terms = smoothed(resolve_loss("bce"), 0.1).terms(outputs, targets, 4)
    torch.testing.assert_close(terms.value, expected)


def test_a_sum_stays_a_sum():
    outputs, targets = torch.randn(4, NUM_CLASSES), torch.tensor([0, 2, 1, 1])
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    terms = smoothed(resolve_loss(loss), 0.1).terms(outputs, targets, 4)
    given = {"label_smoothing": 0.1, "reduction": "sum"}
    torch.testing.assert_close(terms.value, F.cross_entropy(outputs, targets, **given))
