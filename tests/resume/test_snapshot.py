# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of a run holds, and which ones are refused."""

from __future__ import annotations

import pytest
import torch

import ipufit
from ipufit import ConfigError, IPUModel, Optimizer
from tests.files.samples import same
from tests.reference import compiled, samples


def make(optimizer="adam", **config):
    return compiled(**config, optimizer=optimizer, metrics=["accuracy"])


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
    assert inside.state["data"]["place"] == [0, 2]
    assert inside.state["data"]["seed"] == 5
    assert inside.state["figures"]["sums"][0] == 8
    assert between.state["run"]["epoch"] == 1
    assert between.state["run"]["calls"] == 0
    assert between.state["figures"] is None
    assert list(between.state["callbacks"]) == ["0:History"]


def test_a_checkpoint_that_is_refused_changes_nothing(tmp_path):
    model = make()
    other = make(Optimizer("sgd", 0.5, momentum=0.9))
    taken(other)
    before = model.checkpoint()
    other.save(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"of SGD.*got Adam"):
        model.load(tmp_path / "a")
    assert same(model.checkpoint(), before)


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.Linear(2, 1),
        torch.nn.Linear(3, 1, bias=False),
        torch.nn.Linear(2, 1, bias=False).half(),
        torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False)),
    ],
)
def test_weights_of_another_module_are_refused(module, tmp_path):
    models = [IPUModel(torch.nn.Linear(2, 1, bias=False)), IPUModel(module)]
    for model in models:
        model.compile("sgd", "mse")
    models[1].save(tmp_path / "a")
    with pytest.raises(ConfigError, match="another module"):
        models[0].load(tmp_path / "a")


def test_a_rate_that_was_set_after_the_last_call_counts_after_loading(tmp_path):
    # The state that was read back has the rate of the last call.
    x, y = samples(8)
    model, other = make(Optimizer("sgd", 0.1)), make(Optimizer("sgd", 0.3))
    model.train_on_batch(x, y)
    model.optimizer.param_groups[0]["lr"] = 0.0
    model.save(tmp_path / "a")
    other.load(tmp_path / "a")
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
