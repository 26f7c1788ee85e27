# SPDX-License-Identifier: Apache-2.0
"""Arguments of callbacks are checked when they are given."""

import numpy as np
import pytest
import torch

import ipufit
from ipufit import ConfigError, IPUModel
from tests.callbacks.driving import linear

NAN, INFINITY = float("nan"), float("inf")


WEIGHTS = r"must end in \.safetensors for weights"
REFUSED = [
    ("EarlyStopping", "patience", ["3", NAN, -1, True], "of 0 or more"),
    ("EarlyStopping", "min_delta", ["0.1", NAN], "use a number"),
    ("EarlyStopping", "monitor", [["loss"], None], "name of one metric"),
    ("EarlyStopping", "baseline", ["0.5", NAN], "use a number"),
    ("EarlyStopping", "start_from_epoch", [None, -1], "of 0 or more"),
    ("EarlyStopping", "verbose", ["auto"], "use a whole number"),
    ("ReduceLROnPlateau", "factor", [-1, "0.1", NAN], "of 0 or more"),
    ("ReduceLROnPlateau", "factor", [1.0, 1.5], r"support a factor >= 1\.0"),
    ("ReduceLROnPlateau", "patience", [NAN, None], "of 0 or more"),
    ("ReduceLROnPlateau", "cooldown", [1.5, -1], "a whole number of 0 or more"),
    ("ReduceLROnPlateau", "min_lr", [-0.1, INFINITY], "of 0 or more"),
    ("LearningRateScheduler", "schedule", [lambda: 0.1, 0.1, None], r"\(epoch"),
    ("ModelCheckpoint", "filepath", [b"run", 3], "use a path"),
    (
        "ModelCheckpoint",
        "filepath",
        ["x.h5", "x.keras", "{epoch}/x.pt", "x-{epoch:02d}.h5"],
        WEIGHTS,
    ),
    ("ModelCheckpoint", "filepath", ["x.safetensors.tmp", "x-{q}-y.ckpt/"], WEIGHTS),
    ("ModelCheckpoint", "save_weights_only", [True], "but save_weights_only=True"),
    (
        "ModelCheckpoint",
        "save_freq",
        [0, 1.5, "batch", None, True],
        "a number of updates",
    ),
    ("ModelCheckpoint", "keep", [0, -1, 1.5, True, "2"], "whole number of 1 or more"),
    ("ModelCheckpoint", "initial_value_threshold", ["1", NAN], "use a number"),
    ("BackupAndRestore", "backup_dir", [b"run", None], "use a path"),
    (
        "BackupAndRestore",
        "save_freq",
        [0, -1, 1.5, True, "batch", None],
        "a number of updates",
    ),
    ("BackupAndRestore", "keep_last", ["2", 0, True], "whole number of 1 or more"),
    ("CSVLogger", "filename", [b"log.csv", None], "use a path"),
    ("CSVLogger", "separator", ["", ", ", None, 3], "one printable character"),
    ("GradientMonitor", "parameters", [3, [None]], "names of parameters"),
    ("Throughput", "verbose", ["yes", 2], "one of 0, 1, 'auto'"),
]
FIRST = {
    "ModelCheckpoint": {"filepath": "run"},
    "BackupAndRestore": {"backup_dir": "r"},
    "CSVLogger": {"filename": "log.csv"},
}


@pytest.mark.parametrize(
    ("name", "argument", "value", "message"),
    [(*one[:2], value, one[3]) for one in REFUSED for value in one[2]],
)
def test_what_can_not_be_meant_is_refused_at_once(name, argument, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        getattr(ipufit, name)(**{**FIRST.get(name, {}), argument: value})
    assert argument in str(caught.value)


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("x.safetensors", {"save_weights_only": False}, "but save_weights_only=False"),
        ("x.safetensors", {"keep": 2}, "directory of checkpoints"),
        ("runs/{q}", {"keep": 2}, "directory of checkpoints"),
    ],
)
def test_arguments_that_contradict_are_refused(path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        ipufit.ModelCheckpoint(path, **arguments)


def test_numbers_of_numpy_and_infinity_are_numbers():
    ipufit.EarlyStopping(min_delta=np.float32(0.1), patience=np.int64(3), verbose=True)
    ipufit.EarlyStopping(baseline=INFINITY, patience=INFINITY)
    ipufit.ReduceLROnPlateau(factor=0, cooldown=np.int64(3), min_lr=np.float32(0))


@pytest.mark.parametrize("rate", [-1.0, NAN, INFINITY])
def test_a_schedule_of_rates_below_zero_is_refused_at_its_epoch(rate):
    model = linear()
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
    model = linear()
    with pytest.raises(ConfigError, match="use a path"):
        getattr(model, method)(b"weights.safetensors")
    with pytest.raises(ConfigError, match="resume=b'run': use a path"):
        model.fit(torch.ones(2, 1), torch.ones(2, 1), resume=b"run", verbose=0)
