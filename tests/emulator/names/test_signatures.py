# SPDX-License-Identifier: Apache-2.0
"""PopTorch's public names, parameters and defaults, against a golden file.

`tests/golden/poptorch_signatures.json` says where it came from. What differs here does
so for the reason given in `tests/golden/differences.py`, and in no other way.
"""

import enum
import inspect
import json
import pickle
import re
from fnmatch import fnmatchcase

import pytest
import torch

import ipufit.emulator as poptorch
from ipufit.emulator.testing import allclose
from tests.golden.differences import ADDED, DIFFERENT, FUNCTION_DEFAULTS, MISSING
from tests.golden.namespace_remarks import LEGEND, REMARKS
from tests.golden.namespace_table import GOLDEN as FILE
from tests.golden.namespace_table import PAGE, names, page

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
ROWS = names(GOLDEN)


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


def found_of(part):
    """What the emulator has of a part of the golden file, without what it lacks."""
    names = {name for name in GOLDEN[part] if name not in MISSING}
    for name in GOLDEN[part].keys() - names:
        with pytest.raises(AttributeError):
            find(name)
    return {name: find(name) for name in names}


def test_signatures_are_poptorchs():
    found = {n: signature_text(f) for n, f in found_of("signatures").items()}
    golden = {n: without_names_after_stars(GOLDEN["signatures"][n]) for n in found}
    for name in found.keys() & DIFFERENT.keys():
        assert found.pop(name) == DIFFERENT[name][0] != golden.pop(name)
    for name in found.keys() & FUNCTION_DEFAULTS.keys():
        start = golden[name].index(FUNCTION_DEFAULTS[name])
        assert found.pop(name)[:start] == golden.pop(name)[:start]
        assert callable(inspect.signature(find(name)).parameters["filter_fn"].default)
    assert len(found) > 200
    assert found == golden


def test_names_are_there_and_of_their_kind():
    is_of_kind = {
        "class": lambda found: isinstance(found, type),
        "module": inspect.ismodule,
        "property": lambda found: isinstance(found, property),
        "compiled": callable,
        "value": lambda found: found is not None,
    }
    found = found_of("others").items()
    assert [n for n, f in found if not is_of_kind[GOLDEN["others"][n]](f)] == []


@pytest.mark.parametrize("name", sorted(GOLDEN["enums"]))
def test_an_enumeration_has_poptorchs_members_and_values(name):
    members = {member.name: member.value for member in find(name)}
    assert members == GOLDEN["enums"][name]
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


# The page of the namespace ----------------------------------------------------------


def test_the_page_is_up_to_date():
    current = PAGE.read_text(encoding="utf-8")
    assert current == page(GOLDEN), "run python -m tests.golden.namespace_table"


@pytest.mark.parametrize("pattern", REMARKS)
def test_a_remark_is_about_some_name_that_is_there(pattern):
    status, _ = REMARKS[pattern]
    assert status in LEGEND
    matching = [row for row in ROWS if fnmatchcase(row.name, pattern)]
    assert any(row.name not in MISSING for row in matching)


# Channels that record nothing -------------------------------------------------------


def test_instrumented_objects_stay_as_they_are():
    class Model:
        def forward(self):
            return 1

    model = Model()
    assert poptorch.profiling.Channel("a").instrument(model, "forward") is model
    assert "forward" not in vars(model)
    assert model.forward() == 1


def test_errors_come_out_of_a_trace_point():
    channel = poptorch.profiling.Channel("a")
    with pytest.raises(KeyError), channel.tracepoint("step"):
        raise KeyError


# allclose for structures ------------------------------------------------------------

A = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([A, (A, A)], True),
        ([A + 1e-7, (A, A)], True),
        ([A, (A, A + 1)], False),
        ((A, (A, A)), False),
        ([A, (A,)], False),
        ([A, [A, A]], False),
    ],
)
def test_types_lengths_and_values_must_agree(other, expected):
    assert allclose([A, (A, A)], other) is expected


def test_anything_else_is_refused():
    with pytest.raises(AssertionError, match="not float"):
        allclose([1.0], [1.0])
