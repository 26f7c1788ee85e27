# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of a run holds, and which ones are refused."""

from __future__ import annotations

import pytest
import torch

import ipufit
from ipufit import (
    ConfigError,
    DamagedCheckpointError,
    IPUConfig,
    IPUModel,
    Optimizer,
)
from ipufit.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ipufit.resume import TrainedState, check_has_run, check_weights, position_of
from tests.checkpoint.samples import same
from tests.reference import network, samples


def make(optimizer="adam", **config):
    model = IPUModel(network(), IPUConfig(**config))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"])
    return model


def taken(model, *, at=1, epochs=1, callbacks=()):
    """The checkpoint after an update of a fit, and after the epoch."""
    made = []

    class Taker(ipufit.Callback):
        is_saved = False

        def on_train_batch_end(self, batch, logs):
            if self.run.updates == at:
                self.run.after_hooks(lambda: made.append(self.model.checkpoint()))

        def on_epoch_end(self, epoch, logs):
            self.run.after_hooks(lambda: made.append(self.model.checkpoint()))

    x, y = samples(12)
    hooks = [*callbacks, Taker()]
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=hooks)
    return made


def test_a_checkpoint_says_where_the_run_is():
    inside, between = taken(make(seed=5), at=2)
    assert inside.state["run"] == {
        "epoch": 0,
        "calls": 2,
        "updates": 2,
        "samples": 8,
        "stop_reason": None,
    }
    assert position_of(inside) == (0, 2)
    assert inside.state["data"]["seed"] == 5
    assert inside.state["figures"]["sums"][0] == 8
    assert between.state["run"]["epoch"] == 1
    assert between.state["run"]["calls"] == 0
    assert between.state["figures"] is None
    assert list(between.state["callbacks"]) == ["0:History"]


def test_a_checkpoint_of_a_run_survives_writing(tmp_path):
    stopping = ipufit.EarlyStopping("loss", restore_best_weights=True)
    optimizer = Optimizer("adam", 0.1, ema_momentum=0.9)
    for number, checkpoint in enumerate(taken(make(optimizer), callbacks=[stopping])):
        write_checkpoint(tmp_path / str(number), checkpoint)
        assert same(load_checkpoint(tmp_path / str(number)), checkpoint)


def test_later_updates_do_not_change_what_was_taken():
    early, late = taken(make(), at=1)
    assert early.state["updates"]["num_updates"] == 1
    for group in ("model", "optimizer"):
        names = early.tensors[group]
        assert any(
            not torch.equal(names[name], late.tensors[group][name]) for name in names
        ), group


def test_a_model_alone_has_no_place():
    model = make()
    checkpoint = model.checkpoint()
    assert set(checkpoint.tensors) == {"model", "optimizer"}
    with pytest.raises(ConfigError, match="not the place of a run"):
        check_has_run(checkpoint)
    assert model.checkpoint().state == checkpoint.state
    (_, done) = taken(model)
    check_has_run(done)
    with pytest.raises(ConfigError, match=r"model\.load"):
        check_has_run(model.checkpoint())  # the run is over


def test_a_checkpoint_that_is_refused_changes_nothing():
    model = make()
    other = make(Optimizer("sgd", 0.5, momentum=0.9))
    taken(other)
    before = model.checkpoint()
    with pytest.raises(ConfigError, match=r"of SGD.*got Adam"):
        trained_state_of(model).put_back(other.checkpoint())
    assert same(model.checkpoint(), before)
    strange = Checkpoint({"model": {}}, before.state)
    with pytest.raises(DamagedCheckpointError, match=r"bias of model is missing"):
        trained_state_of(model).put_back(strange)
    assert same(model.checkpoint(), before)


def trained_state_of(model):
    settings = model._settings
    return TrainedState(model._executors, settings.optimization, settings.average)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"w": torch.zeros(3)},
        {"w": torch.zeros(2, dtype=torch.float16)},
        {"w": torch.zeros(2), "v": torch.zeros(2)},
    ],
)
def test_weights_of_another_module_are_refused(given):
    with pytest.raises(ConfigError, match="another module"):
        check_weights({"w": torch.zeros(2)}, given)
    check_weights({"w": torch.zeros(2)}, {"w": torch.ones(2)})


def test_a_rate_that_was_set_after_the_last_call_counts_after_loading():
    # The state that was read back has the rate of the last call.
    x, y = samples(8)
    model, other = make(Optimizer("sgd", 0.1)), make(Optimizer("sgd", 0.3))
    model.train_on_batch(x, y)
    model.optimizer.param_groups[0]["lr"] = 0.0
    trained_state_of(other).put_back(model.checkpoint())
    before = other.get_weights()
    other.train_on_batch(x, y)
    assert all((a == b).all() for a, b in zip(before, other.get_weights()))


def test_a_new_program_has_the_rate_that_was_set_before_it():
    x, y = samples(8)
    model = make(Optimizer("sgd", 0.1))
    model.train_on_batch(x, y)
    model.optimizer.param_groups[0]["lr"] = 0.0
    before = model.get_weights()
    model.train_on_batch(x[:4], y[:4])  # of other shapes, so it is compiled anew
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
