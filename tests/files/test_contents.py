# SPDX-License-Identifier: Apache-2.0
"""States and tensors come back exactly, and what can't be written is named."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ipufit.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ipufit.errors import UnsupportedError
from tests.files.samples import names, same_tensors

pytestmark = pytest.mark.usefixtures("unsynced")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
DEPTH = 98  # of lists in a state, which is a dict
keys = st.text("ab.$é_0", min_size=1, max_size=5)
some_tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
texts = st.text(max_size=4) | st.sampled_from(["$", "$int", "$dict", "\ud800"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def state_read(path, state):
    write_checkpoint(path, Checkpoint(state=state))
    return load_checkpoint(path).state


def tensors_read(path, tensors):
    write_checkpoint(path, Checkpoint({"model": tensors}))
    read = load_checkpoint(path).tensors["model"]
    assert read.keys() == tensors.keys()
    return {name: read[name] for name in tensors}


@given(st.dictionaries(texts, values, max_size=3))
def test_a_state_comes_back(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("state") / "a"
    assert repr(state_read(path, state)) == repr(state)  # types, -0.0, NaN included
    text = (path / "state.json").read_text()
    json.loads(text, parse_constant=pytest.fail)  # any reader can


@pytest.mark.parametrize(
    "number", [2**64, -(2**63) - 1, 2**40000, -(2**40000)], ids=range(4)
)
def test_integers_of_any_size_come_back(path, number):
    assert state_read(path, {"n": number}) == {"n": number}


def test_brackets_and_quotes_in_strings_are_no_nesting(path):
    state = {'"\\[' * 200: ["\\", '\\"', "[{" * 200]}
    assert state_read(path, state) == state
    signs = state_read(path, {"zero": -0.0, "least": -math.inf})
    assert [math.copysign(1, value) for value in signs.values()] == [-1, -1]


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_what_is_nested_too_deeply_isnt_written(path):
    assert state_read(path, {"a": nested(DEPTH)}) == {"a": nested(DEPTH)}
    endless = []
    endless.append(endless)
    for value in (nested(DEPTH + 1), endless):
        with pytest.raises(UnsupportedError, match="levels deep"):
            state_read(path, {"a": value})


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, (2,)]}, r"state\['v'\]\['a'\]\[1\] is a builtins.tuple"),
        ({"a": {1: 2}}, r"state\['v'\]\['a'\] has a key that is a int"),
        ({"a": b"x"}, "bytes"),
        ({"a": {2}}, "set"),
        ({"a": json}, "module"),
    ],
)
def test_what_json_has_no_word_for_is_named(path, value, where):
    with pytest.raises(UnsupportedError, match=where):
        state_read(path, {"v": value})


@given(st.dictionaries(keys, some_tensors, max_size=5))
def test_tensors_come_back(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("tensors") / "a"
    assert same_tensors(tensors_read(path, tensors), tensors)
    theirs = load_file(str(path / "model.safetensors"))
    assert same_tensors({name: theirs[name] for name in tensors}, tensors)


def test_strides_views_and_lazy_conjugates_are_written_as_they_look(path):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    wave = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "turned": base.t(),
        "row": base[1],
        "step": base[:, ::2],
        "negative": wave.conj().imag,
        "expanded": torch.ones(1).expand(4),
        "matrix": base,
        "zero-dimensional": base[0, 0],
        "empty": torch.zeros(0, 3),
    }
    assert same_tensors(tensors_read(path, tensors), tensors)


def test_tied_names_are_written_in_full_and_tied_again(path):
    weight, other = torch.ones(2, 3), torch.full((4,), float("nan"))
    tensors = {"in": weight, "w": other, "out": weight, "x": other, "one": weight[0]}
    read = tensors_read(path, tensors)
    assert same_tensors(read, tensors)
    assert read["in"] is read["out"]
    assert read["w"] is read["x"]
    assert read["one"].data_ptr() != read["in"].data_ptr()
    assert load_file(str(path / "model.safetensors")).keys() == tensors.keys()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({1: torch.ones(1)}, "can't name"),
        ({"__metadata__": torch.ones(1)}, "can't name"),
        ({"\ud800": torch.ones(1)}, "group has names or dtypes"),
        ({"a": [1.0]}, r"group\['a'\] is a list"),
        ({"a": torch.ones(2).to_sparse()}, "to_dense"),
        ({"a": torch.ones(2, device="meta")}, "meta"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_what_a_file_cant_hold_is_named(tmp_path, tensors, reason):
    with pytest.raises(UnsupportedError, match=reason):
        write_checkpoint(tmp_path / "a", Checkpoint({"group": tensors}))
    assert names(tmp_path) == []
