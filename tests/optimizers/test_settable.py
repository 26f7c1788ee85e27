# SPDX-License-Identifier: Apache-2.0
"""Keras's `optimizer.learning_rate` sets the rate; what nobody reads can't be set."""

from __future__ import annotations

import copy
import logging
import pickle

import numpy as np
import pytest
import torch

from ipufit import Callback, ConfigError, IPUConfig, IPUModel, Optimizer, poptorch
from tests import reference

X, Y = reference.samples(32)
FIT = {"batch_size": 8, "verbose": 0, "shuffle": False}
NAMES = ("sgd", "adam", "adamw", "rmsprop", "lamb")


def make(optimizer="sgd", **settings):
    model = IPUModel(reference.network(), IPUConfig())
    model.compile(optimizer, "cross_entropy", **settings)
    return model


def weights(model):
    return [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize("word", ["learning_rate", "lr"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rate_of_zero_trains_nothing(name, word):
    model = make(Optimizer(name, learning_rate=0.1, weight_decay=0.0))
    setattr(model.optimizer, word, 0)
    assert getattr(model.optimizer, word) == 0.0
    before = weights(model)
    model.fit(X, Y, **FIT)
    assert all(map(torch.equal, before, weights(model)))
    model.optimizer.learning_rate = 0.1
    model.fit(X, Y, **FIT)
    assert not all(map(torch.equal, before, weights(model)))


def test_it_counts_from_the_next_call_on():
    class Stops(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen = [*getattr(self, "seen", []), weights(self.model)]
            self.model.optimizer.learning_rate = 0.0

    model, stops = make(), Stops()
    before = weights(model)
    model.fit(X, Y, callbacks=stops, **FIT)
    assert not all(map(torch.equal, before, stops.seen[0]))
    for later in stops.seen[1:]:
        assert all(map(torch.equal, stops.seen[0], later))


def test_all_groups_get_it():
    module = reference.network()
    groups = [
        {"params": module[0].parameters(), "lr": 0.1},
        {"params": module[2].parameters(), "lr": 0.2},
    ]
    model = IPUModel(module)
    model.compile(torch.optim.SGD(groups, lr=0.3), "mse")
    assert model.optimizer.learning_rate == 0.1
    model.optimizer.learning_rate = 0.5
    assert [group["lr"] for group in model.optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, int])
def test_a_rate_may_be_any_number(kind):
    optimizer = make().optimizer
    optimizer.learning_rate = kind(2)
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.learning_rate == 2.0


@pytest.mark.parametrize("rate", [-1, "0.1", None, float("nan")])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="learning_rate"):
        make().optimizer.learning_rate = rate


def test_a_schedule_and_a_rate_exclude_each_other():
    model = make(lr_schedule="cosine")
    with pytest.raises(ConfigError, match="the schedule that compile"):
        model.optimizer.lr = 0.1
    model.compile(model.optimizer, "mse")
    model.optimizer.lr = 0.1


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learningRate", r"Did you mean learning_rate\?"),
        ("weight_decy", r"group\['weight_decay'\] = \.\.\."),
        (
            "warmup",
            "Set learning_rate, or in the dicts .* betas, .*lr, ",
        ),
        ("weight_decay", r"parameter groups: .* group\['weight_decay'\] = \.\.\."),
        ("beta_1", r"group\['betas'\] = \.\.\."),
    ],
)
def test_what_nobody_reads_can_not_be_set(name, advice):
    optimizer = make("adamw").optimizer
    with pytest.raises(AttributeError, match=f"Nobody reads .*{name}.*{advice}"):
        setattr(optimizer, name, 0.5)
    assert not hasattr(optimizer, name)


def test_what_poptorch_reads_can_be_set():
    optimizer = make(Optimizer("adam", loss_scaling=2.0)).optimizer
    optimizer.loss_scaling = 4.0
    assert optimizer.loss_scaling == 4.0


def test_torchs_schedulers_find_what_they_set():
    model = make(lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    model.fit(X, Y, **FIT)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_optimizer_that_was_given(name, caplog):
    module = reference.network()
    kinds = {"rmsprop": "RMSprop", "adamw": "AdamW", "adam": "Adam"}
    plain = getattr(poptorch.optim, kinds.get(name, name.upper()))
    own = plain(module.parameters(), lr=0.1)
    model = IPUModel(module)
    model.compile(own, "cross_entropy")
    assert model.optimizer is own
    assert isinstance(own, plain)
    assert type(own).__name__ == plain.__name__
    kind = type(own)
    model.compile(own, "cross_entropy")
    assert type(own) is kind
    with caplog.at_level(logging.WARNING):
        model.fit(X, Y, **FIT)
    assert "subclass" not in caplog.text
    assert "custom optimizer" not in caplog.text


@pytest.mark.parametrize(
    "twin_of", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_a_copy_is_settable_too(twin_of):
    optimizer = make().optimizer
    twin = twin_of(optimizer)
    twin.learning_rate = 0.5
    assert twin.learning_rate == 0.5
    assert optimizer.learning_rate == 0.01
    assert type(twin) is type(optimizer)


class Stepping(Callback):
    """Steps a scheduler of torch after each epoch, as torch's users do."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def on_epoch_end(self, epoch, logs):
        self.scheduler.step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_user_s_own_optimizer_is_followed():
    module = reference.network()
    twin = copy.deepcopy(module)
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = IPUModel(module, IPUConfig())
    model.compile(given, "cross_entropy")
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    model.fit(X, Y, epochs=3, callbacks=Stepping(scheduler), **FIT)
    assert model.optimizer.learning_rate == 0.1
    plain = torch.optim.SGD(twin.parameters(), lr=0.4)
    for epoch in range(3):
        plain.param_groups[0]["lr"] = 0.4 * 0.5**epoch
        for rows in torch.arange(32).split(8):
            plain.zero_grad()
            torch.nn.functional.cross_entropy(twin(X[rows]), Y[rows]).backward()
            plain.step()
    reference.assert_same_weights(module, twin)


def test_what_the_program_has_as_a_constant_cannot_be_followed():
    module = reference.network()
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = IPUModel(module, IPUConfig())
    model.compile(given, "cross_entropy")
    given.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match="done to the SGD changes momentum"):
        model.fit(X, Y, **FIT)


def test_the_newest_of_both_counts():
    module = reference.network()
    given = torch.optim.SGD(module.parameters(), lr=0.4)
    model = IPUModel(module, IPUConfig())
    model.compile(given, "cross_entropy")
    given.param_groups[0]["lr"] = 0.2
    model.fit(X, Y, **FIT)
    model.optimizer.lr = 0.1
    model.fit(X, Y, **FIT)
    assert model.optimizer.lr == 0.1
