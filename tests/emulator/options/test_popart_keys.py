# SPDX-License-Identifier: Apache-2.0
"""What is refused when a model is compiled: settings the backend doesn't know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.emulator._options.popart_keys import (
    ENUMERATIONS,
    KNOWN_POPART_OPTIONS,
    validate_popart_options,
)
from ipufit.emulator.enums import MeanReductionStrategy, OutputMode
from ipufit.emulator.errors import Error
from ipufit.emulator.options import (
    Options,
)

EXAMPLES = {
    "bool": True,
    "uint": 1,
    "float": 0.5,
    "str": "x",
    "list": ["1"],  # some lists are numbers of an enumeration's members
    "dict": {"x": "y"},
}


def _options():
    return Options().outputMode(OutputMode.All)


@given(st.sampled_from(sorted(EXAMPLES)), st.sampled_from(sorted(EXAMPLES)))
def test_a_known_key_takes_only_values_of_its_kind(kind, other):
    for key in KNOWN_POPART_OPTIONS[kind]:
        if kind == other:
            validate_popart_options({key: EXAMPLES[other]})
        else:
            with pytest.raises(Error, match=f"Unknown {other} option {key}"):
                validate_popart_options({key: EXAMPLES[other]})


@pytest.mark.parametrize(
    "value", [None, object(), np.float32(1), print, [None], {"x": 1.5}, (2.0,)]
)
def test_a_value_of_a_type_that_the_backend_does_not_take_is_refused(value):
    with pytest.raises(Error, match="Unknown value type"):
        validate_popart_options({"dotChecks": value})


@pytest.mark.parametrize("value", [[], {}, (), set()])
def test_an_empty_container_sets_nothing_whatever_its_name(value):
    validate_popart_options({"noSuchOption": value})


def test_a_boolean_count_is_refused_although_its_setter_takes_it():
    options = _options().deviceIterations(True)
    with pytest.raises(Error, match="Unknown bool option device_iterations"):
        validate_popart_options(options.toDict())


def test_post_and_loss_is_out_of_popart_range():
    options = _options()
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        MeanReductionStrategy.PostAndLoss
    )
    with pytest.raises(Error, match="out of range"):
        validate_popart_options(options.toDict())


@pytest.mark.parametrize("key", sorted(ENUMERATIONS))
def test_numbers_of_enumerations_are_those_that_popart_knows(key):
    """PopTorch, `SessionOptions.cpp`: `ADD_POPART_ENUM_OPTION` and its like."""
    is_list = key in KNOWN_POPART_OPTIONS["list"]
    known = {int(member) for member in ENUMERATIONS[key]}
    for number in range(-1, max(known) + 2):
        setting = {key: [number] if is_list else number}
        if number in known:
            validate_popart_options(setting)
        else:
            with pytest.raises(Error, match=f"out of range: option .* = {number}, and"):
                validate_popart_options(setting)


@pytest.mark.parametrize("key", sorted(ENUMERATIONS))
def test_a_member_of_an_enumeration_must_be_turned_into_an_int(key):
    """Those of PopART's compiled module aren't ints, so PopTorch knows no such type."""
    member = next(iter(ENUMERATIONS[key]))
    is_list = key in KNOWN_POPART_OPTIONS["list"]
    with pytest.raises(Error, match="Unknown value type"):
        validate_popart_options({key: [member] if is_list else member})


def test_patterns_need_their_level():
    with pytest.raises(Error, match="patterns_level"):
        validate_popart_options({"patterns": {"Foo": True}})
    validate_popart_options({"patterns": {"Foo": True}, "patterns_level": 2})


def test_a_memory_proportion_that_is_no_number_is_refused():
    options = _options().setAvailableMemoryProportion({"IPU3": "much"})
    with pytest.raises(Error, match="IPU3"):
        validate_popart_options(options.toDict())
