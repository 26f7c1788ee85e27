# SPDX-License-Identifier: Apache-2.0
"""Nested tensors, and types of the user's own."""

import importlib
import sys
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipufit.emulator import (
    Error,
    flattenTensorStructure,
    reconstructTensorStructure,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from tests.emulator._datasets import Pair, PairParser
from tests.strategies import examples

Point = namedtuple("Point", ["x", "y"])


class SpecialPair(Pair):
    pass


class MyList(list):
    pass


@pytest.fixture
def pair_parser():
    parser = PairParser()
    registerCustomArgParser(Pair, parser)
    yield parser
    registerCustomArgParser(Pair, None)


def numbers(structure, order=None):
    return [int(tensor) for tensor in flattenTensorStructure(structure, order)]


def t(value):
    return torch.tensor(value)


def test_the_canonical_structure_gives_the_order_of_keys_at_every_depth():
    canonical = ({"a": [{"x": 0, "y": 0}], "b": 0},)
    nested = ({"b": t(3), "a": [{"y": t(2), "x": t(1)}]},)
    assert numbers(nested, canonical) == [1, 2, 3]


def test_containers_keep_their_class():
    structure = (
        [t(0)],
        MyList([t(0)]),
        Point(t(0), "label"),
        OrderedDict(b=t(0), a=None),
        7,
    )
    rebuilt = reconstructTensorStructure(structure, "pqrs")
    assert rebuilt == (["p"], ["q"], ("r", "label"), {"b": "s", "a": None}, 7)
    assert [type(item) for item in rebuilt] == [type(item) for item in structure]


def test_too_few_values_are_an_error():
    with pytest.raises(Error, match="fewer values"):
        reconstructTensorStructure([t(1), t(2)], [1])


def test_custom_types_are_read_and_rebuilt_by_their_parser(pair_parser):
    structure = [Pair(t(1), t(2)), t(3)]
    assert numbers(structure) == [1, 2, 3]
    rebuilt = reconstructTensorStructure(structure, [4, 5, 6])
    assert (rebuilt[0].left, rebuilt[0].right, rebuilt[1]) == (4, 5, 6)


def test_the_filter_sees_the_tensors_of_custom_types(pair_parser):
    pair = Pair(t(1), t(2))
    rebuilt = reconstructTensorStructure(
        pair, ["new"], filter_fn=lambda leaf: leaf is pair.right
    )
    assert rebuilt.left is pair.left
    assert rebuilt.right == "new"


def test_the_exact_type_comes_before_base_classes(pair_parser):
    class LeftOnly(PairParser):
        def yieldTensors(self, struct):  # noqa: N802
            yield struct.left

    registerCustomArgParser(SpecialPair, LeftOnly())
    try:
        assert numbers(SpecialPair(t(1), t(2))) == [1]
        assert numbers(Pair(t(1), t(2))) == [1, 2]
    finally:
        registerCustomArgParser(SpecialPair, None)


def test_a_parser_must_be_a_parser():
    with pytest.raises(Error, match="ICustomArgParser"):
        registerCustomArgParser(Pair, PairParser)


leaves = st.one_of(st.none(), st.integers(-5, 5).map(torch.tensor), st.text(max_size=2))
structures = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Point, children, children),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=examples(80))
@given(structures)
def test_any_nesting_survives_flatten_and_rebuild(structure):
    doubled = [2 * tensor for tensor in flattenTensorStructure(structure)]
    rebuilt = reconstructTensorStructure(structure, doubled)
    assert numbers(rebuilt) == [2 * number for number in numbers(structure)]
    halved = reconstructTensorStructure(rebuilt, flattenTensorStructure(structure))
    assert repr(halved) == repr(structure)


def test_parsers_of_poptorch_geometric_are_registered_if_it_is_there(
    tmp_path, monkeypatch
):
    registerGeometricCustomArgParsers()  # it isn't: nothing happens
    package = tmp_path / "poptorch_geometric"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "types.py").write_text(
        "calls = []\ndef registerCustomArgParsers():\n    calls.append(1)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        registerGeometricCustomArgParsers()
        types = importlib.import_module("poptorch_geometric.types")
        assert types.calls == [1]
    finally:
        for name in ("poptorch_geometric", "poptorch_geometric.types"):
            sys.modules.pop(name, None)
