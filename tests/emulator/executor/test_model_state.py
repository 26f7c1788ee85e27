# SPDX-License-Identifier: Apache-2.0
"""The options, output mode and state of an executor."""

from __future__ import annotations

import pytest
from torch import nn

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, wrap

# Options ----------------------------------------------------------------------


def test_options_are_cloned_and_both_are_frozen():
    options = poptorch.Options().deviceIterations(3)
    executor = poptorch.inferenceModel(nn.Identity(), options)
    assert executor.options is not options
    assert executor.options.device_iterations == 3
    for frozen in (options, executor.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            frozen.deviceIterations(4)


def test_options_are_options():
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        poptorch.inferenceModel(nn.Identity(), {"deviceIterations": 2})


def test_options_serve_several_models():
    options = poptorch.Options()
    wrap(options=options)
    poptorch.inferenceModel(nn.Identity(), options)(ONE)


@pytest.mark.parametrize(
    ("mode", "training", "expected"),
    [
        (None, True, poptorch.OutputMode.Final),
        (None, False, poptorch.OutputMode.All),
        (poptorch.OutputMode.Sum, True, poptorch.OutputMode.Sum),
        (poptorch.OutputMode.Final, False, poptorch.OutputMode.Final),
    ],
)
def test_the_default_output_mode_depends_on_the_kind(mode, training, expected):
    options = poptorch.Options()
    if mode is not None:
        options.outputMode(mode)
    executor = (
        wrap(options=options)[1]
        if training
        else poptorch.inferenceModel(nn.Identity(), options)
    )
    assert executor.options.output_mode == expected.value


# What it says of itself -------------------------------------------------------


def test_the_model_is_the_users_module():
    model, executor = wrap()
    assert executor.model is model


def test_it_is_compiled_and_attached_from_the_first_call_to_the_end():
    _, executor = wrap()
    seen = [(executor.isCompiled(), executor.isAttachedToDevice())]
    for step in (lambda: executor(ONE), executor.detachFromDevice, executor.destroy):
        step()
        seen.append((executor.isCompiled(), executor.isAttachedToDevice()))
    assert seen == [(False, False), (True, True), (True, False), (False, False)]
