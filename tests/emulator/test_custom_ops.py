# SPDX-License-Identifier: Apache-2.0
"""`custom_op`: zeros on the host, refused on the device."""

from __future__ import annotations

import sys

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X


def call(x=X, attributes=None):
    return poptorch.custom_op(
        [x], "Op", "ops.test", 1, example_outputs=[x, x.int()], attributes=attributes
    )


def test_the_host_gives_zeros_like_the_examples():
    first, second = call()
    assert torch.equal(first, torch.zeros_like(X))
    assert torch.equal(second, torch.zeros_like(X.int()))


@pytest.mark.parametrize(
    "value", [1.0, 2, "text", [1.0, 2.0], (1, 2), ["a"], [], 1e300]
)
def test_attributes_of_these_types_are_taken(value):
    attributes = {"key": value}
    call(attributes=attributes)
    assert poptorch.ops.attributes_lists[-1] is attributes


@pytest.mark.parametrize(
    ("attributes", "fragment"),
    [
        ({1: 1.0}, "All attribute keys must be strings"),
        ({"a": None}, "Attribute values must be floats, ints, strings"),
        ({"a": [1, {}]}, "Attribute values must be floats, ints, strings"),
        ({"a": [1.0, 2]}, "must all be the same"),
        ({"a": "b\u1f00"}, "b\u1f00 contains non-ASCII characters"),
        ({"a": ["b\u1f00"]}, "b\u1f00 contains non-ASCII characters"),
        ({"b\u1f00": 1}, "b\u1f00 contains non-ASCII characters"),
    ],
)
def test_other_attributes_are_refused(attributes, fragment):
    with pytest.raises(ValueError, match=fragment):
        call(attributes=attributes)


@pytest.mark.parametrize(
    ("attributes", "fragment"),
    [
        ({"a": sys.float_info.max}, r"1.79769e\+308 is too high for a Popart float"),
        ({"a": [1.0, -1e300]}, r"-1e\+300 is too low for a Popart float"),
        ({"a": 1.0}, "ops.test::Op .* can't be emulated"),
        (None, "ops.test::Op .* can't be emulated"),
    ],
)
def test_compiling_is_refused(attributes, fragment):
    model = poptorch.inferenceModel(Function(lambda _, x: call(x, attributes)))
    with pytest.raises(poptorch.Error, match=fragment):
        model(X)
