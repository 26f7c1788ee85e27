# SPDX-License-Identifier: Apache-2.0
"""Weights of elements, and losses of torch that are refused: what they advise runs."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from ipufit import IPUConfig, IPUModel, UnsupportedError, metrics

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
Y = torch.rand(20, 3, generator=torch.Generator().manual_seed(6)).round()


class Sigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).sigmoid()


@pytest.mark.parametrize(
    "kind", [nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss]
)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (1,)])
@pytest.mark.parametrize("factors", [(8, 1), (2, 1), (2, 2)])
def test_weights_of_elements_are_those_of_torch(kind, shape, factors):
    size, replicas = factors
    module = Sigmoid() if kind is nn.BCELoss else nn.Linear(4, 3)
    twin = copy.deepcopy(module)
    loss = kind(weight=torch.rand(shape) + 0.5)
    config = IPUConfig(micro_batch_size=size, replicas=replicas)
    model = IPUModel(module, config)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.5), loss)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    with pytest.warns(UserWarning, match="4 of 20 samples"):
        model.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0)
    for x, y in list(zip(X[:16].split(8), Y[:16].split(8))) * 2:
        optimizer.zero_grad()
        loss(twin(x), y).backward()
        optimizer.step()
    for mine, others in zip(model.module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, others)
    expected = float(loss(twin(X), Y).detach())  # 20 rows: some are left over
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_beside_weights_of_elements_is_refused():
    model = IPUModel(nn.Linear(4, 3))
    loss = nn.BCEWithLogitsLoss(weight=torch.ones(3))
    with pytest.raises(UnsupportedError, match="BCEWithLogitsLoss' with weight"):
        model.compile("sgd", loss, label_smoothing=0.1)


def advice(loss, form):
    with pytest.raises(UnsupportedError) as caught:
        IPUModel(nn.Linear(4, 3)).compile("sgd", loss)
    return re.search(form, str(caught.value))[1]


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.variance = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.mean(x), softplus(self.variance(x)) + 1e-6


def test_the_gaussian_loss_of_the_message_is_torchs():
    code = advice(nn.GaussianNLLLoss(), r"compile\(loss=(.*)\), with variances")
    module = Gaussian()
    model = IPUModel(module, IPUConfig(micro_batch_size=4))
    model.compile("sgd", eval(code, {}))
    mean, variance = module(X)
    expected = float(nn.GaussianNLLLoss()(mean, Y, variance).detach())
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    model.fit(X, Y, verbose=0)


class Adaptive(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], 1.0)
        self.code = code

    def forward(self, hidden):
        return eval(self.code, {"self": self, "hidden": hidden})


def test_the_adaptive_softmax_of_the_message_trains_as_torchs():
    loss = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], 1.0)
    module, labels = Adaptive(advice(loss, r"returns `(.*)`")), torch.arange(20) % 6
    twin = copy.deepcopy(module)
    model = IPUModel(module, IPUConfig(micro_batch_size=4))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.5), loss="nll")
    model.fit(X, labels, 20, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    twin.softmax(X, labels).loss.backward()
    optimizer.step()
    for mine, others in zip(model.module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, others)


class Weighted(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))
        self.code = code

    def forward(self, outputs, targets):
        names = {"self": self, "outputs": outputs, "targets": targets, "torch": torch}
        return eval(self.code, names)


@pytest.mark.parametrize("dims", [(), (2, 2)])
def test_the_weights_of_classes_of_the_message_run(dims):
    code = advice(nn.CrossEntropyLoss(weight=torch.ones(3)), r"returns `(.*)`")
    network = nn.Conv2d(4, 3, 1) if dims else nn.Linear(4, 3)
    x, y = torch.randn(8, 4, *dims), torch.randint(0, 3, (8, *dims))
    model = IPUModel(network, IPUConfig(micro_batch_size=4))
    model.compile("sgd", Weighted(code))
    expected = float(Weighted(code)(network(x), y).mean().detach())
    assert model.evaluate(x, y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)
    model.fit(x, y, 4, verbose=0)


@pytest.mark.parametrize("kind", [metrics.Precision, metrics.Recall])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("thresholds", "threshold=0.3"),
        ("top_k", "top_5_accuracy"),
        ("avrage", "mean 'average'?"),
        ("dtype", "It takes average, class_id,"),
    ],
)
def test_arguments_of_keras_are_answered_by_the_name_of_the_metric(kind, name, words):
    whole = rf"^{kind.__name__}\(\) got .*'{name}'.*{re.escape(words)}"
    with pytest.raises(TypeError, match=whole):
        kind(**{name: 1})
