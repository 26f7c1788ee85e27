# SPDX-License-Identifier: Apache-2.0
"""What the file system refuses is one typed error, with the path and what to do."""

from __future__ import annotations

import errno

import pytest

from ipufit import FileError, MissingCheckpointError, load_checkpoint
from tests.checkpoint.faults import at_step, full_disk
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


def test_a_disk_that_is_full_at_any_step_of_save_weights(model, tmp_path):
    path = tmp_path / "weights.safetensors"
    model.save_weights(path)
    before, failures = path.read_bytes(), 0
    for step in range(20):
        with at_step(step, full_disk) as taken:
            try:
                model.save_weights(path)
            except FileError as error:
                is_full = error.errno == errno.ENOSPC and "Free some" in str(error)
                failures += is_full and str(path) in str(error)
            else:
                assert len(taken) <= step
        assert path.read_bytes() == before
        assert failures == min(step + 1, len(taken))
        if len(taken) <= step:
            break
    assert failures >= 3
    with pytest.raises(FileError, match="A folder on the way is a file"):
        model.save_weights(path / "inside.safetensors")


def test_weights_that_cant_be_opened(model, tmp_path):
    for name in ("folder.safetensors", "folder.pt"):
        (tmp_path / name).mkdir()
        with pytest.raises(FileError, match=rf"{name}.*It is a folder"):
            model.load_weights(tmp_path / name)
