# SPDX-License-Identifier: Apache-2.0
"""The options, output mode and state of an executor."""

from __future__ import annotations

import pytest
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, wrap

# Options ----------------------------------------------------------------------


def test_options_are_options():
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        poptorch.inferenceModel(nn.Identity(), {"deviceIterations": 2})


# What it says of itself -------------------------------------------------------


def test_it_is_compiled_and_attached_from_the_first_call_to_the_end():
    _, executor = wrap()
    seen = [(executor.isCompiled(), executor.isAttachedToDevice())]
    for step in (lambda: executor(ONE), executor.detachFromDevice, executor.destroy):
        step()
        seen.append((executor.isCompiled(), executor.isAttachedToDevice()))
    assert seen == [(False, False), (True, True), (True, False), (False, False)]
