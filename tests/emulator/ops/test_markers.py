# SPDX-License-Identifier: Apache-2.0
"""Annotations change no value, on the host and on the device."""

from __future__ import annotations

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import Function, X, assert_device_equals_host

MODE = poptorch.MatMulSerializationMode

MARKERS = {
    "nop": poptorch.nop,
    "recomputationCheckpoint": poptorch.recomputationCheckpoint,
    "set_available_memory": lambda x: poptorch.set_available_memory(x, 0.3),
}


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_gives_the_same_tensor(name):
    assert MARKERS[name](X) is X


@pytest.mark.parametrize("name", MARKERS)
def test_a_marker_changes_nothing_on_the_device(name):
    assert_device_equals_host(Function(lambda _, x: MARKERS[name](x * 2) + 1), X)


@pytest.mark.parametrize("name", ["nop", "set_available_memory"])
def test_what_is_no_tensor_is_refused(name):
    with pytest.raises(poptorch.Error, match="Got float"):
        MARKERS[name](1.0)


def test_a_checkpoint_keeps_the_container():
    a, b = torch.ones(1), torch.zeros(1)
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert poptorch.recomputationCheckpoint((a, b)) == (a, b)
    assert poptorch.recomputationCheckpoint() == ()


def test_a_checkpoint_of_one_in_a_list_is_its_rows():
    rows = poptorch.recomputationCheckpoint([torch.tensor([1.0, 2.0])])
    assert rows == [torch.tensor(1.0), torch.tensor(2.0)]


def test_a_checkpoint_takes_tensors_only():
    with pytest.raises(ValueError, match="All inputs must be tensors"):
        poptorch.recomputationCheckpoint(X, 3)


@pytest.mark.parametrize("mode", list(MODE))
def test_a_serialized_product_is_the_product(mode):
    result = poptorch.serializedMatMul(X, X.T, mode, factor=2, keep_precision=True)
    assert torch.equal(result, X @ X.T)


@pytest.mark.parametrize(
    "arguments",
    [("none",), (MODE.Disabled, 1.0), (MODE.Disabled, 1, 1)],
)
def test_a_serialized_product_checks_types(arguments):
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(X, X.T, *arguments)


def test_scopes_change_nothing():
    def forward(_, x):
        with poptorch.NameScope("outer"), poptorch.Attribute(__outline={"a": "b"}):
            return x + 1

    assert_device_equals_host(Function(forward), X)


def test_a_name_scope_needs_a_string():
    with pytest.raises(AssertionError, match="NameScope must be a string"):
        poptorch.NameScope(3)
