# SPDX-License-Identifier: Apache-2.0
"""Strict JSON that gives back exactly what went in."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.checkpoint.json_values import (
    MAX_DEPTH,
    dump_json,
    load_json,
    parse_json,
)
from ipufit.errors import UnsupportedError

texts = st.text(max_size=4) | st.sampled_from(["$", "$int", "$dict", "\ud800"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=12,
)


def nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@given(values)
def test_what_is_dumped_is_loaded(value):
    data = dump_json(value)
    assert repr(load_json(data)) == repr(value)  # types, -0.0 and NaN included
    json.loads(data, parse_constant=pytest.fail)  # any reader can


@pytest.mark.parametrize(
    "number",
    [2**64, -(2**63) - 1, 2**40000, -(2**40000)],
    ids=["unsigned", "signed", "long", "long negative"],
)
def test_integers_of_any_size_come_back(number):
    assert load_json(dump_json({"n": number})) == {"n": number}


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, (2,)]}, r"state\['a'\]\[1\] is a builtins.tuple"),
        ({"a": {1: 2}}, r"state\['a'\] has a key that is a int"),
        ({"a": b"x"}, "bytes"),
        ({"a": {2}}, "set"),
        ({"a": json}, "module"),
    ],
)
def test_what_json_has_no_word_for_is_named(value, where):
    with pytest.raises(UnsupportedError, match=where):
        dump_json(value, name="state")


def test_what_is_nested_too_deeply_is_neither_written_nor_read():
    deepest = nested(MAX_DEPTH - 1)
    assert load_json(dump_json(deepest)) == deepest
    with pytest.raises(UnsupportedError, match="levels deep"):
        dump_json(nested(MAX_DEPTH))
    endless = []
    endless.append(endless)
    with pytest.raises(UnsupportedError, match="levels deep"):
        dump_json(endless)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 200_000,
        b'{"a":[' * 150 + b"1" + b"]}" * 150,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    ],
    ids=range(5),
)
def test_deep_nesting_never_reaches_the_parser(data):
    with pytest.raises(ValueError, match="nested more than"):
        parse_json(data)


def test_brackets_and_quotes_in_strings_are_no_nesting():
    value = {'"\\[' * 200: ["\\", '\\"', "[{" * 200]}
    assert load_json(dump_json(value)) == value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"NaN", "NaN is no JSON"),
        (b"[Infinity]", "Infinity is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b"1e999", "too large"),
        (b"[1" + b"0" * 20 + b"]", "too many digits"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "'c' is there twice"),
        (b'{"a": 1, "\\u0061": 1}', "'a' is there twice"),
        (b'{"$float": "NaN"}', "can't"),
        (b'{"$float": 1.0}', "can't"),
        (b'{"$int": "12"}', "can't"),
        (b'{"$int": 12}', "can't"),
        (b'{"$dict": []}', "can't"),
        (b'{"$class": "os.system"}', "can't"),
        (b'{"$float": "nan", "a": 1}', "mixes"),
        (b'"\xff"', "utf-8"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b"", "Expecting value"),
        (b"1 2", "Extra data"),
        (b"'a'", "Expecting value"),
        (b'"a]', "Unterminated string"),
        (b'["a]', "brackets"),
        (b'"\n"', "control character"),
        (b"[1,]", "."),
        (b"nan", "Expecting value"),
    ],
)
def test_what_isnt_strict_json_is_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        load_json(data)


def test_negative_zero_and_infinities_keep_their_sign():
    assert [math.copysign(1, x) for x in load_json(dump_json([-0.0, -math.inf]))] == [
        -1,
        -1,
    ]
