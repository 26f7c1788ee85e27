# SPDX-License-Identifier: Apache-2.0
"""Weights of elements, and losses of torch that are refused: what they advise runs."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from ipufit import ConfigError, IPUConfig, IPUModel, UnsupportedError, metrics

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


def trained(loss, module, targets):
    """Train a copy with torch for an epoch of updates of 4."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for x, y in zip(X.split(4), targets.split(4)):
        optimizer.zero_grad()
        loss(module, x, y).backward()
        optimizer.step()
    return module


def assert_trains_alike(module, twin, targets, **compiled):
    model = IPUModel(module, IPUConfig(micro_batch_size=2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    model.compile(optimizer, **compiled)
    model.fit(*targets, batch_size=4, shuffle=False, verbose=0)
    for mine, others in zip(model.module.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, others)
    return model


@pytest.mark.parametrize("settings", [{}, {"full": True, "eps": 0.9}])
def test_the_gaussian_loss_that_the_message_wraps_trains_as_torchs(settings):
    module_loss = nn.GaussianNLLLoss(**settings)
    code = advice(module_loss, r"compile\(loss=(.*)\)\.$")
    loss = eval(code, {"module_loss": module_loss})
    module = Gaussian()
    twin = trained(lambda m, x, y: loss(m(x), y), copy.deepcopy(module), Y)
    model = assert_trains_alike(module, twin, (X, Y), loss=loss)
    expected = float(loss(twin(X), Y).detach())
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)


class Adaptive(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], 1.0)

    def forward(self, hidden, labels):
        result = self.softmax(hidden, labels)
        return result.output, result.loss


def test_the_adaptive_softmax_as_a_part_of_the_module_trains_as_torchs():
    layer = nn.AdaptiveLogSoftmaxWithLoss
    forward, labels, module = layer.forward, torch.arange(20) % 6, Adaptive()
    with pytest.raises(ConfigError, match="make the loss a part of the module"):
        IPUModel(nn.Linear(4, 4)).compile("sgd", layer(4, 6, [2, 4], 1.0))
    twin = trained(lambda m, x, y: m(x, y)[1], copy.deepcopy(module), labels)
    assert_trains_alike(module, twin, ((X, labels),))
    assert layer.forward is forward


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
        ("thresholds", "threshold=[0.3, 0.7]"),
        ("avrage", "mean 'average'?"),
        ("dtype", "It takes average, class_id,"),
    ],
)
def test_arguments_of_keras_are_answered_by_the_name_of_the_metric(kind, name, words):
    whole = rf"^{kind.__name__}\(\) got .*'{name}'.*{re.escape(words)}"
    with pytest.raises(TypeError, match=whole):
        kind(**{name: 1})
