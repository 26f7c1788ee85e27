# SPDX-License-Identifier: Apache-2.0
"""Every refusal that the emulator's tests know of: a survey names it, with its line.

The tests of the modules below run once more, and each program that they compile is
surveyed too. What is refused must be among the findings in the same words, at the line
from which the refusal came; what compiles must have none.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from ipufit.emulator import Error
from ipufit.emulator._executor import executor as _executor
from ipufit.emulator._executor.survey import survey
from ipufit.emulator._executor.wrapping import unwrapped
from ipufit.emulator._layout.layout import Layout

pytestmark = pytest.mark.thorough  # `tests/test_check.py` has some in every run

ROOT = Path(__file__).parents[2]
MODULES = [
    "tracing.test_refusals",
    "tracing.test_limits",
    "tracing.test_device_numbers",
    "tracing.test_moving_slices",
    "tracing.test_tensor_devices",
    "tracing.test_visibility",
    "program.test_graph_limits",
    "program.test_losses",
    "program.test_strict",
    "program.test_trace",
    "program.test_args",
    "tracing.test_liveness",
    "ops.test_attribute_access",
    "ops.test_control_flow",
    "ops.test_custom_ops",
    "ops.test_decoder",
    "ops.test_floating_point",
    "ops.test_host_calls",
    "ops.test_markers",
    "ops.test_multi_conv",
    "ops.test_ops",
    "ops.test_overlap",
    "ops.test_points",
    "ops.test_slices",
]
OTHER_WORDS = ("Unsupported ops found", "doesn't take the result", ".tolist() needs")
"""Beginnings of messages that a survey gives in other words, or one by one."""

ONCE = {
    "test_each_micro_batch_calls_the_host",
    "test_indexing_is_seen_through_a_mode_of_the_users",
    "test_the_body_is_called_once_on_the_device_and_on_the_host",
}
"""Tests that count how often something is traced."""

seen = {"refused": 0, "placed": 0, "compiled": 0}

for short in MODULES:
    module = importlib.import_module(f"tests.emulator.{short}")
    for attribute, value in vars(module).items():
        if attribute in ONCE:
            continue
        if attribute.startswith("test_") and callable(value):
            globals()[f"test_{short.replace('.test_', '_')}_{attribute[5:]}"] = value
        elif type(value).__name__ in ("FixtureFunctionDefinition",) or hasattr(
            value, "_pytestfixturefunction"
        ):
            globals()[attribute] = value


def line_of(error):
    """The innermost line of a test from which an error came, in its traceback."""
    trace, lines = error.__traceback__, []
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path.startswith(str(ROOT)) and path != __file__:
            lines.append((path, trace.tb_lineno))
        trace = trace.tb_next
    return lines[-1] if lines else None


@pytest.fixture(autouse=True)
def surveyed(monkeypatch):
    original = _executor.compile_model

    def compile_model(model, options, arguments, groupings, link):
        given = (model, options, arguments, groupings, link)
        tensors = list(arguments.args)
        if arguments.kwargs or any(type(one) is not torch.Tensor for one in tensors):
            return original(*given)
        found, error, result = None, None, None
        try:
            result = original(*given)
        except Exception as raised:  # noqa: BLE001 - raised again below
            error = raised
        blocks = Layout.from_options(options).input_blocks
        rows = [t.detach()[: len(t) // blocks] if t.dim() else t for t in tensors]
        with unwrapped(model):
            found = survey(model, rows, options, is_training=link is not None)
        compare(found, error)
        if error is not None:
            raise error
        return result

    monkeypatch.setattr(_executor, "compile_model", compile_model)


def compare(found, error):
    refused = [remark for remark in found.remarks if remark.is_refused]
    others = [remark for remark in refused if remark.topic != "operator"]
    if error is None:  # not strict: operators are computed all the same
        assert others == []
        assert found.error is None
        seen["compiled"] += 1
    elif isinstance(error, Error):
        seen["refused"] += 1
        same = [one for one in refused if one.message == error.message]
        if not same:
            assert any(words in error.message for words in OTHER_WORDS)
            assert refused
            return
        line = line_of(error)
        if line is not None and same[0].topic != "own backward":  # where it's applied
            seen["placed"] += 1
            assert line in [(one.place.file, one.place.line) for one in same]
    else:
        assert type(found.error) is type(error)


def test_the_programs_were_seen():
    if not any(seen.values()):
        pytest.skip("only this test was asked for")
    assert seen["refused"] > 50
    assert seen["placed"] > 30
    assert seen["compiled"] > 50
