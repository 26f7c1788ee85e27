# SPDX-License-Identifier: Apache-2.0
"""Lazy modules get their shapes from the first sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipufit import ConfigError, DataError, IPUConfig, IPUModel, Optimizer
from tests import reference

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new")  # torch 2.0

X, Y = reference.samples(24)


class Counting(nn.Module):
    """Counts what the host runs."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def forward(self, x):
        self.rows.append(tuple(x.shape))
        return x


def lazy_network():
    return nn.Sequential(
        nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.LazyLinear(4)
    )


def dry_run(module):
    """What plain torch would do."""
    module.eval()
    with torch.no_grad():
        module(X[:1])
    return module.train()


def pairs():
    """A lazy network, and what the same seed makes of it in plain torch."""
    torch.manual_seed(3)
    expected = dry_run(lazy_network())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    return lazy_network(), expected, after


def assert_same(module, expected):
    actual = module.state_dict()
    assert list(actual) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["predict", "predict stream", "summary", "evaluate"])
def test_looking_gives_shapes_as_plain_torch_does(way, capsys):
    module, expected, after = pairs()
    model = IPUModel(module)
    if way == "summary":
        model.summary(X)
    elif way == "evaluate":
        model.compile("sgd", "cross_entropy")
        model.evaluate(X, Y, verbose=0)
    elif way == "predict stream":
        list(model.predict(X, verbose=0, stream=True))
    else:
        model.predict(X, verbose=0)
    assert_same(module, expected)
    assert [type(layer).__name__ for layer in module] == [
        "Linear",
        "BatchNorm1d",
        "Dropout",
        "Linear",
    ]
    assert module.training
    if way == "summary":
        assert torch.equal(torch.get_rng_state(), after)
    capsys.readouterr()


OPTIMIZERS = {
    "a name": lambda module: "sgd",
    "of torch": lambda module: torch.optim.SGD(module.parameters(), 0.01),
    "no decay": lambda module: Optimizer("sgd", weight_decay=0.1, no_decay=["norm"]),
    "an average": lambda module: Optimizer("sgd", ema_momentum=0.9),
}


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [*((name, "fit") for name in OPTIMIZERS), ("of torch", "train_on_batch")],
)
def test_a_lazy_network_trains_as_one_with_shapes(optimizer, method):
    results = []
    lazy, whole, _ = pairs()
    lazy[2] = whole[2] = nn.Identity()  # chance isn't the subject
    for module in (lazy, whole):
        model = IPUModel(module, IPUConfig(micro_batch_size=4))
        model.compile(OPTIMIZERS[optimizer](module), "cross_entropy")
        if method == "fit":
            data = {"shuffle": False, "validation_data": (X, Y), "verbose": 0}
            results.append(model.fit(X, Y, batch_size=8, epochs=2, **data).history)
        else:
            results.append([model.train_on_batch(X, Y) for _ in range(2)])
            model.detach()
    assert results[0] == results[1]
    assert_same(lazy, whole)


def test_half_precision_gets_shapes_in_full():
    module, expected, _ = pairs()
    model = IPUModel(module, IPUConfig(precision="float16"))
    model.predict(X, verbose=0)
    assert_same(model.module, expected.half())


def test_only_lazy_modules_are_run_and_once():
    counting = Counting()
    model = reference.compiled(nn.Sequential(counting, nn.LazyLinear(4)))
    model.fit(X, Y, batch_size=8, verbose=0)
    model.evaluate(X, Y, batch_size=8, verbose=0)
    assert counting.rows.count((1, 3)) == 1
    counting = Counting()
    IPUModel(nn.Sequential(counting, nn.Linear(3, 4))).predict(X, verbose=0)
    assert (1, 3) not in counting.rows


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.left = nn.LazyLinear(4), nn.LazyLinear(2)

    def forward(self, x):
        return self.used(x)


def test_a_lazy_layer_that_forward_leaves_out_is_named():
    model = IPUModel(Unused())
    with pytest.raises(ConfigError, match="weights of left have no shapes, after"):
        model.predict(X, verbose=0)


def test_a_sample_that_forward_cant_take_is_said():
    model = IPUModel(nn.Sequential(nn.LazyLinear(4), nn.Linear(5, 2)))
    with pytest.raises(DataError, match=r"Sequential failed.*\[1, 3\]"):
        model.predict(X, verbose=0)


WITHOUT_DATA = {
    "get_weights": lambda model, path: model.get_weights(),
    "set_weights": lambda model, path: model.set_weights([]),
    "load_weights": lambda model, path: model.load_weights(path),
    "checkpoint": lambda model, path: model.checkpoint(),
    "load": lambda model, path: model.load(path),
    "summary": lambda model, path: model.summary(),
}


@pytest.mark.parametrize("what", WITHOUT_DATA)
def test_what_needs_weights_asks_for_a_sample_first(what, tmp_path):
    model = reference.compiled(lazy_network())
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ConfigError, match=r"0, 1, 3 have no shapes yet.*summary\(x\)"):
        WITHOUT_DATA[what](model, path)


def test_a_run_is_resumed_into_a_lazy_network(tmp_path):
    first = reference.compiled(lazy_network())
    first.fit(X, Y, batch_size=8, verbose=0)
    first.save(tmp_path / "saved")
    second = reference.compiled(lazy_network())
    second.summary(X)
    second.load(tmp_path / "saved")
    assert_same(second.module, copy.deepcopy(first.module))
