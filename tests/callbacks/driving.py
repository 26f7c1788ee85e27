# SPDX-License-Identifier: Apache-2.0
"""A fit without a model: scripted figures go to callbacks, and what they do is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from ipufit import IPUConfig, IPUModel
from ipufit.callbacks import CallbackList
from ipufit.checkpoint import Checkpoint
from ipufit.state import RunState


def linear(inputs=1, **config):
    """A compiled model of one layer with one output."""
    model = IPUModel(torch.nn.Linear(inputs, 1), IPUConfig(**config))
    model.compile("sgd", "mse")
    return model


class ScriptedModel:
    """What callbacks touch of a model; its weights are the number of the epoch."""

    def __init__(self, rates=(1.0,), *, has_lr_schedule=False):
        groups = [{"params": [], "lr": rate} for rate in rates]
        self.optimizer = SimpleNamespace(param_groups=groups)
        self.has_lr_schedule = has_lr_schedule
        self.weights = [np.array(-1)]
        self.saved = []
        self.num_updates = 0
        self.weight_average = None

    @property
    def rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_weights(self):
        return [weight.copy() for weight in self.weights]

    def set_weights(self, weights):
        self.weights = [weight.copy() for weight in weights]

    def swap_weights(self, *, is_average, is_joint=False):
        pass

    def save_weights(self, path, *, moment=None):
        assert Path(path).parent.is_dir()
        self.saved.append(Path(path).name)

    def checkpoint(self, *, copied=True):
        return Checkpoint({}, {"epoch": int(self.weights[0])})


@dataclass
class Played:
    """What came of a run."""

    epochs: list = field(default_factory=list)
    logs: list = field(default_factory=list)
    rates: list = field(default_factory=list)  # after each epoch, of the first group
    group_rates: list = field(default_factory=list)  # after each epoch, of all groups
    run: RunState = field(default_factory=RunState)
    states: list = field(default_factory=list)  # of the callbacks, after each epoch


def play(
    callbacks,
    series,
    *,
    model=None,
    directions=(),
    batches=0,
    begin=0,
    state=None,
):
    """Run the hooks as `fit` does, with figures that were made up.

    A figure of None isn't in the logs of its epoch. With a state the run is one that
    goes on.
    """
    model = model or ScriptedModel()
    params = {"epochs": begin + len(series), "steps": batches}
    run = RunState(directions=dict(directions), params=params)
    hooks = CallbackList(callbacks)
    hooks.set_model(model)
    hooks.set_run(run)
    played = Played(run=run)
    hooks.on_train_begin({})
    if state is not None:
        hooks.load_state_dict(state)
    for epoch, figures in enumerate(series, begin):
        if not isinstance(figures, dict):
            figures = {} if figures is None else {"q": figures}
        run.epoch, run.is_epoch_done = epoch, False
        hooks.on_epoch_begin(epoch, {})
        for batch in range(batches):
            hooks.on_train_batch_begin(batch, {})
            run.updates += 1
            hooks.on_train_batch_end(batch, dict(figures))
            run.act()
        model.weights = [np.array(epoch)]
        logs = dict(figures)
        hooks.on_epoch_end(epoch, logs)
        run.is_epoch_done = True
        run.act()
        played.epochs.append(epoch)
        played.logs.append(logs)
        played.rates.append(model.rates[0])
        played.group_rates.append(model.rates)
        played.states.append(hooks.state_dict())
        if run.stop_reason is not None:
            break
    hooks.on_train_end({})
    hooks.close()
    run.act()
    return played
