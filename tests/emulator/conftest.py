# SPDX-License-Identifier: Apache-2.0
"""The survey of a program (`ipufit check`) names what compiling it refuses.

Each program that the modules below compile is surveyed, too. What is refused must be
among the findings in the same words, at the line from which the refusal came; what
compiles must have none.
"""

import re
from pathlib import Path

import pytest
import torch

from ipufit.emulator import Error
from ipufit.emulator import _poplar_executor as executor
from ipufit.emulator._impl import unwrapped
from ipufit.emulator.core.layout import Layout
from ipufit.emulator.core.survey import survey

ROOT = Path(__file__).parents[1]
MODULES = (
    *("args", "losses", "strict", "trace", "control_flow"),
    *("custom_ops", "decoder", "floating_point", "markers", "slices"),
    *("device_numbers", "limits", "liveness"),
    *("refusals", "tensor_devices"),
)
ONCE = {
    "test_a_tensor_says_that_it_is_on_the_ipu",
    "test_a_tensor_without_a_device_is_said_once_a_program",
    "test_each_micro_batch_calls_the_host",
    "test_lazy_modules_need_a_sample_on_the_host",
    "test_sparse_tensors_are_refused",
    "test_the_body_is_called_once_on_the_device_and_on_the_host",
}
"""Tests that count how often something is traced, or in which nothing is traced."""

OTHER_WORDS = ("Unsupported ops found", "doesn't take the result", ".tolist() needs")
"""Beginnings of messages that a survey gives in other words, or one by one."""


def is_surveyed(item):
    is_here = Path(__file__).parent in item.path.parents
    is_of_them = is_here and item.path.stem[len("test_") :] in MODULES
    return is_of_them and item.function.__name__ not in ONCE


@pytest.fixture(autouse=True)
def _surveyed(request, monkeypatch):
    if is_surveyed(request.node):
        original = executor.compile_model
        monkeypatch.setattr(
            executor, "compile_model", lambda *given: surveyed(original, *given)
        )


def surveyed(original, model, options, arguments, groupings, link):
    error, result = None, None
    try:
        result = original(model, options, arguments, groupings, link)
    except Exception as raised:  # noqa: BLE001 - raised again below
        error = raised
    tensors = list(arguments.args)
    if not arguments.kwargs and all(type(one) is torch.Tensor for one in tensors):
        blocks = Layout(options).input_blocks
        rows = [t.detach()[: len(t) // blocks] if t.dim() else t for t in tensors]
        with unwrapped(model):
            found = survey(model, rows, options, is_training=link is not None)
        compare(found, error)
    if error is not None:
        raise error
    return result


def compare(found, error):
    refused = [remark for remark in found.remarks if remark.is_refused]
    if error is None:  # not strict: operators are computed all the same
        assert all(remark.topic == "operator" for remark in refused)
        assert found.error is None
    elif isinstance(error, Error):
        same = [one for one in refused if is_of(error, one)]
        if not same:
            assert any(words in error.message for words in OTHER_WORDS)
            assert refused
            return
        line = line_of(error)
        if line is not None and same[0].topic != "own backward":  # where it's applied
            assert line in [(one.place.file, one.place.line) for one in same]
    else:
        assert type(found.error) is type(error)


def is_of(error, remark):
    """Whether an error has the words of a remark; it adds the place."""
    without = re.sub(r" \([^()]*\.py:\d+[^()]*\)$", "", error.message)
    return without == remark.message


def line_of(error):
    """The innermost line of a test from which an error came, in its traceback."""
    trace, lines = error.__traceback__, []
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(str(ROOT)) and path != __file__:
            lines.append((path, trace.tb_lineno))
        trace = trace.tb_next
    return lines[-1] if lines else None
