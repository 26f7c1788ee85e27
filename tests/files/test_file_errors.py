# SPDX-License-Identifier: Apache-2.0
"""What the file system refuses is one typed error, with the path and what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from ipufit import (
    BackupAndRestore,
    ConfigError,
    FileError,
    IpufitError,
    MissingCheckpointError,
    ModelCheckpoint,
    average_checkpoints,
    load_checkpoint,
)
from tests.reference import compiled, samples

X, Y = samples(8)


@pytest.fixture
def model():
    return compiled()


def fit(model, **arguments):
    return model.fit(X, Y, 4, epochs=1, verbose=0, **arguments)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, path: model.load(path),
        lambda model, path: fit(model, resume=path),
        lambda model, path: load_checkpoint(path),
        lambda model, path: model.load_weights(path.with_suffix(".safetensors")),
        lambda model, path: model.load_weights(path.with_suffix(".pt")),
    ],
    ids=["load", "resume", "load_checkpoint", "load_weights", "a state dict"],
)
def test_a_path_with_nothing_there(model, tmp_path, use):
    path = tmp_path / "no" / "such" / "folder"
    with pytest.raises(MissingCheckpointError, match="Check the path") as caught:
        use(model, path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def paths(model, tmp_path):
    weights = model.module.state_dict()
    torch.save(weights, tmp_path / "torch.pt")
    torch.save({"epoch": 3, "model": weights}, tmp_path / "mine.pt")
    torch.save({"epoch": 3, "state_dict": weights}, tmp_path / "last.ckpt")
    model.save_weights(tmp_path / "best.safetensors")
    model.save(tmp_path / "runs" / "run23")
    return tmp_path


OF_RUN = "model.load_weights('{path}/model.safetensors')"
STATE_DICT = "model.set_weights(torch.load({path!r}, weights_only=True)['{key}'])"


@pytest.mark.parametrize(
    ("name", "method", "way"),
    [
        ("best.safetensors", "load", "model.load_weights({path!r})"),
        ("torch.pt", "load", "model.load_weights({path!r})"),
        ("last.ckpt", "load", STATE_DICT),
        ("last.ckpt", "load_weights", STATE_DICT),
        ("mine.pt", "load_weights", STATE_DICT),
        ("runs/run23", "load_weights", "model.load({path!r})"),
        (
            "runs/run23",
            "load_weights",
            OF_RUN,
        ),
    ],
)
def test_another_kind_of_file_says_what_loads_it(model, paths, name, method, way):
    path = str(paths / name)
    way = way.format(path=path, key="model" if name == "mine.pt" else "state_dict")
    with pytest.raises(IpufitError, match=re.escape(way)):
        getattr(model, method)(path)
    expected = model.get_weights()
    model.set_weights([0 * weight for weight in expected])
    eval(way, {"model": model, "torch": torch})
    assert all(map(np.array_equal, model.get_weights(), expected))


@pytest.mark.parametrize("method", ["load", "load_weights"])
def test_a_directory_of_checkpoints_names_one(model, paths, method):
    with pytest.raises(IpufitError, match=r"name what is in it, '.*runs/run23'"):
        getattr(model, method)(paths / "runs")


@pytest.mark.parametrize(
    "use",
    [
        lambda model, path: fit(model, resume=path),
        lambda model, path: load_checkpoint(path),
        lambda model, path: fit(model, callbacks=BackupAndRestore(path)),
        lambda model, path: fit(model, callbacks=ModelCheckpoint(path)),
        lambda model, path: average_checkpoints(path),
        lambda model, path: model.save(path),
    ],
)
def test_a_file_in_the_place_of_a_checkpoint_is_none(model, paths, use):
    before = (paths / "last.ckpt").read_bytes()
    with pytest.raises(IpufitError, match=r"last\.ckpt' (is a file|has|and)|filepath="):
        use(model, paths / "last.ckpt")
    assert (paths / "last.ckpt").read_bytes() == before
    assert fit(model).epoch == [0]


def test_a_directory_of_checkpoints_that_is_resumed_names_them(model, paths):
    with pytest.raises(ConfigError, match=r"no checkpoint in .*run23"):
        fit(model, resume=paths / "runs")


@pytest.mark.parametrize("use", ["load", "save", "load_weights", "save_weights"])
def test_weights_in_the_place_of_a_path_are_not_printed(model, use):
    with pytest.raises(ConfigError, match=r"path=OrderedDict\(...\): use a path"):
        getattr(model, use)(model.module.state_dict())


@pytest.mark.parametrize("kind", [BackupAndRestore, ModelCheckpoint])
def test_an_empty_path_is_not_the_working_directory(kind):
    with pytest.raises(ConfigError, match="='': use a path"):
        kind("")


def test_weights_that_cant_be_opened(model, tmp_path):
    for name in ("folder.safetensors", "folder.pt"):
        (tmp_path / name).mkdir()
        with pytest.raises(FileError, match=rf"{name}.*It is a folder"):
            model.load_weights(tmp_path / name)
    model.save_weights(tmp_path / "file.safetensors")
    with pytest.raises(FileError, match="A folder on the way is a file"):
        model.save_weights(tmp_path / "file.safetensors" / "inside.safetensors")
