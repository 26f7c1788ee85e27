# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of our own writing, against the library's."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ipufit.checkpoint import tensors as module
from ipufit.checkpoint.tensors import check_tensors, read_tensors, tensor_parts
from ipufit.errors import CheckpointError, UnsupportedError
from tests.checkpoint.samples import as_bytes, same_tensors

GOLDEN = "60cfcdfd9b01f154899755691ef6c73ca9642c86ae75584ae27a37cb158f2d76"
DTYPES = sorted(module._NAMES, key=str)
keys = st.text("ab.$é_0", min_size=1, max_size=5)
some_tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)


class Source:
    """Bytes that are read once."""

    def __init__(self, data):
        self.file = io.BytesIO(data)

    def read(self, count):
        data = self.file.read(count)
        assert len(data) == count
        return data

    def read_into(self, view):
        assert self.file.readinto(view) == len(view)


def written(tensors):
    check_tensors(tensors, "group")
    return b"".join(bytes(part) for part in tensor_parts(tensors))


def read(data):
    return read_tensors(Source(data), len(data))


def loaded_by_the_library(data, folder):
    (folder / "ours.safetensors").write_bytes(data)
    return load_file(str(folder / "ours.safetensors"))


def forged(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@given(st.dictionaries(keys, some_tensors, max_size=5))
def test_what_is_written_is_read_in_its_order(tensors):
    assert same_tensors(read(written(tensors)), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_library_reads_what_we_write(dtype, tmp_path):
    tensors = {
        "matrix": torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype),
        "zero-dimensional": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=torch.int64).to(dtype),
        "odd": torch.zeros(3, dtype=torch.uint8),
    }
    try:
        loaded = loaded_by_the_library(written(tensors), tmp_path)
    except (SafetensorError, KeyError):
        if dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
            raise
        pytest.skip("this safetensors is too old for the dtype")
    assert same_tensors({name: loaded[name] for name in tensors}, tensors)


# Not empty: safetensors 0.4.0 writes broken JSON for no tensors with metadata.
@given(st.dictionaries(keys, some_tensors, min_size=1, max_size=5))
def test_we_read_what_the_library_writes(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("theirs") / "a.safetensors"
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except (SafetensorError, KeyError):
        return  # it is too old for a dtype
    ours = read(path.read_bytes())
    assert same_tensors({name: ours[name] for name in tensors}, tensors)


def test_the_library_finds_values_where_they_are_aligned(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5).double()}
    path = tmp_path / "a.safetensors"
    path.write_bytes(written(tensors))
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == ["a", "b"]
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert header["b"]["data_offsets"] == [0, 40]


def test_the_bytes_are_always_the_same():
    """The checksum was taken from the first version of the format."""
    data = written({"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7)})
    assert hashlib.sha256(data).hexdigest() == GOLDEN


def test_strides_views_and_lazy_conjugates_are_written_as_they_look():
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    wave = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "turned": base.t(),
        "row": base[1],
        "step": base[:, ::2],
        "conjugate": wave.conj(),
        "negative": wave.conj().imag,
        "same": wave,
        "expanded": torch.ones(1).expand(4),
    }
    assert same_tensors(read(written(tensors)), tensors)


def test_tied_names_are_written_in_full_and_tied_again(tmp_path):
    weight, other = torch.ones(2, 3), torch.full((4,), float("nan"))
    tensors = {"in": weight, "w": other, "out": weight, "x": other, "one": weight[0]}
    data = written(tensors)
    plain = loaded_by_the_library(data, tmp_path)
    assert plain.keys() == tensors.keys()
    read_back = read(data)
    assert same_tensors(read_back, tensors)
    assert read_back["in"] is read_back["out"]
    assert read_back["w"] is read_back["x"]
    assert read_back["one"].data_ptr() != read_back["in"].data_ptr()


def test_a_tied_model_loads_in_plain_torch(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = loaded_by_the_library(written(model.state_dict()), tmp_path)
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    fresh[1].weight = fresh[0].weight
    fresh.load_state_dict(state)  # strict
    assert torch.equal(fresh[1].weight, model[0].weight)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({1: torch.ones(1)}, "can't name"),
        ({"__metadata__": torch.ones(1)}, "can't name"),
        ({"\ud800": torch.ones(1)}, "can't name"),
        ({"a": [1.0]}, r"group\['a'\] is a list"),
        ({"a": torch.ones(2).to_sparse()}, "to_dense"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
        ({"a": torch.ones([1] * 65)}, "65 dimensions"),
    ],
)
def test_what_a_file_cant_hold_is_named(tensors, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_tensors(tensors, "group")


EIGHT = b"\0" * 8
HOSTILE = {
    "no bytes": (b"", "too few"),
    "huge header": ((2**63).to_bytes(8, "little") + b"{}", "claims"),
    "header as long as the file": (b"\x0a" + b"\0" * 7 + b"{}", "claims"),
    "no header": (forged(b""), "Expecting value"),
    "a list": (forged(b"[]"), "no JSON object"),
    "a pickle": (b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix", "claims"),
    "twice": (forged(b'{"a": {}, "a": {}}'), "twice"),
    "deep": (forged(b'{"a":' * 500), "nested"),
    "NaN": (forged(b'{"a": NaN}'), "NaN"),
    "no offsets": (forged({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "lacks"),
    "more keys": (forged({"a": {**entry(), "class": "os"}}, EIGHT), "lacks"),
    "no object": (forged({"a": []}, EIGHT), "lacks"),
    "unknown dtype": (forged({"a": entry("F31")}, EIGHT), "unknown dtype 'F31'"),
    "a dtype of torch": (forged({"a": entry("load")}, EIGHT), "unknown dtype"),
    "dtype of another type": (forged({"a": entry([1])}, EIGHT), "unknown dtype"),
    "negative": (forged({"a": entry(shape=[-2])}, EIGHT), "shape"),
    "bool": (forged({"a": entry(shape=[True, 2])}, EIGHT), "shape"),
    "float": (forged({"a": entry(shape=[2.0])}, EIGHT), "shape"),
    "no list": (forged({"a": {**entry(), "shape": 2}}, EIGHT), "shape"),
    "dimensions": (forged({"a": entry(shape=[1] * 64 + [2])}, EIGHT), "shape"),
    "three offsets": (forged({"a": entry(offsets=[0, 4, 8])}, EIGHT), "offsets"),
    "text offsets": (forged({"a": entry(offsets=["0", "8"])}, EIGHT), "offsets"),
    "huge": (forged({"a": entry(shape=[2**62, 2**62])}, EIGHT), "beyond any memory"),
    "empty and huge": (
        forged({"a": entry(shape=[2**62, 4, 0], offsets=[0, 0])}),
        "beyond any memory",
    ),
    "another size": (forged({"a": entry(shape=[3])}, EIGHT), "lies where"),
    "backwards": (forged({"a": entry(offsets=[8, 0])}, EIGHT), "lies where"),
    "overlap": (forged({"a": entry(), "b": entry()}, EIGHT), "lies where"),
    "hole": (forged({"a": entry(offsets=[8, 16])}, EIGHT * 2), "lies where"),
    "beyond the end": (forged({"a": entry()}, b""), "take 8 bytes, and it holds 0"),
    "before the end": (forged({"a": entry()}, EIGHT * 2), "holds 16"),
    "no bools": (forged({"a": entry("BOOL", [1], [0, 1])}, b"\x02"), "bools"),
    "metadata": (forged({"__metadata__": {"a": 1}}), "aren't strings"),
    "metadata list": (forged({"__metadata__": []}), "aren't strings"),
    "tied to nothing": (
        forged({"__metadata__": {module.TIED_KEY: '[["a", "b"]]'}}),
        "aren't names",
    ),
    "tied text": (forged({"__metadata__": {module.TIED_KEY: '"ab"'}}), "no lists"),
    "tied number": (forged({"__metadata__": {module.TIED_KEY: "[[1, 2]]"}}), "names"),
    "tied list": (forged({"__metadata__": {module.TIED_KEY: "[[[], {}]]"}}), "names"),
    "tied and different": (
        forged(
            {
                "__metadata__": {module.TIED_KEY: '[["a", "b"]]'},
                "a": entry(),
                "b": entry(offsets=[8, 16]),
            },
            EIGHT + b"\1" * 8,
        ),
        "tied, but differ",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_malformed_file_is_refused(name):
    data, reason = HOSTILE[name]
    with pytest.raises(ValueError, match=reason):
        read(data)


def test_a_dtype_that_this_torch_lacks_is_no_damage(monkeypatch):
    data = written({"a": torch.ones(2, dtype=torch.int16)})
    monkeypatch.setitem(module._DTYPES, "I16", "int16_of_tomorrow")
    with pytest.raises(CheckpointError, match="newer torch"):
        read(data)


def test_nothing_is_copied_that_neednt_be():
    tensor = torch.arange(4.0)
    *_, values = tensor_parts({"a": tensor})
    tensor[0] = 5
    assert bytes(values) == as_bytes(tensor)
