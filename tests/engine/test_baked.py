# SPDX-License-Identifier: Apache-2.0
"""Numbers of a module that a program has baked in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipufit import Callback, ConfigError, IPUConfig, IPUModel
from ipufit.engine.baked import BakedIn
from tests import reference

X, Y = reference.samples(32)


class Scaled(nn.Module):
    """Reads its numbers in `forward`, and counts how often Python runs it."""

    def __init__(self):
        super().__init__()
        self.net = reference.network()
        self.scale = 1.0
        self.kind = "plain"
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        outputs = self.net(x) * self.scale
        return -outputs if self.kind == "negative" else outputs


def compiled(config=None):
    model = IPUModel(Scaled(), config or IPUConfig())
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    model.compile(optimizer, "cross_entropy")
    return model


def expected(model):
    with torch.no_grad():
        outputs = model.module.net(X) * model.module.scale
        if model.module.kind == "negative":
            outputs = -outputs
        return float(nn.functional.cross_entropy(outputs, Y))


def losses(model):
    """Of a fit with a validation, and of an evaluation."""
    history = model.fit(X, Y, validation_data=(X, Y), verbose=0).history
    return [
        *history["loss"],
        *history["val_loss"],
        model.evaluate(X, Y, verbose=0)["loss"],
    ]


def test_a_change_between_fits_counts():
    model = compiled()
    assert losses(model) == pytest.approx([expected(model)] * 3, rel=1e-5)
    for name, value in (("scale", 5.0), ("kind", "negative"), ("scale", 0.5)):
        setattr(model.module, name, value)
        assert losses(model) == pytest.approx([expected(model)] * 3, rel=1e-5)


def test_a_change_counts_in_evaluate_and_predict_alone_too():
    model = compiled()
    model.evaluate(X, Y, verbose=0)
    model.module.scale = 3.0
    loss = model.evaluate(X, Y, verbose=0)["loss"]
    assert loss == pytest.approx(expected(model), rel=1e-5)
    model.module.scale = 2.0
    with torch.no_grad():
        torch.testing.assert_close(model.predict(X, verbose=0), model.module.net(X) * 2)


class Change(Callback):
    def __init__(self, hook, name, value):
        def change(*_):
            setattr(self.model.module, name, value)

        setattr(self, hook, change)


HOOKS = ["on_train_batch_end", "on_epoch_begin", "on_epoch_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_change_in_mid_fit_is_an_error_that_names_it(hook):
    model = compiled()
    message = r"module\.scale was 1\.0.* is 7\.0"
    with pytest.raises(ConfigError, match=message):
        model.fit(
            X,
            Y,
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=Change(hook, "scale", 7.0),
        )
    history = model.fit(X, Y, verbose=0).history  # the new one counts from now on
    assert history["loss"] == [pytest.approx(expected(model), rel=1e-5)]


def test_a_change_in_mid_evaluation_is_an_error_too():
    model = compiled()
    change = Change("on_test_batch_end", "kind", "negative")
    with pytest.raises(ConfigError, match=r"module\.kind was 'plain'"):
        model.evaluate(X, Y, batch_size=8, callbacks=change, verbose=0)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_counters_of_forward_itself_are_no_change(monkeypatch, takes_turns):
    if takes_turns:
        monkeypatch.setenv("IPUFIT_EMULATOR_IPUS", "1")
    model = compiled()
    for _ in range(2):
        history = model.fit(
            X,
            Y,
            batch_size=8,
            epochs=3,
            validation_data=(X, Y),
            validation_batch_size=8,
            verbose=0,
        )
        assert len(history.epoch) == 3
        model.predict(X[:5], batch_size=5, verbose=0)
    assert model.module.calls > 0
    model.detach()


def test_dropout_may_change_between_fits():
    module = nn.Sequential(nn.Dropout(0.0), reference.network())
    model = IPUModel(module, IPUConfig(seed=1))
    model.compile(torch.optim.SGD(module.parameters(), lr=0.0), "cross_entropy")
    plain = model.fit(X, Y, verbose=0).history["loss"]
    module[0].p = 0.9
    assert model.fit(X, Y, verbose=0).history["loss"] != plain


# The values ---------------------------------------------------------------------------


def test_children_are_named_by_their_path():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    baked_in = BakedIn(module)
    assert baked_in.changed() is None
    module[1][0].p = 0.25
    assert baked_in.changed() == ("1.0.p", 0.5, 0.25)
    module[1][0].p = 0.5
    assert baked_in.changed() is None


def test_modes_and_private_attributes_are_not_baked_in():
    module = nn.Dropout(0.5)
    module._counter = 1
    baked_in = BakedIn(module)
    module.eval()
    module._counter = 2
    assert baked_in.changed() is None


def test_what_another_trace_changed_is_absorbed_and_nothing_else():
    module = nn.Dropout(0.5)
    module.calls = 1
    mine = BakedIn(module)
    before = BakedIn(module)
    module.calls = 2  # by forward, as it is traced
    mine.absorb(before)
    assert mine.changed() is None
    module.p = 0.1
    with pytest.raises(ConfigError, match=r"module\.p was 0\.5.*register_buffer"):
        mine.check()
