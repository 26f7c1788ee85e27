# SPDX-License-Identifier: Apache-2.0
"""The average of checkpoints: which, in which order, and the numbers."""

from __future__ import annotations

import math
import os

import pytest
import safetensors
import safetensors.torch
import torch

from ipufit import CheckpointStore, IPUModel, ModelCheckpoint, average_checkpoints
from ipufit.callbacks import LambdaCallback
from ipufit.checkpoint import (
    Checkpoint,
    SavedAt,
    load_weights,
    save_weights,
    write_checkpoint,
)
from ipufit.errors import (
    CheckpointWarning,
    ConfigError,
    DamagedCheckpointError,
    DataError,
    MissingCheckpointError,
    UnsupportedError,
)


def weights_of(value):
    return {"w": torch.full((2,), float(value))}


def write(folder, values, form="e{}.safetensors", **figures):
    """A file or a checkpoint for each number, whose weights are the number."""
    for index, value in enumerate(values):
        moments = {"update": value, "monitor": "val_loss", "mode": "min"}
        named = {name: given[index] for name, given in figures.items()}
        moment = SavedAt(**{**moments, **named}) if figures else None
        path = folder / form.format(value)
        if form.endswith(".safetensors"):
            save_weights(weights_of(value), path, moment=moment)
        else:
            write_checkpoint(
                path, Checkpoint({"model": weights_of(value)}), moment=moment
            )


def average(folder, **arguments):
    return average_checkpoints(folder, **arguments)["w"][0].item()


# Which ------------------------------------------------------------------------------

FORMS = ["e{}.safetensors", "run-{}"]


@pytest.mark.parametrize("form", FORMS)
def test_the_last_are_those_of_the_highest_numbers(tmp_path, form):
    write(tmp_path, [8, 9, 10, 100], form)
    assert average(tmp_path, last=2) == 55
    assert average(tmp_path, last=3) == pytest.approx(119 / 3)
    assert average(tmp_path) == 127 / 4


@pytest.mark.parametrize("form", FORMS)
def test_updates_that_are_told_count_more_than_names(tmp_path, form):
    for value, name in ((1, "0.9-9"), (2, "0.5-10"), (3, "0.7-11")):
        path = form.format(name)
        write(tmp_path, [value], path, value=[0.5])
    assert average(tmp_path, last=2) == 2.5


@pytest.mark.parametrize("form", FORMS)
def test_the_best_are_those_with_the_best_figure(tmp_path, form):
    write(tmp_path, [1, 2, 3, 4], form, value=[0.3, math.nan, 0.1, 0.2])
    assert average(tmp_path, best=1) == 3
    assert average(tmp_path, best=2) == 3.5
    assert average(tmp_path, best=2, mode="max") == 2.5
    assert average(tmp_path, best=2, ema=0.75) == 3.25  # from 3 to 4, as trained


def test_a_store_s_checkpoints_are_in_its_order_and_have_its_metric(tmp_path):
    store = CheckpointStore(tmp_path, mode="max")
    for number, (update, metric) in enumerate([(900, 0.1), (1000, 0.3), (950, 0.2)]):
        taken = Checkpoint({"model": weights_of(number)})
        store.save(taken, epoch=0, update=update, metric=metric)
    assert average(tmp_path, last=2) == 1.5  # 950 was written after 1000
    assert average(tmp_path, best=1) == 1
    assert average(tmp_path, best=1, mode="min") == 0


def test_averages_are_no_candidates(tmp_path):
    write(tmp_path, [1, 2])
    for _ in range(2):
        result = average_checkpoints(tmp_path, save_to=tmp_path / "z.safetensors")
        assert result["w"][0].item() == 1.5
    assert torch.equal(load_weights(tmp_path / "z.safetensors")["w"], result["w"])


# The numbers ------------------------------------------------------------------------


def test_an_average_that_forgets_is_the_formulas(tmp_path):
    write(tmp_path, [3, 9, 27, 4])
    expected = 3.0
    for value in (4.0, 9.0, 27.0):  # in the order of the names' numbers
        expected = 0.99 * expected + (1 - 0.99) * value
    assert average(tmp_path, ema=0.99) == pytest.approx(expected, rel=1e-6)
    assert average(tmp_path, ema=0.0) == 27


def test_sums_are_in_float64_and_dtypes_are_kept(tmp_path):
    for number in range(1, 4):
        weights = {
            "half": torch.full((2,), 1000.0 * number, dtype=torch.float16),
            "single": torch.full((2,), 2.0**24 + number - 1),
            "odd": torch.full((1,), 0.5 * number, dtype=torch.bfloat16),
            "double": torch.full((1,), 1 / 3, dtype=torch.float64),
            "count": torch.tensor(number),
            "flag": torch.tensor([number == 3]),
            "mask": torch.tensor([0.0, -math.inf]),
            "empty": torch.zeros(0, 2),
        }
        write_checkpoint(tmp_path / f"run-{number}", Checkpoint({"model": weights}))
    for ema in (None, 0.5):
        found = average_checkpoints(tmp_path, ema=ema)
        assert found.keys() == weights.keys()
        assert {n: t.dtype for n, t in found.items()} == {
            n: t.dtype for n, t in weights.items()
        }
        assert found["count"] == 3
        assert found["flag"]
        assert found["mask"].tolist() == [0.0, -math.inf]
        assert found["double"].item() == 1 / 3
        assert found["empty"].shape == (0, 2)
    found = average_checkpoints(tmp_path)
    assert found["half"].tolist() == [2000.0, 2000.0]
    assert found["single"].tolist() == [2.0**24, 2.0**24]
    assert found["odd"].item() == 1.0


def test_complex_numbers_are_averaged(tmp_path):
    for number in range(1, 4):
        weights = {"w": torch.full((1,), number * 1j)}
        try:
            save_weights(weights, tmp_path / f"{number}.safetensors")
        except UnsupportedError:
            pytest.skip("this safetensors is too old for complex numbers")
    assert average_checkpoints(tmp_path)["w"].item() == 2j


@pytest.mark.parametrize("form", FORMS)
def test_tied_weights_stay_tied(tmp_path, form):
    for number in (1, 3):
        weight = torch.full((2,), float(number))
        weights, path = {"a": weight, "b": weight}, tmp_path / form.format(number)
        if form.endswith(".safetensors"):
            save_weights(weights, path)
        else:
            write_checkpoint(path, Checkpoint({"model": weights}))
    target = tmp_path / "z.safetensors"
    found = average_checkpoints(tmp_path, save_to=target)
    assert found["a"] is found["b"]
    assert found["a"].tolist() == [2.0, 2.0]
    with safetensors.safe_open(str(target), "pt") as file:
        assert "ipufit.tied" in file.metadata()


# What can't be averaged -------------------------------------------------------------


def test_fewer_than_asked_for_is_a_warning(tmp_path):
    write(tmp_path, [1, 2])
    with pytest.warns(CheckpointWarning, match="10 checkpoints were asked for, and 2"):
        assert average(tmp_path, last=10) == 1.5


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(3), "same": torch.ones(1)},
        {"w": torch.ones(2).half(), "same": torch.ones(1)},
        {"v": torch.ones(2), "w": torch.ones(2, 1), "same": torch.ones(1)},
    ],
)
def test_other_modules_are_refused_with_their_names(tmp_path, other):
    save_weights({**weights_of(1), "same": torch.ones(1)}, tmp_path / "1.safetensors")
    save_weights(other, tmp_path / "2.safetensors")
    odd = " is .*; ".join(sorted({"w", *other} - {"same"}))
    with pytest.raises(DataError, match=rf"2\.safetensors.*different modules: {odd} "):
        average_checkpoints(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0},
        {"last": 2.0},
        {"best": -1},
        {"last": 1, "best": 1},
        {"ema": 1.0},
        {"ema": "0.9"},
        {"best": 1, "mode": "auto"},
    ],
)
def test_arguments_are_checked(tmp_path, arguments):
    write(tmp_path, [1])
    with pytest.raises(ConfigError, match=f"{[*arguments][-1]}="):
        average_checkpoints(tmp_path, **arguments)


def test_where_there_is_nothing_to_average(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.csv").write_text("epoch")
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MissingCheckpointError):
            average_checkpoints(where)
    write(tmp_path, [1], "run-{}")
    with pytest.raises(ConfigError, match="is one checkpoint"):
        average_checkpoints(tmp_path / "run-1")


def test_a_moment_that_is_none_is_damage(tmp_path):
    write(tmp_path, [1, 2])
    safetensors.torch.save_file(
        weights_of(9), tmp_path / "e9.safetensors", {"ipufit.moment": '{"update": -1}'}
    )
    with pytest.raises(DataError, match=r"e9.*where a count belongs"):
        average(tmp_path)


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ("e{}.safetensors", "cut"),
        ("run-{}", "cut"),
        ("run-{}", "changed"),
        ("run-{}", "no manifest"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path, form, damage):
    write(tmp_path, [1, 2, 3], form)
    path = tmp_path / form.format(3)
    file = path if path.is_file() else path / "model.safetensors"
    data = file.read_bytes()
    if damage == "cut":
        file.write_bytes(data[:-4])
    elif damage == "changed":  # which is found only when it is read
        file.write_bytes(data[:-1] + b"x")
    else:
        (path / "manifest.json").unlink()
    error = DataError if path.is_file() else DamagedCheckpointError
    with pytest.raises(error, match=form.format(3)):
        average(tmp_path)
    assert average([tmp_path / form.format(number) for number in (2, 1)]) == 1.5


@pytest.mark.parametrize("form", FORMS)
def test_paths_are_ordered_as_those_of_a_directory(tmp_path, form):
    write(tmp_path, [8, 10, 9, 100], form)
    paths = sorted(tmp_path.iterdir())
    assert average(paths, last=2) == 55
    assert average((path for path in paths), ema=0) == 100
    with pytest.raises(MissingCheckpointError, match="nowhere"):
        average([*paths, tmp_path / "nowhere.safetensors"])


FIGURES = {
    "none": ({}, "None of the 2 checkpoints", None),
    "other names": (
        {"monitor": ["a", "b"], "value": [1.0, 1.0]},
        "different metrics: a, b",
        None,
    ),
    "no mode": (
        {"monitor": [None, None], "value": [1.0, 2.0], "mode": [None, None]},
        'give mode="min" or mode="max"',
        2,
    ),
    "equal": ({"value": [0.5, 0.5]}, None, 1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_best_are_told_by_one_figure_whose_mode_is_known(tmp_path, name):
    figures, message, best = FIGURES[name]
    write(tmp_path, [1, 2], **figures)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            average_checkpoints(tmp_path, best=1)
    if best is not None:
        mode = None if message is None else "max"
        assert average(tmp_path, best=1, mode=mode) == best
    assert average(tmp_path, last=2) == 1.5


def test_both_kinds_in_one_directory_are_refused(tmp_path):
    write(tmp_path, [1])
    write(tmp_path, [2], "run-{}")
    with pytest.raises(ConfigError, match=r"'run-2'.*'e1\.safetensors'.*glob\("):
        average_checkpoints(tmp_path)
    assert average(tmp_path.glob("run-*")) == 2


# Of a run ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["e{epoch}.safetensors", "kept"])
def test_checkpoints_of_a_run(tmp_path, monkeypatch, form):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model = IPUModel(module)
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = torch.rand(32, 3), torch.rand(32, 4)
    states = []
    keep = {"keep": 20} if form == "kept" else {}
    saving = ModelCheckpoint(tmp_path / "out" / form, "val_mae", **keep)
    look = LambdaCallback(on_epoch_end=lambda *_: states.append(model.copied_weights()))
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=4,
        validation_data=(x[:16], y[:16]),
        callbacks=[saving, look],
        verbose=0,
    ).history
    folder = tmp_path / "out" / ("kept" if form == "kept" else "")
    last = average_checkpoints(folder, last=3)
    best = average_checkpoints(folder, best=3, ema=0.5)
    order = sorted(range(4), key=lambda epoch: history["val_mae"][epoch])[:3]
    assert set(last) == set(states[0])
    for name in states[0]:
        of_run = [state[name] for state in states[1:]]
        if name.endswith("num_batches_tracked"):
            assert torch.equal(last[name], of_run[-1])
            continue
        expected = torch.stack(of_run).double().mean(0)
        torch.testing.assert_close(last[name], expected.float(), rtol=1e-6, atol=1e-7)
        moving = None
        for epoch in sorted(order):
            one = states[epoch][name].double()
            moving = one if moving is None else 0.5 * moving + 0.5 * one
        torch.testing.assert_close(best[name], moving.float(), rtol=1e-6, atol=1e-7)
    model.set_weights(last)
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, last[name])
    module.load_state_dict(best)


def test_a_state_dict_of_another_module_is_refused():
    model = IPUModel(torch.nn.Linear(2, 1))
    with pytest.raises(DataError, match="bias, extra are only in one"):
        model.set_weights({"weight": torch.ones(1, 2), "extra": torch.ones(1)})
