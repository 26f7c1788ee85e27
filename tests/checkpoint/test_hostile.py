# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to hurt, with checksums that are right."""

from __future__ import annotations

import hashlib
import json
import os
import pickle

import pytest
import torch

from ipufit.checkpoint import format as format_module
from ipufit.checkpoint import read_checkpoint, read_manifest, write_checkpoint
from ipufit.checkpoint.atomic import Written
from ipufit.checkpoint.manifest import dump_manifest
from ipufit.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.samples import number_of, sample

ZEROS = "0" * 64


class Harm:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def path(tmp_path):
    write_checkpoint(tmp_path / "saved", sample(1))
    return tmp_path / "saved"


def forge(path, contents, **changes):
    """Put files there, and a manifest that is right about them."""
    for name, data in contents.items():
        (path / name).write_bytes(data)
    files = {
        file.name: Written(len(data), hashlib.sha256(data).hexdigest())
        for file in sorted(path.iterdir())
        for data in [file.read_bytes()]
        if file.name != "manifest.json"
    }
    sign(path, json.loads(dump_manifest(files, None)), **changes)


def sign(path, manifest, **changes):
    manifest = {**manifest, **changes, "manifest_sha256": ZEROS}
    text = json.dumps(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    signed = text.replace(ZEROS, digest, 1)
    (path / "manifest.json").write_text(signed)


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())


def test_the_forger_is_believed_when_he_is_right(path):
    forge(path, {})
    assert number_of(read_checkpoint(path)) == 1
    sign(path, manifest_of(path), more={"from": "a later writer"})
    assert number_of(read_checkpoint(path)) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_pickle_is_never_loaded(path, tmp_path, name):
    harmed = tmp_path / "harmed"
    harm = pickle.dumps(Harm(str(harmed)))
    torch.save(Harm(str(harmed)), tmp_path / "archive")
    for data in (harm, (tmp_path / "archive").read_bytes()):
        if name == "manifest.json":
            (path / name).write_bytes(data)
        else:
            forge(path, {name: data})
        with pytest.raises(DamagedCheckpointError, match=name):
            read_checkpoint(path)
    assert not harmed.exists()
    pickle.loads(harm).close()
    assert harmed.exists()  # it would have


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "/etc/passwd",
        "a/model.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        ".hidden.safetensors",
        "model.safetensors\n",
        "model.safetensors\0",
        "model.bin",
        "MODEL.safetensors",
        "manifest.json",
        "x" * 80 + ".safetensors",
        ".safetensors",
        5,
        None,
        ["model.safetensors"],
    ],
)
def test_names_that_lead_elsewhere_are_refused(path, name):
    (path.parent / "evil.safetensors").write_bytes(b"")
    manifest = manifest_of(path)
    manifest["files"].append({"name": name, "size": 0, "sha256": ZEROS[:-1] + "1"})
    sign(path, manifest)
    for read in (read_checkpoint, read_manifest):
        with pytest.raises(DamagedCheckpointError, match="no name of a file in it"):
            read(path)


def test_links_arent_followed_though_the_content_is_right(path):
    outside = path.parent / "outside"
    for name in ("model.safetensors", "manifest.json"):
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        with pytest.raises(DamagedCheckpointError, match=f"{name}: it is a symbolic"):
            read_checkpoint(path)
        (path / name).unlink()
        outside.rename(path / name)
    assert number_of(read_checkpoint(path)) == 1


def test_pipes_and_directories_are_refused_at_once(path):
    for make in (os.mkfifo, os.mkdir):
        (path / "state.json").rename(path.parent / "state")
        make(path / "state.json")
        with pytest.raises(DamagedCheckpointError, match="no regular file"):
            read_checkpoint(path)
        (path / "state.json").rename(path.parent / make.__name__)
        (path.parent / "state").rename(path / "state.json")


@pytest.mark.parametrize(
    "data",
    [
        b'{"loss": NaN}',
        b'{"loss": -Infinity}',
        b'{"loss": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"a":' * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"$class": "os.system"}',
        b"[]",
        b'"text"',
        b"",
        b"\xff",
    ],
    ids=range(11),
)
def test_a_state_that_isnt_strict_json_is_refused(path, data):
    forge(path, {"state.json": data})
    with pytest.raises(DamagedCheckpointError, match=r"state\.json"):
        read_checkpoint(path)


def test_headers_are_held_against_the_size_of_their_file(path):
    for length in (2**64 - 1, 2**63, 100_000_001, 2**20, 25):
        data = length.to_bytes(8, "little") + b"{}" + b" " * 14
        forge(path, {"model.safetensors": data})
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors.*claims"):
            read_checkpoint(path)


def test_what_is_too_large_isnt_even_read(path, monkeypatch):
    monkeypatch.setattr(format_module, "MAX_STATE_BYTES", 10)
    with pytest.raises(DamagedCheckpointError, match=r"state\.json.*too many"):
        read_checkpoint(path)
    with open(path / "manifest.json", "ab") as file:
        file.truncate(2**21)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json.*too many"):
        read_checkpoint(path)


ENTRY = {"name": "state.json", "size": 5, "sha256": "0" * 63 + "1"}
RECORD = {"sequence": 1, "epoch": 1, "update": 1, "metric": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"format": None},
        {"version": 0},
        {"version": -1},
        {"version": True},
        {"version": "1"},
        {"version": 1.0},
        {"version": None},
        {"ipufit": 1},
        {"torch": ["2"]},
        {"record": []},
        {"record": "x"},
        {"record": {}},
        {"record": {**RECORD, "sequence": -1}},
        {"record": {**RECORD, "epoch": True}},
        {"record": {**RECORD, "update": 1.5}},
        {"record": {**RECORD, "metric": "0.5"}},
        {"record": {**RECORD, "metric": True}},
        {"record": {**RECORD, "metric": {"$float": "NaN"}}},
        {"files": {}},
        {"files": None},
        {"files": []},
        {"files": ["state.json"]},
        {"files": [{**ENTRY, "size": -1}]},
        {"files": [{**ENTRY, "size": "5"}]},
        {"files": [{**ENTRY, "size": True}]},
        {"files": [{**ENTRY, "sha256": "0"}]},
        {"files": [{**ENTRY, "sha256": 5}]},
        {"files": [{**ENTRY, "sha256": "A" * 64}]},
        {"files": [ENTRY, ENTRY]},
        {"files": [{"name": "state.json"}]},
    ],
    ids=json.dumps,
)
def test_a_manifest_with_wrong_values_is_refused(path, changes):
    sign(path, manifest_of(path), **changes)
    for read in (read_checkpoint, read_manifest):
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            read(path)


@pytest.mark.parametrize("text", ["[]", "5", "{}", '{"format": "ipufit-checkpoint"}'])
def test_json_that_is_no_manifest_is_refused(path, text):
    (path / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        read_checkpoint(path)


def test_a_newer_version_is_refused_and_isnt_called_damaged(path):
    sign(path, manifest_of(path), version=2, files="in another form")
    with pytest.raises(CheckpointError, match=r"version 2.*upgrade ipufit") as caught:
        read_checkpoint(path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert str(path) in str(caught.value)
