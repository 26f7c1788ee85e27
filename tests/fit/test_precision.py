# SPDX-License-Identifier: Apache-2.0
"""Precision: what is computed in which type, on whose weights, rounded how."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from ipufit import (
    BackupAndRestore,
    ConfigError,
    IPUConfig,
    IPUModel,
    UnknownNameError,
    poptorch,
)
from ipufit.callbacks import Callback
from ipufit.errors import CopiedModuleWarning
from tests import reference

HALF, SINGLE = torch.float16, torch.float32
X, Y = reference.samples(24)


def dtypes(module):
    return {name: p.dtype for name, p in module.named_parameters()}


class Noted(nn.Module):
    """Runs layers, and notes the type that each gets and gives."""

    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.seen = []

    def forward(self, x):
        for name, layer in self.layers.items():
            before, x = x.dtype, layer(x)
            self.seen.append((name, before, x.dtype))
        return x


class Doubtful(nn.Module):
    """A weight of its own, a buffer, and the types that it computes in."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("shift", torch.zeros(4))
        self.seen = []

    def forward(self, x):
        result = x * self.scale + self.shift
        self.seen += [x.dtype, self.scale.dtype, result.dtype]
        return result


def seen_in(model):
    """Types that a trace of the model's `forward` has seen."""
    model.module.seen.clear()
    model.predict(torch.randn(3, 4), verbose=0)
    return model.module.seen


# Words ----------------------------------------------------------------------------


NAMES = {"float32": "32.32", "16.32": "16.32", "float16": "16.16"}


@pytest.mark.parametrize(
    ("word", "weights", "outputs"),
    [
        ("float32", SINGLE, SINGLE),
        ("16.32", SINGLE, HALF),
        ("float16", HALF, HALF),
    ],
)
def test_words_say_the_types_of_activations_and_of_weights(word, weights, outputs):
    histories = []
    for name in (word, NAMES[word]):
        model = reference.compiled(config=IPUConfig(precision=name, seed=3))
        histories.append(model.fit(X, Y, 8, verbose=0).history)
        assert set(dtypes(model.module).values()) == {weights}
        assert model.predict(X, verbose=0).dtype == outputs
    assert histories[0] == histories[1]


# Float32 weights, float16 activations ---------------------------------------------


class Rounded(torch.autograd.Function):
    """Rounding to float16, of values and of their gradients."""

    @staticmethod
    def forward(ctx, value):
        return value.half().float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.half().float()


def test_master_weights_train_as_torch_does_with_rounded_ones():
    layer, twin = nn.Linear(3, 4), nn.Linear(3, 4)
    twin.load_state_dict(layer.state_dict())
    model = IPUModel(layer, IPUConfig(precision="16.32"))
    model.compile(torch.optim.SGD(layer.parameters(), lr=0.5), "cross_entropy")
    model.fit(X, Y, 8, epochs=3, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    rounded = Rounded.apply
    for _ in range(3):
        for rows in torch.arange(24).split(8):
            weights = rounded(twin.weight), rounded(twin.bias)
            outputs = rounded(linear(rounded(X[rows]), *weights))
            optimizer.zero_grad()
            cross_entropy(outputs, Y[rows]).backward()
            optimizer.step()
    reference.assert_same_weights(layer, twin, rtol=1e-5, atol=1e-5)


class Tied(nn.Module):
    """Words in, scores of words out, by the weights of one table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.decoder = nn.Linear(4, 6)
        self.decoder.weight = self.table.weight
        self.seen = []

    def forward(self, words):
        hidden = self.norm(self.table(words))
        scores = self.decoder(hidden) + hidden @ self.table.weight.t()
        self.seen += [hidden.dtype, scores.dtype]
        return scores


@pytest.mark.parametrize("more", [{}, {"float32_modules": "decoder"}])
@pytest.mark.parametrize("word", ["16.16", "16.32"])
def test_tied_weights_stay_tied(word, more):
    model = reference.compiled(Tied(), IPUConfig(precision=word, **more))
    words = torch.arange(12) % 6
    before = model.module.table.weight.detach().clone()
    model.fit(words, words, 6, epochs=2, verbose=0)
    module = model.module
    assert set(module.seen) == {HALF}
    assert module.decoder.weight is module.table.weight
    assert not torch.equal(before, module.table.weight)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.bn = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.bn(self.inner(x)))


# Modules in float32 ---------------------------------------------------------------


@pytest.mark.parametrize("word", ["16.16", "16.32"])
def test_named_modules_compute_in_float32(word):
    module = Noted(
        first=nn.Linear(4, 4),
        own=Doubtful(),
        norm=nn.LayerNorm(4),
        last=nn.Linear(4, 2),
    )
    given = IPUConfig(precision=word, float32_modules=["layers.own", "norm"])
    model = IPUModel(module, given)
    types = [(name, HALF, HALF) for name in ("first", "own", "norm", "last")]
    assert seen_in(model) == types
    assert set(model.module.layers["own"].seen) == {SINGLE}
    other = SINGLE if word == "16.32" else HALF
    found = dtypes(model.module)
    assert found.pop("layers.own.scale") == found.pop("layers.norm.weight") == SINGLE
    assert found.pop("layers.norm.bias") == SINGLE
    assert set(found.values()) == {other}
    assert not any(part._forward_hooks for part in model.module.modules())


class OwnLoss(nn.Module):
    """A loss that float16 can't hold, of a submodule or a function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.criterion = nn.MSELoss()

    def forward(self, x, y):
        outputs = self.layer(x)
        return outputs, self.criterion(outputs, y)


@pytest.mark.filterwarnings("ignore::ipufit.errors.NonFiniteLossWarning")
@pytest.mark.parametrize(
    ("more", "is_finite"), [({}, False), ({"float32_modules": "loss"}, True)]
)
def test_losses_inside_the_module_are_float32_if_asked(more, is_finite):
    model = IPUModel(OwnLoss(), IPUConfig(precision="16.32", **more))
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0))
    targets = torch.full((24, 4), 500.0)  # their squares are beyond float16
    data = {"x": X, "y": targets}
    loss = model.fit(data, batch_size=8, verbose=0).history["loss"][0]
    expected = 250_000 if is_finite else float("inf")
    assert loss == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("word", ["16.16", "16.32"])
def test_losses_of_compile_are_float32(word):
    seen = []

    def loss(outputs, targets):
        seen.append(outputs.dtype)
        return (outputs - targets).pow(2).mean()

    model = IPUModel(nn.Linear(3, 4), IPUConfig(precision=word))
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), loss)
    history = model.fit(X, torch.full((24, 4), 500.0), 8, verbose=0).history
    assert set(seen) == {SINGLE}
    assert history["loss"][0] == pytest.approx(250_000, rel=0.02)


def test_names_that_match_nothing_are_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'headd'.* Did you mean 'head'\?"):
        IPUModel(Normed(), IPUConfig(precision="16.16", float32_modules=["headd"]))
    model = IPUModel(reference.network(), IPUConfig(precision="16.16"))
    with pytest.raises(ConfigError, match=r"or with model\.module\.parameters\(\)"):
        model.compile(of_torch(reference.network()), "cross_entropy")
    with pytest.raises(ConfigError, match="'norm', and the module has no such layers"):
        IPUModel(nn.ReLU(), IPUConfig(precision="16.16", float32_modules="norm"))


class Lazy(Normed):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LazyLinear(5), nn.LazyLinear(4)
        self.bn = nn.LazyBatchNorm1d()


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", [Normed, Lazy])
@pytest.mark.parametrize("word", ["16.16", "16.32"])
@pytest.mark.parametrize("names", [{}, {"float32_modules": "bn"}])
def test_running_statistics_are_as_exact_as_their_weights(kind, word, names):
    model = IPUModel(kind(), IPUConfig(precision=word, **names))
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy")
    model.fit(X, Y, 24, verbose=0)
    module, of_inner = model.module, SINGLE if word == "16.32" else HALF
    statistics = SINGLE if names else of_inner
    twin = Normed()
    weights = {n: w.float() for n, w in module.state_dict().items() if "run" not in n}
    twin.load_state_dict(weights, strict=False)
    twin(X)
    assert {module.bn.weight.dtype, module.bn.running_mean.dtype} == {statistics}
    assert module.inner.weight.dtype == of_inner
    mean = module.bn.running_mean.float()
    torch.testing.assert_close(mean, twin.bn.running_mean, atol=2e-3, rtol=0)
    assert model.predict(X, verbose=0).dtype == HALF


class Recurrent(nn.Module):
    """Has lists of weights, and one that is computed from others."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(3, 5, batch_first=True)
        self.head = torch.nn.utils.weight_norm(nn.Linear(5, 4))

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(1).repeat(1, 2, 1))[0][:, -1])


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "config",
    [
        {"precision": "16.16"},
        {"precision": "16.32"},
        {"precision": "16.16", "float32_modules": "cells"},
    ],
)
def test_all_weights_of_recurrent_and_normed_layers_move(config):
    model = reference.compiled(Recurrent(), IPUConfig(**config))
    before = reference.weights(model.module)
    model.fit(X, Y, 8, epochs=2, verbose=0)
    after = reference.weights(model.module)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert model.predict(X, verbose=0).dtype == HALF


# Rounding -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "trains_at_random"),
    [
        ({"precision": "16.16"}, True),
        ({"precision": "16.32"}, False),
        ({"precision": "16.32", "stochastic_rounding": True}, True),
        ({"precision": "16.16", "stochastic_rounding": False}, False),
    ],
)
def test_only_training_rounds_at_random(config, trains_at_random):
    """Additions that float16 can't hold: lost to the nearest, or not at random."""

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return (x + 0.5) + self.weight

    class Outputs(Callback):
        def on_train_batch_end(self, batch, logs):
            losses.append(logs["loss"])

    losses = []
    model = IPUModel(Adding(), IPUConfig(seed=1, **config))
    sgd = torch.optim.SGD(model.module.parameters(), lr=0.0)
    model.compile(sgd, lambda outputs, targets: (outputs - targets).abs().mean())
    x, y = torch.full((64, 8), 2048.0), torch.full((64, 8), 2048.0)
    model.fit(x, y, 64, verbose=0, callbacks=[Outputs()])
    assert (losses[0] > 0) == trains_at_random
    assert model.evaluate(x, y, verbose=0)["loss"] == 0
    assert (model.predict(x, verbose=0) == 2048).all()


# Whose weights --------------------------------------------------------------------


def test_the_module_that_was_given_stays_as_it_was():
    module = reference.network()
    before = reference.weights(module)
    model = reference.compiled(module, IPUConfig(precision="16.16"))
    model.fit(X, Y, 8, verbose=0)
    for name, weight in reference.weights(module).items():
        assert torch.equal(weight, before[name])
    assert model.module is not module
    trained = model.get_weights()[0]
    assert torch.equal(torch.as_tensor(trained), model.module[0].weight.detach())


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({}, SINGLE),
        ({"precision": "16.32"}, SINGLE),
        ({"precision": "16.32", "float32_modules": ["2"]}, SINGLE),
        ({"precision": "16.16"}, HALF),
    ],
)
def test_a_module_that_has_these_types_is_trained_itself(config, given):
    module = reference.network(dtype=given)
    assert IPUModel(module, IPUConfig(**config)).module is module


def test_a_module_may_be_changed_in_place():
    module = reference.network()
    weight = module[0].weight
    config = IPUConfig(precision="16.16", float32_modules=["2"])
    assert IPUModel(module, config, in_place=True).module is module
    assert module[0].weight is weight
    assert weight.dtype == HALF
    assert module[2].weight.dtype == SINGLE


def test_a_module_that_cannot_be_copied_is_refused_with_a_way_out():
    module = reference.network()
    module.file = (value for value in ())  # nobody can copy a generator
    config = IPUConfig(precision="16.16")
    with pytest.raises(ConfigError, match=r"can't be copied: .* in_place=True"):
        IPUModel(module, config)
    assert IPUModel(module, config, in_place=True).module is module


def freeze(module):
    module[0].requires_grad_(False)


def load(module):
    module.load_state_dict(reference.network(seed=1).state_dict())


@pytest.mark.parametrize("change", [freeze, load])
def test_later_changes_of_the_module_that_was_given_are_warned_of_once(change):
    module = reference.network()
    model = reference.compiled(module, IPUConfig(precision="16.16"))
    model.fit(X, Y, 8, verbose=0)
    change(module)
    with pytest.warns(CopiedModuleWarning, match="weights of model.module") as caught:
        model.evaluate(X, Y, verbose=0)
    assert caught[0].filename == __file__
    model.fit(X, Y, 8, verbose=0)
    change(model.module)
    model.fit(X, Y, 8, verbose=0)


def test_the_module_that_was_given_is_not_kept():
    module = reference.network()
    gone = weakref.ref(module[0].weight)
    model = IPUModel(module, IPUConfig(precision="16.16"))
    del module
    gc.collect()
    assert gone() is None
    model.predict(X, verbose=0)


def of_torch(module):
    return torch.optim.SGD(
        [
            {"params": module[0].parameters(), "lr": 0.5},
            {"params": module[2].parameters(), "lr": 0.0},
        ],
        lr=0.1,
    )


def of_poptorch(module):
    return poptorch.optim.SGD(
        [
            {"params": list(module[0].parameters()), "lr": 0.5},
            {"params": list(module[2].parameters()), "lr": 0.0},
        ],
        lr=0.1,
    )


@pytest.mark.parametrize("make", [of_torch, of_poptorch])
def test_optimizers_of_the_module_that_was_given_train_the_copy(make):
    module = reference.network()
    model = IPUModel(module, IPUConfig(precision="16.16"))
    optimizer = make(module)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model.compile(optimizer, "cross_entropy", lr_schedule=schedule)
    before = reference.weights(model.module)
    model.fit(X, Y, 8, verbose=0)
    after = reference.weights(model.module)
    assert not torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["2.weight"], before["2.weight"])
    rates = [group["lr"] for group in model.optimizer.param_groups]
    assert rates == [pytest.approx(0.5 * 0.5**3), 0.0]
    if make is of_poptorch:
        assert model.optimizer is optimizer


# Resuming -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "16.32"}, "precision was 'float16' and is '16.32'"),
        (
            {"stochastic_rounding": False},
            "stochastic_rounding was True and is False",
        ),
        ({"precision": "float16", "stochastic_rounding": True}, None),
    ],
)
def test_a_resumed_run_has_the_same_precision(change, message, tmp_path):
    def fit(epochs, **more):
        config = {"precision": "16.16", "seed": 2, **more}
        model = reference.compiled(config=IPUConfig(**config))
        saver = BackupAndRestore(tmp_path / "run", delete_checkpoint=False)
        told = {"callbacks": saver, "verbose": 0}
        model.fit(X, Y, 8, epochs=epochs, **told)

    fit(1)
    if message is None:
        fit(2, **change)
    else:
        with pytest.raises(ConfigError, match=message):
            fit(2, **change)
