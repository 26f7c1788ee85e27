# SPDX-License-Identifier: Apache-2.0
"""Checkpoints made to hurt, with checksums that are right."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle

import pytest
import torch

from ipufit.checkpoint import (
    Checkpoint,
    CheckpointStore,
    load_checkpoint,
    load_weights,
    read_manifest,
    save_weights,
    write_checkpoint,
)
from ipufit.checkpoint import directory as directory_module
from ipufit.checkpoint import weights as weights_module
from ipufit.checkpoint.directory import Written, dump_manifest
from ipufit.errors import CheckpointError, DamagedCheckpointError, DataError
from tests.files.faults import at_step
from tests.files.samples import names, number_of, sample
from tests.files.test_damage import FILES

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
    assert number_of(load_checkpoint(path)) == 1
    sign(path, manifest_of(path), more={"from": "a later writer"})
    assert number_of(load_checkpoint(path)) == 1


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
            load_checkpoint(path)
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
    ],
)
def test_names_that_lead_elsewhere_are_refused(path, name):
    (path.parent / "evil.safetensors").write_bytes(b"")
    manifest = manifest_of(path)
    manifest["files"].append({"name": name, "size": 0, "sha256": ZEROS[:-1] + "1"})
    sign(path, manifest)
    for read in (load_checkpoint, read_manifest):
        with pytest.raises(DamagedCheckpointError, match="no name of a file in it"):
            read(path)


def test_links_arent_followed_though_the_content_is_right(path):
    outside = path.parent / "outside"
    for name in ("model.safetensors", "manifest.json"):
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        with pytest.raises(DamagedCheckpointError, match=f"{name}: it is a symbolic"):
            load_checkpoint(path)
        (path / name).unlink()
        outside.rename(path / name)
    assert number_of(load_checkpoint(path)) == 1


def test_pipes_and_directories_are_refused_at_once(path):
    for make in (os.mkfifo, os.mkdir):
        (path / "state.json").rename(path.parent / "state")
        make(path / "state.json")
        with pytest.raises(DamagedCheckpointError, match=r"regular|directory"):
            load_checkpoint(path)
        (path / "state.json").rename(path.parent / make.__name__)
        (path.parent / "state").rename(path / "state.json")


@pytest.mark.filterwarnings("ignore:.*couldn.t be deleted:ipufit.CheckpointWarning")
@pytest.mark.parametrize("kind", ["path", "store"])
def test_a_link_in_the_place_of_a_hidden_directory_leads_nowhere(tmp_path, kind):
    victim = tmp_path / "victim"
    write_checkpoint(victim, sample(9))
    for step in itertools.count():
        folder = tmp_path / f"folder-{step}"
        folder.mkdir()
        store = CheckpointStore(folder, keep_last=1)

        def swap(folder=folder):
            for path in folder.glob(".*"):
                path.rename(folder / f"taken{path.suffix}")
                path.symlink_to(victim)

        def write(number, folder=folder, store=store):
            if kind == "path":
                write_checkpoint(folder / "saved", sample(number))
                return folder / "saved"
            return store.save(sample(number), epoch=0, update=number)

        write(1)
        with contextlib.suppress(CheckpointError), at_step(step, swap) as taken:
            assert number_of(load_checkpoint(write(2))) == 2
        assert number_of(load_checkpoint(victim)) == 9
        assert names(victim) == sorted(FILES)
        if len(taken) <= step:
            break
    assert step > 15


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"loss": NaN}', "NaN is no number"),
        (b'{"loss": -Infinity}', "-Infinity is no number"),
        (b'{"loss": 1e999}', "too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "'c' is there twice"),
        (b'{"a": 1, "\\u0061": 1}', "'a' is there twice"),
        (b'{"a":' * 100_000, "nested more than"),
        (b"[" * 100_000 + b"]" * 100_000, "nested more than"),
        (b'{"a":[' * 51 + b"1" + b"]}" * 51, "nested more than"),
        (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"$class": "os.system"}', "has the invalid value"),
        (b'{"$float": "NaN"}', "has the invalid value"),
        (b'{"$float": 1.0}', "has the invalid value"),
        (b'{"$int": "12"}', "has the invalid value"),
        (b'{"$int": 12}', "has the invalid value"),
        (b'{"$dict": []}', "has the invalid value"),
        (b'{"$float": "nan", "a": 1}', "mixes"),
        (b"[]", "a JSON object"),
        (b'"text"', "a JSON object"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
        (b"\xff", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": "\n"}', "control character"),
    ],
    ids=range(23),
)
def test_a_state_that_isnt_strict_json_is_refused(path, data, reason):
    forge(path, {"state.json": data})
    with pytest.raises(DamagedCheckpointError, match=rf"state\.json.*{reason}"):
        load_checkpoint(path)


def forged(header, data=b""):
    """A safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def tied(text, **entries):
    return {"__metadata__": {"ipufit.tied": text}, **entries}


EIGHT = b"\0" * 8
TENSORS = {
    "no bytes": b"",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "header of 100 MB": (100_000_001).to_bytes(8, "little") + b"{}" + b" " * 14,
    "header as long as the file": b"\x0a" + b"\0" * 7 + b"{}",
    "no header": forged(b""),
    "a list": forged(b"[]"),
    "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix",
    "twice": forged(b'{"a": {}, "a": {}}'),
    "deep": forged(b'{"a":' * 100_000),
    "NaN": forged(b'{"a": NaN}'),
    "no offsets": forged({"a": {"dtype": "F32", "shape": [2]}}, EIGHT),
    "no object": forged({"a": []}, EIGHT),
    "a dtype of torch": forged({"a": entry("load")}, EIGHT),
    "dtype of another type": forged({"a": entry([1])}, EIGHT),
    "negative": forged({"a": entry(shape=[-2])}, EIGHT),
    "bool": forged({"a": entry(shape=[True, 2])}, EIGHT),
    "float": forged({"a": entry(shape=[2.0])}, EIGHT),
    "no list": forged({"a": {**entry(), "shape": 2}}, EIGHT),
    "three offsets": forged({"a": entry(offsets=[0, 4, 8])}, EIGHT),
    "text offsets": forged({"a": entry(offsets=["0", "8"])}, EIGHT),
    "huge": forged({"a": entry(shape=[2**62, 2**62])}, EIGHT),
    "empty and huge": forged({"a": entry(shape=[2**62, 4, 0], offsets=[0, 0])}),
    "another size": forged({"a": entry(shape=[3])}, EIGHT),
    "backwards": forged({"a": entry(offsets=[8, 0])}, EIGHT),
    "overlap": forged({"a": entry(), "b": entry()}, EIGHT),
    "hole": forged({"a": entry(offsets=[8, 16])}, EIGHT * 2),
    "beyond the end": forged({"a": entry()}, b""),
    "before the end": forged({"a": entry()}, EIGHT * 2),
    "metadata": forged({"__metadata__": {"a": 1}}),
    "metadata list": forged({"__metadata__": []}),
    "tied to nothing": forged(tied('[["a", "b"]]')),
    "tied text": forged(tied('"ab"')),
    "tied number": forged(tied("[[1, 2]]")),
    "tied list": forged(tied("[[[], {}]]")),
    "tied and different": forged(
        tied('[["a", "b"]]', a=entry(), b=entry(offsets=[8, 16])), EIGHT + b"\1" * 8
    ),
}


def test_any_byte_but_zero_is_true(path):
    forge(path, {"model.safetensors": forged({"a": entry("BOOL", [1], [0, 1])}, b"2")})
    read = load_checkpoint(path).tensors["model"]["a"]
    assert read.view(torch.uint8).tolist() == [1]


@pytest.mark.parametrize("name", TENSORS)
def test_a_malformed_file_of_tensors_is_refused(path, tmp_path, name):
    forge(path, {"model.safetensors": TENSORS[name]})
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
        load_checkpoint(path)
    (tmp_path / "a.safetensors").write_bytes(TENSORS[name])
    with pytest.raises(DataError, match="a whole safetensors file"):
        load_weights(tmp_path / "a.safetensors")


def test_what_is_too_large_isnt_even_read(path, monkeypatch):
    monkeypatch.setattr(directory_module, "MAX_STATE_BYTES", 10)
    with pytest.raises(DamagedCheckpointError, match=r"state\.json.*too many"):
        load_checkpoint(path)
    with open(path / "manifest.json", "ab") as file:
        file.truncate(2**21)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load_checkpoint(path)


def test_values_are_read_when_the_form_of_every_file_is_right(path, monkeypatch):
    size, header = 2**20, {"m": entry(shape=[2**20 // 4], offsets=[0, 2**20])}
    for name, data in (
        ("model", forged(header)),
        ("optimizer", forged({"m": entry(shape=[7], offsets=[0, size])})),
    ):
        forge(path, {f"{name}.safetensors": data})
        os.truncate(path / f"{name}.safetensors", len(data) + size)
    manifest = manifest_of(path)
    for file in manifest["files"]:
        file["size"] = (path / file["name"]).stat().st_size
    sign(path, manifest)
    monkeypatch.setattr(directory_module, "load_tensors", pytest.fail)
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.safetensors.*'m'"):
        load_checkpoint(path)


@pytest.mark.parametrize("cut_to", [0, 8, 4096])
def test_a_file_that_is_cut_while_it_is_read_is_damaged(tmp_path, monkeypatch, cut_to):
    weights = {"a": torch.ones(10_000), "b": torch.ones(10_000)}
    save_weights(weights, tmp_path / "a.safetensors")
    write_checkpoint(tmp_path / "saved", Checkpoint({"model": weights}))
    files = tmp_path / "a.safetensors", tmp_path / "saved" / "model.safetensors"
    for module in (directory_module, weights_module):

        def cut(*arguments, load=module.load_tensors):
            for file in files:
                os.truncate(file, cut_to)
            return load(*arguments)

        monkeypatch.setattr(module, "load_tensors", cut)
    with pytest.raises(DamagedCheckpointError, match="was cut while it was read"):
        load_checkpoint(tmp_path / "saved")
    save_weights(weights, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match="was cut while it was read"):
        load_weights(tmp_path / "a.safetensors")


def test_a_tensor_for_which_there_is_no_memory_is_named(path, monkeypatch):
    empty = torch.empty

    def limited(size, **keywords):
        if size:
            raise RuntimeError("can't allocate memory")
        return empty(size, **keywords)

    monkeypatch.setattr(torch, "empty", limited)
    with pytest.raises(CheckpointError, match="no memory for 'body"):
        load_checkpoint(path)


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
        {"files": [{**ENTRY, "sha256": 5}]},
        {"files": [ENTRY, ENTRY]},
        {"files": [{"name": "state.json"}]},
        {"files": [ENTRY, {**ENTRY, "name": 5}]},
        {"files": [ENTRY, {**ENTRY, "name": None}]},
        {"files": [ENTRY, {**ENTRY, "name": ["model.safetensors"]}]},
    ],
    ids=json.dumps,
)
def test_a_manifest_with_wrong_values_is_refused(path, changes):
    sign(path, manifest_of(path), **changes)
    for read in (load_checkpoint, read_manifest):
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
            read(path)


@pytest.mark.parametrize("text", ["[]", "5", "{}", '{"format": "ipufit-checkpoint"}'])
def test_json_that_is_no_manifest_is_refused(path, text):
    (path / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load_checkpoint(path)


def test_a_newer_version_is_refused_and_isnt_called_damaged(path):
    sign(path, manifest_of(path), version=2, files="in another form")
    with pytest.raises(CheckpointError, match=r"version 2.*upgrade ipufit") as caught:
        load_checkpoint(path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert str(path) in str(caught.value)
