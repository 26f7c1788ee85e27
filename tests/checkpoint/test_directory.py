# SPDX-License-Identifier: Apache-2.0
"""How the directory of a checkpoint comes and goes."""

from __future__ import annotations

import os

import pytest

from ipufit.checkpoint import write_checkpoint
from ipufit.checkpoint.directory import belongs, delete, remove, standing
from tests.checkpoint.samples import names, sample


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("manifest.json", True),
        ("state.json", True),
        ("a-b_1.safetensors", True),
        ("A.safetensors", False),
        ("1.safetensors", False),
        (".safetensors", False),
        ("a/b.safetensors", False),
        ("model.safetensors.bak", False),
        ("model.safetensors\n", False),
    ],
)
def test_which_names_a_checkpoint_has(name, expected):
    assert belongs(name) is expected


def test_the_manifest_goes_first_so_that_half_a_checkpoint_is_none(
    tmp_path, monkeypatch
):
    write_checkpoint(tmp_path / "a", sample())
    gone, unlink = [], os.unlink

    def stop_at_the_second(path):
        if gone:
            raise PermissionError(13, "no")
        gone.append(os.path.basename(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", stop_at_the_second)
    with pytest.raises(PermissionError):
        remove(tmp_path / "a")
    assert gone == ["manifest.json"]
    (trash,) = names(tmp_path)
    assert trash.endswith(".trash")


def test_trees_are_never_deleted(tmp_path):
    write_checkpoint(tmp_path / "a", sample())
    (tmp_path / "a" / "inner").mkdir()
    (tmp_path / "a" / "inner" / "state.json").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        delete(tmp_path / "a")
    assert names(tmp_path / "a") == ["inner"]
    assert names(tmp_path / "a" / "inner") == ["state.json"]


def test_of_several_old_ones_the_newest_whole_one_stands(tmp_path):
    for digits, seconds in (("00000001", 50), ("00000002", 90), ("00000003", 70)):
        old = tmp_path / f".a.{digits}.old"
        write_checkpoint(old, sample())
        os.utime(old, (seconds, seconds))
    (tmp_path / ".a.00000002.old" / "manifest.json").unlink()  # half deleted
    os.utime(tmp_path / ".a.00000002.old", (90, 90))
    assert standing(tmp_path / "a") == tmp_path / ".a.00000003.old"
    assert standing(tmp_path / "b") is None
