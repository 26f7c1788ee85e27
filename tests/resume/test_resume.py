# SPDX-License-Identifier: Apache-2.0
"""A run that is interrupted after any call and resumed is the run that wasn't."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
from ipufit import (
    EarlyStopping,
    GradientMonitor,
    IPUConfig,
    IPUModel,
    LearningRateScheduler,
    LossScaleRamp,
    Mixing,
    Optimizer,
    ReduceLROnPlateau,
    Schedule,
    SwapEMAWeights,
)
from ipufit.checkpoint import write_checkpoint
from ipufit.data.random_state import random_state
from tests.data.stateful import StatefulLoader
from tests.files.samples import same_tensors
from tests.reference import NUM_CLASSES, NUM_FEATURES, samples
from tests.strategies import in_quarters

COUNT = 24


pytestmark = [
    pytest.mark.floor,
    pytest.mark.usefixtures("unsynced"),
    pytest.mark.filterwarnings(
        "ignore::ipufit.errors.IpufitWarning",
        "ignore:The epoch parameter in .scheduler.step",  # torch 2.0 warns of itself
    ),
]


# What is trained, and how ------------------------------------------------------


def network(*, norm=False):
    return torch.nn.Sequential(
        torch.nn.Linear(NUM_FEATURES, 5),
        torch.nn.BatchNorm1d(5) if norm else torch.nn.Tanh(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(5, NUM_CLASSES),
    )


class Augmented(Dataset):
    """Samples that differ each time, by all random numbers of this process."""

    def __init__(self, count=COUNT):
        self.x, self.y = samples(count)
        self.asked = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.asked.append(int(index))
        noise = random.random() + np.random.rand() + random.gauss(0, 1)
        return self.x[index] + noise + torch.randn(NUM_FEATURES), self.y[index]


@dataclass
class Scenario:
    """How a model is made and fitted; each function gives new objects."""

    config: dict = field(default_factory=dict)
    optimizer: Callable[..., Any] = lambda module: Optimizer("adam", 0.05)
    compiled: dict = field(default_factory=dict)
    module: Callable[[], Any] = network
    data: Callable[[], Any] = lambda: dict(zip("xy", samples(COUNT)))
    fitted: dict = field(default_factory=dict)
    callbacks: Callable[[], Any] = list
    loss: Any = "cross_entropy"

    def model(self):
        model = IPUModel(self.module(), IPUConfig(**self.config))
        loss = self.loss() if isinstance(self.loss, type) else self.loss
        model.compile(self.optimizer(model.module), loss, **self.compiled)
        return model

    def fit(self, model, callbacks=(), **more):
        arguments = {"batch_size": 4, "epochs": 3, "verbose": 0, **self.fitted, **more}
        return model.fit(**self.data(), **arguments, callbacks=callbacks)


class Saver(ipufit.Callback):
    """Makes a checkpoint after every call and every epoch, and writes some of them."""

    is_saved = False

    def __init__(self, folder, first=0, every=1):
        self.folder = folder
        self.first, self.every = first, every
        self.made = 0
        self.saved = []

    @classmethod
    def of_some(cls, folder, number):
        """One that begins at another call for each number of a scenario."""
        return cls(folder, number % 8, every=8)

    def on_train_batch_end(self, batch, logs):
        self.run.after_hooks(self._save)

    def on_epoch_end(self, epoch, logs):
        self.run.after_hooks(self._save)

    def _save(self):
        checkpoint = self.model.checkpoint()
        if self.made % self.every == self.first:
            path = self.folder / f"{self.made:02}"
            write_checkpoint(path, checkpoint)
            self.saved.append((path, len(self.recorder.seen)))
        self.made += 1


class Watcher(ipufit.Callback):
    """Keeps what each hook of a training run was told."""

    is_saved = False

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, batch, logs):
        self.seen.append(
            ("call", batch, self.run.updates, self.run.samples, dict(logs))
        )

    def on_epoch_begin(self, epoch, logs):
        self.seen.append(("begin", epoch))

    def on_epoch_end(self, epoch, logs):
        self.seen.append(("end", epoch, dict(logs)))

    def on_test_batch_end(self, batch, logs):
        self.seen.append(("test", batch, dict(logs)))


@dataclass
class Result:
    """Everything that a run leaves."""

    tensors: dict
    state: Any
    history: dict
    epochs: list
    callbacks: list
    random: dict
    device: Any


def result_of(model, history, callbacks):
    checkpoint = model.checkpoint()
    return Result(
        checkpoint.tensors,
        checkpoint.state,
        history.history,
        history.epoch,
        [one.state_dict() for one in callbacks],
        random_state(),
        model._executors._trainer.executor.rng_state,
    )


def in_order(state):
    """A state as text: NaN equals NaN, and the order of names doesn't matter."""
    return json.dumps(state, sort_keys=True)


def assert_same(result, expected):
    assert result.history == expected.history
    assert result.epochs == expected.epochs
    assert in_order(result.state) == in_order(expected.state)
    assert result.tensors.keys() == expected.tensors.keys()
    for group, tensors in expected.tensors.items():
        assert same_tensors(result.tensors[group], tensors), group
    assert repr(result.callbacks) == repr(expected.callbacks)
    assert result.device == expected.device
    assert same_tensors(result.random, expected.random)


def seeded(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def unbroken(scenario, *more):
    """A run from the beginning to the end."""
    seeded(1)
    model, callbacks, watcher = scenario.model(), scenario.callbacks(), Watcher()
    for one in more:
        one.recorder = watcher
    history = scenario.fit(model, [*callbacks, *more, watcher])
    assert history.epoch
    return result_of(model, history, callbacks), watcher.seen


def resumed(scenario, path):
    """A run of another process, which has other weights and random numbers."""
    seeded(2)
    model, callbacks, watcher = scenario.model(), scenario.callbacks(), Watcher()
    history = scenario.fit(model, [*callbacks, watcher], resume=path)
    return result_of(model, history, callbacks), watcher.seen


# Every call --------------------------------------------------------------------


def momentum_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def scheduled(make, optimizer=momentum_sgd):
    return Scenario(
        optimizer=lambda module: optimizer(module.parameters()),
        compiled={"lr_schedule": make},
    )


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, total_steps=30, cycle_momentum=True
    )


def sequential(optimizer):
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


def chained(optimizer):
    parts = [
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
        lr_scheduler.LinearLR(optimizer, total_iters=8),
    ]
    return lr_scheduler.ChainedScheduler(parts)


def validated():
    x, y = samples(10, seed=5)
    return {"validation_data": (x, y)}


class Counting(torch.nn.Module):
    """Has a buffer that isn't in the state dict, and depends on it."""

    def __init__(self):
        super().__init__()
        self.body = network()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls.add_(1.0)
        return self.body(x) * self.calls.add(9).div(10)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(NUM_FEATURES, 5)
        self.drop = torch.nn.Dropout(0.2)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(5, 4), torch.nn.Linear(5, 1)])

    def forward(self, x):
        hidden = self.drop(torch.tanh(self.body(x)))
        return {"kind": self.heads[0](hidden), "size": self.heads[1](hidden)}


def two_targets():
    x, y = samples(COUNT)
    return {"x": x, "y": {"kind": y, "size": x[:, :1]}}


def weighted():
    x, y = samples(COUNT)
    return {"x": x, "y": y, "sample_weight": torch.linspace(0.1, 2, COUNT)}


def loader(batch_size=4):
    def make():
        own = torch.Generator().manual_seed(7)
        data = TensorDataset(*samples(COUNT))
        return {"x": DataLoader(data, batch_size, shuffle=True, generator=own)}

    return make


class Stream(IterableDataset):
    def __iter__(self):
        for x, y in zip(*samples(COUNT)):
            yield x + torch.randn(NUM_FEATURES), y


def batches_of(count):
    x, y = samples(count)
    return (pair for pair in zip(x.split(5), y.split(5)))


class Fading(torch.nn.Module):
    """A loss whose weight a callback lowers, and which remembers what it has seen."""

    newest = None

    def __init__(self):
        super().__init__()
        Fading.newest = self
        self.register_buffer("share", torch.tensor(1.0))
        self.register_buffer("seen", torch.ones(1))

    def forward(self, outputs, targets):
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        if self.training:
            self.seen.mul_(0.5).add_(loss.detach())
        return loss * self.share + (loss - self.seen).pow(2).mean()


class Fade(ipufit.Callback):
    def on_train_batch_begin(self, batch, logs):
        Fading.newest.share.mul_(0.9)


SCENARIOS = {
    "plain": Scenario(),
    "seeded": Scenario(config={"seed": 3}),
    "unshuffled": Scenario(fitted={"shuffle": False}),
    "augmented": Scenario(data=lambda: {"x": Augmented()}),
    "cached": Scenario(
        data=lambda: {"x": ipufit.CachedDataset([*zip(*samples(COUNT))])}
    ),
    "sgd": Scenario(optimizer=lambda module: Optimizer("sgd", 0.1, momentum=0.9)),
    "rmsprop": Scenario(optimizer=lambda module: "rmsprop"),
    "lamb": Scenario(optimizer=lambda module: "lamb"),
    "groups": Scenario(
        optimizer=lambda module: torch.optim.AdamW(
            [
                {"params": module[0].parameters(), "lr": 0.1},
                {"params": module[3].parameters(), "weight_decay": 0.3},
            ]
        )
    ),
    "schedule": Scenario(compiled={"lr_schedule": "cosine"}),
    "schedule of all fits": Scenario(
        compiled={"lr_schedule": Schedule("linear", warmup_updates=3, total_updates=40)}
    ),
    "schedule in epochs": Scenario(
        compiled={
            "lr_schedule": Schedule("step", warmup_epochs=0.5, boundary_epochs=(1, 2))
        }
    ),
    "schedule in epochs of all fits": Scenario(
        compiled={"lr_schedule": Schedule("linear", warmup_epochs=1, total_epochs=4.5)}
    ),
    "velocity that follows a ramp": Scenario(
        optimizer=lambda module: Optimizer(
            "sgd",
            0.05,
            momentum=0.9,
            use_combined_accum=True,
            loss_scaling=LossScaleRamp(1.0, 2.0, 2, 64.0),
        )
    ),
    "schedules of other values": Scenario(
        optimizer=lambda module: Optimizer("adamw", 0.05, weight_decay=0.2),
        compiled={
            "schedules": {
                "weight_decay": Schedule("cosine", final=3.0),
                "beta1": Schedule("exponential", gamma=0.9, every_epochs=1),
            }
        },
    ),
    "scheduler stepped per epoch": scheduled(
        ipufit.PerEpoch(lambda sgd: lr_scheduler.StepLR(sgd, 1, gamma=0.5))
    ),
    "StepLR": scheduled(lambda sgd: lr_scheduler.StepLR(sgd, 4, gamma=0.5)),
    "OneCycleLR": scheduled(one_cycle),
    "OneCycleLR of betas": scheduled(one_cycle, torch.optim.AdamW),
    "LambdaLR": scheduled(lambda sgd: lr_scheduler.LambdaLR(sgd, lambda n: 0.9**n)),
    "SequentialLR": scheduled(sequential),
    "MultiStepLR": scheduled(lambda sgd: lr_scheduler.MultiStepLR(sgd, [3, 7, 7])),
    "CyclicLR": scheduled(lambda sgd: lr_scheduler.CyclicLR(sgd, 0.01, 0.1, 3)),
    "ChainedScheduler": scheduled(chained),
    "average": Scenario(
        optimizer=lambda module: Optimizer("sgd", 0.1, ema_momentum=0.8)
    ),
    "loss scale": Scenario(
        optimizer=lambda module: Optimizer(
            "adam", 0.05, loss_scaling=LossScaleRamp(1.0, 2.0, 2, 64.0)
        )
    ),
    "callbacks": Scenario(
        data=lambda: {**dict(zip("xy", samples(COUNT))), **validated()},
        callbacks=lambda: [
            EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        ],
        fitted={"epochs": 5, "batch_size": 8},
        compiled={"metrics": ["accuracy"]},
    ),
    "average that is looked at": Scenario(
        optimizer=lambda module: Optimizer("adam", 0.05, ema_momentum=0.8),
        data=lambda: {**dict(zip("xy", samples(COUNT))), **validated()},
        callbacks=lambda: [SwapEMAWeights(swap_on_epoch=True)],
    ),
    "rate of an epoch": Scenario(
        callbacks=lambda: [LearningRateScheduler(lambda epoch, rate: rate / 2)]
    ),
    "validation": Scenario(
        data=lambda: {**dict(zip("xy", samples(COUNT))), **validated()},
        fitted={"validation_freq": 2},
        compiled={"metrics": ["accuracy", "f1"]},
    ),
    "validation within epochs": Scenario(
        data=lambda: {**dict(zip("xy", samples(COUNT))), **validated()},
        fitted={"validation_freq": 2, "validation_updates": 2},
        compiled={"metrics": ["accuracy"]},
    ),
    "validation between calls that draw": Scenario(
        data=lambda: {
            "x": DataLoader(Augmented(), 6, shuffle=True),
            "validation_data": DataLoader(Augmented(10), 3, shuffle=True),
        },
        fitted={"validation_updates": 2, "batch_size": 6},
    ),
    "validation by a generator": Scenario(
        data=lambda: {
            **dict(zip("xy", samples(COUNT))),
            "validation_data": batches_of(200),
        },
        fitted={"validation_steps": 2, "validation_updates": 2},
    ),
    "validation by generators and by a loader with a state": Scenario(
        data=lambda: {
            **dict(zip("xy", samples(COUNT))),
            "validation_data": {
                "short": batches_of(40),
                "loader": StatefulLoader(*samples(22, seed=5), 4),
            },
        },
        fitted={"validation_steps": 1, "validation_batch_size": 7},
    ),
    "mixed": Scenario(
        config={"micro_batch_size": 2, "device_iterations": 2},
        compiled={"augment": Mixing(mixup=0.4), "label_smoothing": 0.1},
        fitted={"shuffle": False},
    ),
    "class weights": Scenario(fitted={"class_weight": {0: 2.0, 1: 0.5}}),
    "sample weights": Scenario(data=weighted),
    "padded": Scenario(
        data=lambda: dict(zip("xy", samples(22))), fitted={"drop_last": "pad"}
    ),
    "rows left out": Scenario(data=lambda: dict(zip("xy", samples(22)))),
    "epochs that are no passes": Scenario(
        data=lambda: {"x": Augmented()}, fitted={"steps_per_epoch": 4}
    ),
    "several iterations": Scenario(
        config={"device_iterations": 2, "micro_batch_size": 2}, fitted={"batch_size": 4}
    ),
    "replicas": Scenario(
        config={"replicas": 2, "device_iterations": 3, "micro_batch_size": 1}
    ),
    "pipeline": Scenario(config={"pipeline": ("0", "3"), "gradient_accumulation": 4}),
    "a buffer beside the state dict": Scenario(module=Counting),
    "batch norm": Scenario(module=lambda: network(norm=True)),
    "loader": Scenario(data=loader(), fitted={"batch_size": None}),
    "loader of odd batches": Scenario(
        data=loader(batch_size=7), fitted={"drop_last": "pad"}
    ),
    "loader of torch's own numbers": Scenario(
        data=lambda: {
            "x": DataLoader(Augmented(), 6, shuffle=True),
            "validation_data": DataLoader(Augmented(10), 3, shuffle=True),
        },
        config={"seed": 1},
    ),
    "loader and steps": Scenario(
        data=lambda: {"x": DataLoader(Augmented(), 6, shuffle=True)},
        fitted={"steps_per_epoch": 4},
    ),
    "iterable": Scenario(data=lambda: {"x": Stream()}),
    "generator": Scenario(
        data=lambda: {"x": batches_of(3 * COUNT)}, fitted={"steps_per_epoch": 5}
    ),
    "numbers that a validation draws in mid-pass": Scenario(
        data=lambda: {"x": Augmented(), "validation_data": Augmented(10)},
        fitted={"steps_per_epoch": 4},
    ),
    "numbers that a validation draws in mid-stream": Scenario(
        data=lambda: {"x": Stream(), "validation_data": Augmented(10)},
        fitted={"steps_per_epoch": 4},
    ),
    "validation by several workers": Scenario(
        data=lambda: {**loader(8)(), "validation_data": Augmented(10)},
        config={"num_workers": 2},
        fitted={"batch_size": None, "epochs": 2},
    ),
    "asynchronous": Scenario(
        data=lambda: {"x": Augmented()},
        config={"loader_mode": "async"},
        fitted={"epochs": 2, "batch_size": 8},
    ),
    "augmented by several workers": Scenario(
        data=lambda: {"x": Augmented()},
        config={"num_workers": 2},
        fitted={"epochs": 2, "batch_size": 8, "shuffle": False},
    ),
    "several outputs": Scenario(
        module=TwoHeads,
        data=two_targets,
        loss={"kind": "cross_entropy", "size": "mse"},
    ),
    "gradients": Scenario(callbacks=lambda: [GradientMonitor(is_detailed=True)]),
    "buffers of a loss": Scenario(loss=Fading, callbacks=lambda: [Fade()]),
    "half": Scenario(
        config={"precision": "float16"},
        data=lambda: {"x": samples(COUNT)[0].half(), "y": samples(COUNT)[1]},
    ),
}


@in_quarters
@pytest.mark.parametrize("name", SCENARIOS)
def test_resuming_after_any_call_is_as_not_having_stopped(name, quarter, tmp_path):
    scenario, number = SCENARIOS[name], list(SCENARIOS).index(name)
    saver = Saver.of_some(tmp_path, number + 2 * quarter)
    expected, seen = unbroken(scenario, saver)
    assert saver.made > len(expected.epochs)
    if quarter == 1:
        unsaved, seen_again = unbroken(scenario)
        assert_same(unsaved, expected)
        assert repr(seen_again) == repr(seen)
    assert saver.saved
    # Every day from each other place.
    places = saver.saved if quarter else saver.saved[number % 2 :: 2] or saver.saved
    for path, num_seen in places:
        result, rest = resumed(scenario, path)  # saves nothing: saving changes nothing
        assert_same(result, expected)
        assert repr(rest) == repr(seen[num_seen:])
