# SPDX-License-Identifier: Apache-2.0
"""Arguments of callbacks are checked when they are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ipufit
from ipufit import ConfigError, IPUModel

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("EarlyStopping", {"patience": "3"}),
        ("EarlyStopping", {"patience": NAN}),
        ("EarlyStopping", {"patience": -1}),
        ("EarlyStopping", {"patience": True}),
        ("EarlyStopping", {"min_delta": "0.1"}),
        ("EarlyStopping", {"monitor": ["loss"]}),
        ("EarlyStopping", {"baseline": "0.5"}),
        ("EarlyStopping", {"start_from_epoch": None}),
        ("EarlyStopping", {"verbose": "auto"}),
        ("ReduceLROnPlateau", {"factor": -1}),
        ("ReduceLROnPlateau", {"factor": "0.1"}),
        ("ReduceLROnPlateau", {"factor": NAN}),
        ("ReduceLROnPlateau", {"patience": NAN}),
        ("ReduceLROnPlateau", {"cooldown": 1.5}),
        ("ReduceLROnPlateau", {"min_lr": -0.1}),
        ("ReduceLROnPlateau", {"min_lr": INFINITY}),
        ("ModelCheckpoint", {"filepath": b"run"}),
        ("ModelCheckpoint", {"filepath": "run", "initial_value_threshold": "1"}),
        ("ModelCheckpoint", {"filepath": "run", "save_seconds": NAN}),
        ("BackupAndRestore", {"backup_dir": b"run"}),
        ("BackupAndRestore", {"backup_dir": "run", "keep_last": "2"}),
        ("CSVLogger", {"filename": b"log.csv"}),
        ("Profiler", {"directory": b"profile"}),
        ("Profiler", {"calls": "3"}),
        ("GradientMonitor", {"parameters": 3}),
        ("GradientMonitor", {"parameters": [None]}),
        ("Throughput", {"verbose": "yes"}),
    ],
)
def test_what_can_not_be_meant_is_refused_at_once(name, arguments):
    with pytest.raises(ConfigError, match=rf"{list(arguments)[-1]}"):
        getattr(ipufit, name)(**arguments)


def test_numbers_of_numpy_and_infinity_are_numbers():
    ipufit.EarlyStopping(min_delta=np.float32(0.1), patience=np.int64(3), verbose=True)
    ipufit.EarlyStopping(baseline=INFINITY, patience=INFINITY)
    ipufit.ReduceLROnPlateau(factor=0, cooldown=np.int64(3), min_lr=np.float32(0))


@pytest.mark.parametrize("rate", [-1.0, NAN, INFINITY])
def test_a_schedule_of_rates_below_zero_is_refused_at_its_epoch(rate):
    model = IPUModel(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    schedule = ipufit.LearningRateScheduler(lambda epoch: (0.1, rate)[epoch])
    with pytest.raises(ConfigError, match=r"schedule\(1, \.\.\.\)="):
        model.fit(
            torch.ones(2, 1), torch.ones(2, 1), 1, 2, verbose=0, callbacks=schedule
        )
    assert model.optimizer.learning_rate == pytest.approx(0.1)


def test_a_scheduler_of_torch_that_goes_below_zero_is_refused():
    module = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.LambdaLR(sgd, lambda update: 1 - update)
    model = IPUModel(module)
    model.compile(sgd, "mse", lr_schedule=falling)
    with pytest.raises(ConfigError, match=r"LambdaLR, which has lr=-0\.1"):
        model.fit(torch.ones(4, 1), torch.ones(4, 1), 1, verbose=0)


@pytest.mark.parametrize("method", ["save", "load", "save_weights", "load_weights"])
def test_paths_of_bytes_are_refused(method):
    model = IPUModel(torch.nn.Linear(1, 1))
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="is no path"):
        getattr(model, method)(b"weights.safetensors")
    with pytest.raises(ConfigError, match="resume=b'run' is no path"):
        model.fit(torch.ones(2, 1), torch.ones(2, 1), resume=b"run", verbose=0)
