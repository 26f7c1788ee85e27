# SPDX-License-Identifier: Apache-2.0
"""What scripts and tests use of PopTorch's compiled module."""

import copy
import pickle

import pytest

import ipufit.emulator as poptorch
from ipufit.emulator import poptorch_core
from ipufit.emulator.errors import (
    Error,
    RecoverableError,
    createPoptorchError,
)
from ipufit.emulator.poptorch_core import TestErrorType, _throwTestError

LAYERS = {
    "Poptorch": "poptorch_cpp_error",
    "Popart": "popart_exception",
    "PopartInternal": "popart_internal_exception",
    "Poplibs": "poplibs_exception",
    "PoplarUnrecoverable": "poplar_unrecoverable_runtime_error",
    "PoplarUnknown": "poplar_unknown_runtime_error",
    "PoplarRecoverableFullReset": "poplar_recoverable_runtime_error",
    "PoplarLinkError": "poplar_link_error",
}


@pytest.mark.parametrize(("name", "layer"), LAYERS.items())
def test_an_error_says_its_layer_and_where_it_was_found(name, layer):
    with pytest.raises(poptorch.Error) as info:
        _throwTestError(TestErrorType[name])
    assert info.value.type == layer
    for place in ("throwTestError::bottomLevel", "throwTestError::topLevel"):
        assert info.value.location.count(place) == 1
        assert place in info.value.args[0]
        assert place not in info.value.message


def test_device_errors_have_classes_of_their_own():
    with pytest.raises(poptorch.RecoverableError) as info:
        _throwTestError(TestErrorType.PoplarRecoverableFullReset)
    assert info.value.recovery_action == "FULL_RESET"
    with pytest.raises(poptorch.UnrecoverableError):
        _throwTestError(TestErrorType.PoplarUnrecoverable)


def test_options_are_checked_as_before_compiling():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    poptorch_core._validateOptions(options.toDict())
    options._Popart.set("no_such_option", True)
    with pytest.raises(poptorch.Error, match="Unknown bool option no_such_option"):
        poptorch_core._validateOptions(options.toDict())


# Errors -----------------------------------------------------------------------------


def test_create_returns_an_error_of_the_python_layer():
    error = createPoptorchError("too late")

    assert type(error) is Error
    assert str(error) == "'poptorch_py_error': too late"
    assert (error.message, error.type, error.location) == (
        "too late",
        "poptorch_py_error",
        "",
    )


@pytest.mark.parametrize("copier", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_keep_their_attributes_when_copied(copier):
    error = RecoverableError(
        "link down", "poplar_link_error", "x.cpp:1", recovery_action="LINK_RESET"
    )

    duplicate = copier(error)

    assert type(duplicate) is RecoverableError
    assert vars(duplicate) == vars(error)
    assert str(duplicate) == str(error)
