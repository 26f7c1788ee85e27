# SPDX-License-Identifier: Apache-2.0
"""`ipufit compile`: scripts whose programs are compiled and not run."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit import ConfigError, IPUConfig, IPUModel, _env, compare, poptorch
from ipufit.cli import compile_
from tests import reference

X, Y = reference.samples(32)

SCRIPT = """
import sys
import torch
import ipufit

x, y = torch.randn(32, 3), torch.randint(0, 4, (32,))
config = ipufit.IPUConfig(micro_batch_size=8)
model = ipufit.IPUModel(torch.nn.Linear(3, 4), config)
model.compile("adam", "cross_entropy", metrics=["accuracy"])
history = model.fit(x, y, epochs=int(sys.argv[1]), validation_data=(x, y))
print("losses", history.history["val_accuracy"])
model.save("saved")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(_env.COMPILE_ONLY, str(tmp_path / "compiled"))
    return tmp_path / "compiled"


def make(**config):
    model = IPUModel(torch.nn.Linear(3, 4), IPUConfig(**config))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    return model


def described(folder):
    paths = sorted(folder.glob("*.json"))
    return [json.loads(path.read_text("utf-8")) for path in paths]


def test_that_a_fit_compiles_and_gives_no_figures(folder, moves):
    model = make(micro_batch_size=8)
    before = [one.tolist() for one in model.get_weights()]
    history = model.fit(X, Y, epochs=2, validation_data=(X, Y), verbose=0)
    assert set(history.history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert all(len(values) == 2 for values in history.history.values())
    assert all(map(math.isnan, history.history["loss"]))
    assert model.history is history
    assert [one.tolist() for one in model.get_weights()] == before
    programs = described(folder)
    assert [one["program"] for one in programs] == ["inference", "training"]
    assert [one["samples_per_call"] for one in programs] == [len(X), len(X)]
    assert [one["micro_batch_size"] for one in programs] == [8, 8]
    assert moves["compiled"] == 2
    assert not moves["attachToDevice"]
    model.fit(X, Y, verbose=0)  # which has its program
    logs = model.evaluate(X, Y, verbose=0)
    assert set(logs) == {"accuracy", "loss"}
    assert len(described(folder)) == 2


def test_batches(folder, moves):
    model = make()
    assert math.isnan(model.train_on_batch(X, Y)["loss"])
    assert all(map(math.isnan, model.test_on_batch(X, Y, return_dict=False)))
    assert [one["program"] for one in described(folder)] == ["training", "inference"]
    assert moves["compiled"] == 2


@pytest.mark.parametrize(
    "predict",
    [
        lambda model: model.predict(X, verbose=0),
        lambda model: model.predict_on_batch(X),
    ],
)
def test_that_a_script_ends_at_its_first_prediction(predict, folder, capsys):
    with pytest.raises(SystemExit) as ending:
        predict(make())
    assert ending.value.code == 0
    assert len(described(folder)) == 1
    assert "first prediction" in capsys.readouterr().err


def test_that_nothing_that_was_learnt_is_overwritten(folder, tmp_path):
    model = make()
    model.save(tmp_path / "saved")
    model.save_weights(tmp_path / "weights.safetensors")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="IPUFIT_COMPILE_ONLY"):
        compare(model, (X, Y))


def test_the_options_that_poptorch_gets(folder, monkeypatch):
    config = IPUConfig(replicas=2)
    plans = config.training_plan(8), config.inference_plan(8)
    made = lambda: (  # noqa: E731
        config.build_training_options(plans[0]),
        config.build_inference_options(plans[1]),
    )
    for options in made():
        assert options.connection_type == poptorch.ConnectionType.Never
        assert options.toDict()["ipu_version"] == 2
    monkeypatch.setenv(_env.COMPILE_FOR, "21")
    assert all(options.toDict()["ipu_version"] == 21 for options in made())
    monkeypatch.delenv(_env.COMPILE_ONLY)
    for options in made():
        assert options.connection_type == poptorch.ConnectionType.Always
    monkeypatch.setenv(_env.COMPILE_FOR, "3")
    with pytest.raises(ConfigError, match="1, 2, 21"):
        IPUConfig(offline=True).build_training_options(plans[0])


def test_the_command(tmp_path, monkeypatch, capsys):
    for name in (_env.COMPILE_ONLY, _env.COMPILE_FOR, "POPTORCH_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # and back
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, "utf-8")
    arguments, path = sys.argv, list(sys.path)
    with pytest.raises(SystemExit) as ending:
        compile_(["--ipu-version", "21", "train.py", "2"])
    assert ending.value.code == 0
    shown = capsys.readouterr()
    assert "losses [nan, nan]" in shown.out
    for line, words in (
        (["missing.py"], "no script 'missing.py'"),
        ([str(tmp_path)], "is a directory"),
        (["--output", "train.py", "train.py", "2"], "train.py' can't be written"),
    ):
        with pytest.raises(SystemExit) as refused:
            compile_(line)
        assert refused.value.code == 2
        assert words in capsys.readouterr().err
    assert "2 programs compiled" in shown.err
    programs = described(tmp_path / "compiled")
    assert [one["program"] for one in programs] == ["inference", "training"]
    assert os.environ[_env.COMPILE_FOR] == "21"
    assert os.environ["POPTORCH_CACHE_DIR"] == str(tmp_path / "compiled" / "cache")
    assert not (tmp_path / "saved").exists()
    assert (sys.argv, sys.path) == (arguments, path)


def test_that_a_script_goes_on_after_files_that_it_has_not_written(
    folder, tmp_path, capsys
):
    model = make(micro_batch_size=8)
    before = model.get_weights()
    saving = ipufit.ModelCheckpoint(tmp_path / "run" / "{epoch}.safetensors")
    model.fit(X, Y, verbose=0, callbacks=[saving])
    model.save_weights(tmp_path / "weights.safetensors")
    model.load_weights(tmp_path / "weights.safetensors")
    model.load(tmp_path / "whole")
    model.set_weights(ipufit.average_checkpoints(tmp_path / "run", last=2))
    model.fit(X, Y, 16, verbose=0, resume=tmp_path / "whole")
    assert [one["program"] for one in described(folder)] == ["training"] * 2
    assert all((a == b).all() for a, b in zip(before, model.get_weights()))
    assert capsys.readouterr().err.count("Weights stay as they are") == 4
