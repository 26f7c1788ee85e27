# SPDX-License-Identifier: Apache-2.0
"""One checkpoint is written, read and replaced."""

from __future__ import annotations

import errno
import json
import os

import pytest

from ipufit.checkpoint import (
    Checkpoint,
    SavedAt,
    load_checkpoint,
    read_manifest,
    write_checkpoint,
)
from ipufit.checkpoint import (
    directory as directory_module,
)
from ipufit.errors import CheckpointError, DamagedCheckpointError, UnsupportedError
from tests.files.faults import at_step
from tests.files.samples import names, number_of, sample


def test_the_manifest_lists_every_file_and_who_wrote_it(tmp_path):
    moment = SavedAt(20, "loss", float("-inf"), "min", epoch=1, sequence=3)
    write_checkpoint(tmp_path / "a", sample(), moment=moment)
    manifest = read_manifest(tmp_path / "a")
    assert {*manifest.files, "manifest.json"} == {*names(tmp_path / "a")}
    assert manifest.moment == moment
    plain = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert plain["format"] == "ipufit-checkpoint"
    assert plain["version"] == 1
    assert plain["files"][0].keys() == {"name", "size", "sha256"}


def test_folders_are_made_and_links_are_followed_to_the_target(tmp_path):
    write_checkpoint(tmp_path / "a" / "b" / "c", sample(1))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "c")
    write_checkpoint(tmp_path / "link", sample(2))
    assert (tmp_path / "link").is_symlink()
    assert number_of(load_checkpoint(tmp_path / "a" / "b" / "c")) == 2
    assert number_of(load_checkpoint(tmp_path / "link")) == 2


def test_an_old_checkpoint_an_empty_folder_and_a_damaged_one_are_replaced(tmp_path):
    target = tmp_path / "a"
    target.mkdir()
    write_checkpoint(target, sample(1))
    (target / "state.json").unlink()
    (target / "average.safetensors").write_bytes(b"of an older run")
    write_checkpoint(target, sample(2))
    assert number_of(load_checkpoint(target)) == 2
    assert "average.safetensors" not in names(target)
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["file", "foreign file", "folder", "link"])
def test_what_isnt_a_checkpoints_is_never_replaced(tmp_path, kind):
    target = tmp_path / "a"
    if kind == "file":
        target.write_text("mine")
    else:
        write_checkpoint(target, sample(1))
    if kind == "foreign file":
        (target / "notes.txt").write_text("mine")
    elif kind == "folder":
        (target / "average.safetensors").mkdir()
    elif kind == "link":
        (target / "average.safetensors").symlink_to(tmp_path)
    before = names(tmp_path), target.is_dir() and names(target)
    with pytest.raises(CheckpointError, match=f"'{target}'"):
        write_checkpoint(target, sample(2))
    assert before == (names(tmp_path), target.is_dir() and names(target))


def test_leftovers_of_killed_writers_are_cleaned_up_and_never_read(tmp_path):
    write_checkpoint(tmp_path / "x", sample(1))
    (tmp_path / "x").rename(tmp_path / ".a.00000001.partial")  # complete, but unnamed
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "a")
    for other in (".a.0000001.partial", ".ab.00000001.partial", ".a.00000001.other"):
        (tmp_path / other).mkdir()  # somebody else's
    write_checkpoint(tmp_path / "a", sample(2))
    assert names(tmp_path) == [
        ".a.00000001.other",
        ".a.0000001.partial",
        ".ab.00000001.partial",
        "a",
    ]


def test_a_writer_killed_between_its_renames_leaves_the_old_one_readable(tmp_path):
    write_checkpoint(tmp_path / "a", sample(1))
    (tmp_path / "a").rename(tmp_path / ".a.0123abcd.old")
    (tmp_path / ".a.99999999.old").mkdir()  # half deleted: without a manifest
    assert number_of(load_checkpoint(tmp_path / "a")) == 1
    assert number_of(load_checkpoint(tmp_path / "a")) == 1
    with pytest.raises(UnsupportedError):
        write_checkpoint(tmp_path / "a", Checkpoint(state={"a": object()}))
    assert number_of(load_checkpoint(tmp_path / "a")) == 1
    write_checkpoint(tmp_path / "a", sample(2))
    assert number_of(load_checkpoint(tmp_path / "a")) == 2
    assert names(tmp_path) == ["a"]


def test_of_several_old_ones_the_newest_whole_one_is_read(tmp_path):
    for number, seconds in ((1, 50), (2, 90), (3, 70)):
        old = tmp_path / f".a.0000000{number}.old"
        write_checkpoint(old, sample(number))
        if number == 2:  # half deleted
            (old / "manifest.json").unlink()
        else:
            os.utime(old / "manifest.json", (seconds, seconds))
    assert number_of(load_checkpoint(tmp_path / "a")) == 3
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "b")


def test_everything_is_synced_before_and_after_it_gets_its_name(tmp_path, monkeypatch):
    synced, opened, original = [], {}, os.open

    def remember(path, *arguments, **keywords):
        descriptor = original(path, *arguments, **keywords)
        opened[descriptor] = os.path.basename(path)
        return descriptor

    monkeypatch.setattr(os, "open", remember)
    fsync, replace = os.fsync, os.replace

    def rename(*names, **folders):
        replace(*names, **folders)
        synced.append("RENAME")

    monkeypatch.setattr(os, "fsync", lambda d: (synced.append(opened[d]), fsync(d)))
    monkeypatch.setattr(os, "replace", rename)
    write_checkpoint(tmp_path / "a", sample())
    *files, manifest, beside, renamed, parent = synced
    assert sorted(files) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert manifest == "manifest.json"  # the last of them
    assert beside.endswith(".partial")
    assert renamed == "RENAME"
    assert parent == tmp_path.name


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        (Checkpoint({"Model": {}}), "'Model' is no name for a group"),
        (Checkpoint({"../model": {}}), "no name for a group"),
        (Checkpoint({"": {}}), "no name for a group"),
        (Checkpoint({"model": {"w": 1}}), r"model\['w'\] is a int, not a tensor"),
        (Checkpoint({}, []), "must be a dict"),
    ],
)
def test_what_cant_be_written_is_said_before_anything_is(tmp_path, checkpoint, reason):
    with pytest.raises(UnsupportedError, match=reason):
        write_checkpoint(tmp_path / "a", checkpoint)
    assert names(tmp_path) == []


def test_a_state_too_large_to_read_isnt_written(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_module, "MAX_STATE_BYTES", 20)
    with pytest.raises(UnsupportedError, match="belong into tensors"):
        write_checkpoint(tmp_path / "a", Checkpoint({}, {"text": "x" * 20}))


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    write_checkpoint(tmp_path / "a", sample(1))
    step = 0
    while True:
        try:
            with at_step(step, interrupt) as taken:
                write_checkpoint(tmp_path / "a", sample(1))
        except KeyboardInterrupt:
            assert number_of(load_checkpoint(tmp_path / "a")) == 1
            if taken.count("replace") < 2:
                assert names(tmp_path) == ["a"]
        else:
            break
        step += 1
    assert step > 20


def test_there_is_none(tmp_path):
    for read in (load_checkpoint, read_manifest):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            read(tmp_path / "a" / "b")
    (tmp_path / "a").write_text("a file")
    with pytest.raises(DamagedCheckpointError, match="is a file of a kind"):
        load_checkpoint(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json: No such file"):
        load_checkpoint(tmp_path / "b")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, DamagedCheckpointError), (errno.EACCES, CheckpointError)],
)
def test_a_broken_disk_is_damage_and_a_missing_permission_isnt(
    tmp_path, monkeypatch, number, kind
):
    write_checkpoint(tmp_path / "a", sample())
    original = os.open

    def fail(path, *arguments, **keywords):
        if path == "state.json":
            raise OSError(number, os.strerror(number))
        return original(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(CheckpointError, match=r"state\.json") as caught:
        load_checkpoint(tmp_path / "a")
    assert type(caught.value) is kind
    assert caught.value.errno == number
