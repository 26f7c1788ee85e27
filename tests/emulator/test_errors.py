# SPDX-License-Identifier: Apache-2.0
"""PopTorch's exceptions: their tree, their attributes, their text."""

from __future__ import annotations

import copy
import pickle

import pytest

from ipufit.emulator.errors import (
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)


def test_error_derives_from_exception_and_nothing_narrower():
    assert Error.__bases__ == (Exception,)


@pytest.mark.parametrize("error_type", [RecoverableError, UnrecoverableError])
def test_device_errors_are_errors(error_type):
    assert error_type.__bases__ == (Error,)


def test_create_returns_an_error_of_the_python_layer():
    error = createPoptorchError("too late")

    assert type(error) is Error
    assert str(error) == "'poptorch_py_error': too late"
    assert (error.message, error.type, error.location) == (
        "too late",
        "poptorch_py_error",
        "",
    )


def test_an_error_of_another_layer_says_so():
    error = Error("bad shape", type="popart_exception", location="op.cpp:3")

    assert str(error) == "'popart_exception': bad shape"
    assert error.location == "op.cpp:3"


@pytest.mark.parametrize("copier", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_keep_their_attributes_when_copied(copier):
    error = RecoverableError(
        "link down", "poplar_link_error", "x.cpp:1", recovery_action="LINK_RESET"
    )

    duplicate = copier(error)

    assert type(duplicate) is RecoverableError
    assert vars(duplicate) == vars(error)
    assert str(duplicate) == str(error)


def test_a_device_error_does_not_claim_to_come_from_python():
    assert UnrecoverableError("tile").type == "poptorch_cpp_error"
    assert RecoverableError("tile").type == "poptorch_cpp_error"
