# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: which files, when, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from ipufit import ConfigError, IPUConfig, IPUModel, UnsupportedError
from ipufit.callbacks import ModelCheckpoint
from tests.callbacks.driving import ScriptedModel, play

NAN = float("nan")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(series, path="e{epoch}.safetensors", *, batches=0, runs=1, **arguments):
    model = ScriptedModel()
    checkpoint = ModelCheckpoint(path, "q", mode="min", **arguments)
    for _ in range(runs):
        play(checkpoint, series, model=model, batches=batches)
    return [name[: -len(".safetensors")] for name in model.saved]


def test_every_epoch_is_saved():
    assert saved([3.0, 4.0]) == ["e1", "e2"]


def test_names_are_made_of_the_logs_and_folders_are_made():
    assert saved([3.0], "made/{epoch:03d}/{q:.2f}.safetensors") == ["3.00"]
    assert Path("made/001").is_dir()


def test_a_path_object_is_fine(tmp_path):
    assert saved([3.0], tmp_path / "{q}.safetensors") == ["3.0"]


@pytest.mark.parametrize(
    ("series", "arguments", "expected"),
    [
        ([3.0, 4.0, 2.0, 2.0, 1.0], {}, ["e1", "e3", "e5"]),
        ([NAN, 4.0, NAN, 3.0], {}, ["e2", "e4"]),
        ([3.0, 1.0, 0.5], {"initial_value_threshold": 2.0}, ["e2", "e3"]),
    ],
)
def test_only_the_best_are_saved_if_asked(series, arguments, expected):
    assert saved(series, save_best_only=True, **arguments) == expected


def test_the_best_outlives_the_run():
    assert saved([3.0, 2.0], save_best_only=True, runs=2) == ["e1", "e2"]


def test_updates_are_counted_over_epochs():
    path = "e{epoch}-b{batch}.safetensors"
    assert saved([1.0, 1.0], path, batches=3, save_freq=2) == [
        "e1-b2",
        "e2-b1",
        "e2-b3",
    ]


def test_updates_are_counted_over_runs():
    path = "e{epoch}-b{batch}.safetensors"
    assert saved([1.0], path, batches=3, save_freq=2, runs=2) == [
        "e1-b2",
        "e1-b1",
        "e1-b3",
    ]


def test_only_the_best_by_updates():
    series = [3.0, 4.0, 2.0]
    path = "e{epoch}-b{batch}.safetensors"
    assert saved(series, path, batches=2, save_freq=1, save_best_only=True) == [
        "e1-b1",
        "e3-b1",
    ]


def test_a_missing_figure_warns_and_saves():
    with pytest.warns(UserWarning, match="Can save best model only with q available"):
        assert saved([1.0, None], save_best_only=True) == ["e1", "e2"]


def test_it_says_what_it_does(capsys):
    saved([3.0, 4.0, 2.0], "x.safetensors", save_best_only=True, verbose=1)
    assert capsys.readouterr().out == (
        "\nEpoch 1: q improved from None to 3.00000, saving model to x.safetensors\n"
        "\nEpoch 1: finished saving model to x.safetensors\n"
        "\nEpoch 2: q did not improve from 3.00000\n"
        "\nEpoch 3: q improved from 3.00000 to 2.00000, saving model to "
        "x.safetensors\n"
        "\nEpoch 3: finished saving model to x.safetensors\n"
    )
    saved([3.0], "x.safetensors", verbose=1)
    assert capsys.readouterr().out == (
        "\nEpoch 1: saving model to x.safetensors\n"
        "\nEpoch 1: finished saving model to x.safetensors\n"
    )
    saved([3.0], "x.safetensors")
    assert capsys.readouterr().out == ""


def test_a_direction_matters_only_for_the_best():
    play(ModelCheckpoint("x.safetensors", "q"), [1.0], directions={"loss": "min"})


@pytest.mark.parametrize(
    "path",
    [
        "{val_q}.safetensors",
        "{batch}.safetensors",
        "{0}.safetensors",
        "{}.safetensors",
        "{q:zz}.safetensors",
        "{q.missing}.safetensors",
        "{q[0]}.safetensors",
        "{q.safetensors",
    ],
)
def test_a_name_that_cannot_be_made_is_refused(path):
    with pytest.raises(ConfigError, match=r"Failed to format.*epoch, q\.$"):
        saved([1.0], path)


@pytest.mark.parametrize("path", ["x.h5", "x.keras", "x", "x.safetensors.tmp"])
def test_other_formats_are_refused(path):
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        ModelCheckpoint(path)


@pytest.mark.parametrize("save_freq", [0, -1, 1.5, "batch", None, True])
def test_an_unusable_frequency_is_refused(save_freq):
    with pytest.raises(ConfigError, match="Unrecognized save_freq"):
        ModelCheckpoint("x.safetensors", save_freq=save_freq)


def test_whole_checkpoints_are_refused_so_far():
    with pytest.raises(UnsupportedError, match="saves weights so far"):
        ModelCheckpoint("x.safetensors", save_weights_only=False)


def test_a_fit_writes_the_weights_of_its_epochs():
    module = torch.nn.Linear(2, 1)
    model = IPUModel(module)
    model.compile("sgd", "mse")
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    checkpoint = ModelCheckpoint("{epoch}-{loss:.4f}.safetensors")
    history = model.fit(x, y, batch_size=4, epochs=2, callbacks=checkpoint, verbose=0)
    first, last = sorted(Path().glob("*.safetensors"))
    assert [path.stem for path in (first, last)] == [
        f"{epoch}-{loss:.4f}" for epoch, loss in enumerate(history.history["loss"], 1)
    ]
    weights = safetensors.torch.load_file(last)
    torch.testing.assert_close(weights["weight"], module.weight.detach())
    before = safetensors.torch.load_file(first)["weight"]
    assert not torch.equal(before, weights["weight"])


def test_a_call_of_several_updates_is_saved_once():
    module = torch.nn.Linear(2, 1)
    model = IPUModel(module, IPUConfig(device_iterations=3))
    model.compile("sgd", "mse")
    x, y = torch.randn(24, 2), torch.randn(24, 1)
    checkpoint = ModelCheckpoint("e{epoch}-b{batch}.safetensors", save_freq=2)
    model.fit(x, y, batch_size=4, epochs=2, callbacks=checkpoint, verbose=0)
    names = sorted(path.stem for path in Path().iterdir())
    assert names == ["e1-b3", "e1-b6", "e2-b3", "e2-b6"]
