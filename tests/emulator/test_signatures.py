# SPDX-License-Identifier: Apache-2.0
"""PopTorch's public names, parameters and defaults, against a golden file.

`tests/golden/poptorch_signatures.json` says where it came from. What differs here does
so for the reason given in `tests/golden/differences.py`, and in no other way.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest

from ipufit import emulator as poptorch
from tests.golden.differences import ADDED, DIFFERENT, FUNCTION_DEFAULTS, MISSING

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "poptorch_signatures.json").read_text(
        encoding="utf-8"
    )
)


@pytest.fixture(autouse=True, scope="module")
def _testing_is_imported():
    importlib.import_module("ipufit.emulator.testing")  # as in PopTorch, not by itself


def find(name):
    """The emulator's counterpart of a dotted name, as it is stored."""
    found = poptorch
    for part in name.split("."):
        if inspect.ismodule(found):  # which may import it at its first use
            getattr(found, part)
        owner, found = found, inspect.getattr_static(found, part)
        if owner is poptorch.Options and isinstance(found, property):
            found = type(getattr(poptorch.Options(), part))  # a section
    return found


def signature_text(function):
    """A signature in the words of the golden file, but without names after stars."""
    kind = ""
    if isinstance(function, (staticmethod, classmethod)):
        kind, function = type(function).__name__, function.__func__
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append("*")
        elif parameter.kind is parameter.VAR_KEYWORD:
            parts.append("**")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            parts.append(f"{parameter.name}={default_text(parameter.default)}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            parts.append("/")
    return f"{kind}({', '.join(parts)})"


def default_text(value):
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value)


def without_names_after_stars(text):
    return re.sub(r"(\*+)\w+", r"\1", text)


@pytest.mark.parametrize("name", sorted(GOLDEN["signatures"]))
def test_a_signature_is_poptorchs(name):
    if name in MISSING:
        with pytest.raises(AttributeError):
            find(name)
        return
    expected = without_names_after_stars(GOLDEN["signatures"][name])
    text = signature_text(find(name))
    if name in DIFFERENT:
        assert text == DIFFERENT[name][0] != expected
    elif name in FUNCTION_DEFAULTS:
        start = expected.index(FUNCTION_DEFAULTS[name])
        assert text[:start] == expected[:start]
        assert callable(inspect.signature(find(name)).parameters["filter_fn"].default)
    else:
        assert text == expected


@pytest.mark.parametrize("name", sorted(GOLDEN["others"]))
def test_a_name_is_there_and_of_its_kind(name):
    kind = GOLDEN["others"][name]
    if name in MISSING:
        with pytest.raises(AttributeError):
            find(name)
        return
    found = find(name)
    assert {
        "class": isinstance(found, type),
        "module": inspect.ismodule(found),
        "property": isinstance(found, property),
        "compiled": callable(found),
        "value": found is not None,
    }[kind]


@pytest.mark.parametrize("name", sorted(GOLDEN["enums"]))
def test_an_enumeration_has_poptorchs_members_and_values(name):
    members = {member.name: member.value for member in find(name)}
    assert members == GOLDEN["enums"][name]


@pytest.mark.parametrize("name", sorted(GOLDEN["enums"]))
def test_members_of_an_enumeration_are_integers_or_words_and_pickle(name):
    has_words = name in {"MatMulSerializationMode", "OverlapMode"}
    assert issubclass(find(name), enum.IntEnum) is not has_words
    for member in find(name):
        assert pickle.loads(pickle.dumps(member)) is member


def test_no_name_is_added_but_those_listed():
    known = {
        name.partition(".")[0]
        for part in ("signatures", "enums", "others")
        for name in GOLDEN[part]
    }
    assert set(poptorch.__all__) - known - {"__version__"} == ADDED
