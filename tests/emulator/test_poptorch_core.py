# SPDX-License-Identifier: Apache-2.0
"""What scripts and tests use of PopTorch's compiled module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import ipufit.emulator as poptorch
from ipufit.emulator import poptorch_core
from ipufit.emulator.errors import (
    Error,
    RecoverableError,
    UnrecoverableError,
    createPoptorchError,
)
from ipufit.emulator.poptorch_core import TestErrorType, _throwTestError
from tests.emulator._models import Function

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


def test_the_errors_are_poptorchs():
    assert poptorch_core.Error is poptorch.Error
    assert poptorch_core.RecoverableError is poptorch.RecoverableError
    assert poptorch_core.UnrecoverableError is poptorch.UnrecoverableError


def test_every_layer_can_fail():
    assert set(LAYERS) == set(TestErrorType.__members__)


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


def test_a_link_error_ends_with_the_linkers_output():
    with pytest.raises(poptorch.Error, match="-lfoo not found"):
        _throwTestError(TestErrorType.PoplarLinkError)


def test_options_are_checked_as_before_compiling():
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    poptorch_core._validateOptions(options.toDict())
    options._Popart.set("no_such_option", True)
    with pytest.raises(poptorch.Error, match="Unknown bool option no_such_option"):
        poptorch_core._validateOptions(options.toDict())


def test_it_knows_when_a_model_is_being_compiled():
    seen = []

    def forward(self, x):
        seen.append(poptorch_core.isCompilingWithDispatcher())
        return x + 1

    model = poptorch.inferenceModel(Function(forward))
    model(torch.zeros(2))
    model.destroy()
    assert seen == [True]
    assert not poptorch_core.isCompilingWithDispatcher()


def test_the_end_of_python_asks_for_nothing():
    model = poptorch.inferenceModel(nn.Identity())
    model.compile(torch.ones(1))
    poptorch.poptorchAtExit()
    assert model(torch.ones(1)).item() == 1


# Errors -----------------------------------------------------------------------------


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
