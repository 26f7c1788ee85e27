# SPDX-License-Identifier: Apache-2.0
"""Malformed arguments of anything public are refused by errors of ipufit.

Each argument of each public class, and of each method of a model, is replaced by values
that it can't mean. Whatever isn't refused when it is given has to work in a run.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import ipufit
from ipufit import ConfigError, IpufitError, IPUModel, callbacks, metrics

X = torch.linspace(-1, 1, 16).reshape(8, 2)
Y = X.sum(1, keepdim=True)


VALUES = {
    "None": None,
    "a word": "x",
    "no word": "",
    "NUL": "a\0b",
    "long": "a" * 5000,
    "half a character": "\ud800",
    "bytes": b"x",
    "-1": -1,
    "0": 0,
    "True": True,
    "2**70": 2**70,
    "-10**400": -(10**400),
    "10**5000": 10**5000,
    "1e40": 1e40,
    "0.5": 0.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "complex": 1j,
    "object": object(),
    "objects": [object()],
    "no list": [],
    "dict": {"loss": "x"},
    "array": np.array([1, 2]),
    "words": np.array(["a", "b"]),
    "0-d": np.array(3),
    "tensor": torch.tensor([1, 2]),
    "no tensor": torch.empty(0),
    "path": Path("a\0b"),
    "generator": (number for number in ()),
    "module": torch,
}
REQUIRED = {
    "ModelCheckpoint": {"filepath": "checkpoint"},
    "BackupAndRestore": {"backup_dir": "backup"},
    "CSVLogger": {"filename": "log.csv"},
    "LearningRateScheduler": {"schedule": lambda epoch: 0.1},
    "ReduceLROnPlateau": {"monitor": "loss"},
    "StopAfter": {"minutes": 60},
    "CallbackList": {"callbacks": ()},
    "FunctionMetric": {"name": "difference", "function": torch.sub},
    "TorchMetric": {"name": "mean", "metric": torch.nn.Identity()},
    "Optimizer": {"name": "sgd"},
    "StreamedFunction": {"function": torch.sub},
    "CheckpointStore": {"directory": "store"},
    "Schedule": {"name": "cosine"},
    "LossScaleRamp": {"initial": 1.0, "factor": 2.0, "every_updates": 8, "maximum": 9},
    "Mixing": {"mixup": 0.2},
    "CachedDataset": {"dataset": X},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
ELSEWHERE = {"TensorBoard", "WandbLogger", "MLflowLogger", "OptunaPruning"}
"""Callbacks that need other packages."""
CALLBACKS = sorted({*callbacks.__all__} - ELSEWHERE - {"make_progress"})
OTHERS = {
    name: getattr(home, name)
    for home, names in (
        (metrics, metrics.__all__),
        (
            ipufit,
            (
                "IPUConfig",
                "CachedDataset",
                "CheckpointStore",
                "LossScaleRamp",
                "Mixing",
                "Optimizer",
                "Schedule",
            ),
        ),
    )
    for name in names
}
OTHERS = {
    name: kind
    for name, kind in OTHERS.items()
    if inspect.isclass(kind) and not inspect.isabstract(kind)
}


def parameters_of(function):
    named = inspect.signature(function).parameters.values()
    return [
        one.name
        for one in named
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]


def raw_errors(required, function, finish=lambda made: None):
    """Call a function with each value for each argument; list errors of others."""
    raw, output = [], io.StringIO()
    for argument in parameters_of(function):
        for words, value in VALUES.items():
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(output):
                    warnings.simplefilter("ignore")
                    finish(function(**{**required, argument: value}))
            except IpufitError:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is
                raw.append(f"{argument}=<{words}>: {type(error).__name__}: {error}")
    return raw


def compiled():
    torch.manual_seed(0)
    model = IPUModel(torch.nn.Linear(2, 1), ipufit.IPUConfig(device_iterations=1))
    model.compile("sgd", "mse")
    return model


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_check_their_arguments_when_they_are_made(name):
    model = compiled()

    def run(made):
        model.fit(X, Y, 4, verbose=0, callbacks=made)

    assert raw_errors(REQUIRED.get(name, {}), getattr(callbacks, name), run) == []


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_classes_check_their_arguments_when_they_are_made(name):
    assert raw_errors(REQUIRED.get(name, {}), OTHERS[name]) == []


OF_DATA = {"x": X, "y": Y, "batch_size": 4}
METHODS = {
    "fit": {**OF_DATA, "verbose": 0},
    "evaluate": {**OF_DATA, "verbose": 0},
    "predict": {"x": X, "batch_size": 4, "verbose": 0},
    "train_on_batch": {"x": X, "y": Y},
    "test_on_batch": {"x": X, "y": Y},
    "predict_on_batch": {"x": X},
    "batch_plan": OF_DATA,
    "plan": OF_DATA,
    "build": OF_DATA,
    "check": OF_DATA,
    "summary": {"x": X},
    "set_weights": {"weights": [torch.ones(1, 2), torch.ones(1)]},
    "save_weights": {"path": "weights.safetensors"},
    "load_weights": {"path": "weights.safetensors"},
    "swap_weights": {"is_average": False},
    "save": {"path": "saved"},
    "checkpoint": {"copied": True},
    "load": {"path": "saved"},
    "export": {"path": "program.popef", "x": X},
    "compile": {"optimizer": "sgd", "loss": "mse"},
    "benchmark": {**OF_DATA, "calls": 1, "repeats": 1, "warmup": 0},
}
NO_LIMIT = {("benchmark", "repeats"), ("benchmark", "calls"), ("benchmark", "warmup")}


def test_every_method_with_arguments_is_called():
    public = {
        name
        for name, method in inspect.getmembers(IPUModel, inspect.isfunction)
        if name[0] != "_" and len(parameters_of(method)) > 1
    }
    assert public == {*METHODS}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_refuse_what_they_can_not_use_and_the_model_goes_on(name):
    model = compiled()
    model.save("saved")
    model.save_weights("weights.safetensors")
    assert raw_errors(METHODS[name], getattr(model, name)) == []
    model.compile("sgd", "mse")
    assert model.fit(X, Y, 4, verbose=0).history["loss"]


@pytest.mark.parametrize(
    "variable", ["IPUFIT_REPLICAS", "IPUFIT_PROCESS_TIMEOUT", "IPUFIT_COMPILE_FOR"]
)
@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5e", "²", "9" * 5000])
def test_variables_with_nonsense_are_refused_even_if_nothing_needs_them(
    variable, text, monkeypatch
):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=f"^{variable}="):
        IPUModel(torch.nn.Linear(2, 1))
