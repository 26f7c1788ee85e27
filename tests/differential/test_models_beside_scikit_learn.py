# SPDX-License-Identifier: Apache-2.0
"""Metrics and losses of ordinary models are scikit-learn's of what they predict.

Each model is trained, validated and evaluated with four replicas, and in the long run
with one and two, on rows that don't fill a micro-batch.
"""

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUConfig, IPUModel
from ipufit.errors import ConfigError
from tests.metrics import peers
from tests.metrics.peers import sk

ROWS, COUNT = 2, 19  # rows of a micro-batch, and of all data
REPLICAS = pytest.mark.parametrize(
    "replicas", [4, *(pytest.param(few, marks=pytest.mark.slow) for few in (1, 2))]
)


def check(module, loss, data, replicas, table, peer_of_loss, form):
    """Compare a model's figures with the peers' of its predictions.

    Args:
        table: Peers by the names of metrics.
        form: Returns outputs and targets as the peers take them.
    """
    x, y = data
    model = IPUModel(module, IPUConfig(micro_batch_size=ROWS, replicas=replicas))
    # Without a learning rate, all figures of a run are of the same predictions.
    model.compile(ipufit.Optimizer("sgd", 0.0), loss, metrics=list(table))
    history = model.fit(
        x, y, validation_data=data, drop_last="pad", shuffle=False, verbose=0
    ).history
    outputs, targets = form(torch.as_tensor(model.predict(x, verbose=0)), y)
    parts = outputs, targets, np.ones(targets.shape)
    expected = {name: peers.reference(f, name, parts) for name, f in table.items()}
    expected["loss"] = peer_of_loss(*parts)
    about = pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert {name: history[name][0] for name in expected} == about
    assert {name: history[f"val_{name}"][0] for name in expected} == about
    assert model.evaluate(x, y, verbose=0) == about


def scores_of(outputs, targets):
    """Logits of probabilities `[N, labels, ...]`, and targets, `[M, labels]`."""
    pair = outputs.double().clamp(1e-7, 1 - 1e-7).logit(), targets.double()
    width = outputs.shape[1]
    return tuple(part.movedim(1, -1).reshape(-1, width).numpy() for part in pair)


def without(table, *names):
    return {name: peer for name, peer in table.items() if name not in names}


def log_loss(scores, truths, weights):
    """scikit-learn's, of all labels together."""
    return sk.log_loss(truths.reshape(-1), 1 / (1 + np.exp(-scores.reshape(-1))))


class UNet(nn.Module):
    """Two levels with a skip connection; it ends in a sigmoid."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.bottom = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.up(self.bottom(self.pool(fine)))
        return torch.sigmoid(self.head(torch.cat([fine, coarse], 1)))


@REPLICAS
def test_a_u_net_that_ends_in_a_sigmoid(replicas):
    x = torch.randn(COUNT, 1, 6, 6)
    masks = (x + 0.5 * torch.randn(x.shape)).gt(0.4).float()
    table = without(peers.BITS, "hinge", "squared_hinge")  # of scores
    check(UNet(), nn.BCELoss(), (x, masks), replicas, table, log_loss, scores_of)


@REPLICAS
def test_a_network_of_several_labels(replicas):
    x = torch.randn(COUNT, 6)
    labels = (x[:, :4] + torch.randn(COUNT, 4)).gt(0.3).float()
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def form(outputs, targets):
        return outputs.double().numpy(), targets.double().numpy()

    check(module, "bce", (x, labels), replicas, peers.BITS, log_loss, form)


@REPLICAS
def test_a_softmax_network_by_kerass_words(replicas):
    x, classes = torch.randn(COUNT, 6), torch.randint(0, 6, (COUNT,))
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Softmax(-1))
    model = IPUModel(module)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    with pytest.raises(ConfigError, match=r"loss=lambda x, y: .*nll_loss"):
        model.evaluate(x, classes, verbose=0)

    def form(outputs, targets):
        return outputs.double().log().numpy(), targets.numpy()

    def class_loss(scores, labels, weights):
        shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)  # of float32
        return sk.log_loss(labels, shares, labels=range(6))

    table = {**peers.CLASSES, **peers.INDICES, **peers.MANY}
    check(
        module,
        lambda x, y: nn.functional.nll_loss(x.log(), y, reduction="none"),
        (x, classes),
        replicas,
        without(table, "nll", "categorical_hinge"),  # of scores
        class_loss,
        form,
    )


class InSeconds(nn.Module):
    """Predicts a time since 1970 near the middle of the data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return self.linear(x) * 1e5 + 1.7e9


@REPLICAS
def test_a_regression_on_unix_times(replicas):
    x = torch.randn(COUNT, 3)
    times = (1.7e9 + 1e5 * x.double().sum(1) + 3e4 * torch.randn(COUNT)).float()

    def form(outputs, targets):
        return outputs.double().numpy(), targets.double().unsqueeze(1).numpy()

    mse = peers.NUMBERS["mse"]
    check(InSeconds(), "mse", (x, times), replicas, peers.NUMBERS, mse, form)
