# SPDX-License-Identifier: Apache-2.0
"""Channels that record nothing."""

from __future__ import annotations

import pytest

import ipufit.emulator as poptorch


def test_instrumented_objects_stay_as_they_are():
    class Model:
        def forward(self):
            return 1

    model = Model()
    assert poptorch.profiling.Channel("a").instrument(model, "forward") is model
    assert "forward" not in vars(model)
    assert model.forward() == 1


def test_errors_come_out_of_a_trace_point():
    channel = poptorch.profiling.Channel("a")
    with pytest.raises(KeyError), channel.tracepoint("step"):
        raise KeyError
