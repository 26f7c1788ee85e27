# SPDX-License-Identifier: Apache-2.0
"""Times, cycles and latencies of an executor."""

import datetime

import pytest
import torch

import ipufit.emulator as poptorch
from tests.emulator._models import ONE, Function, wrap

COUNTERS = ("input", "input_complete", "output", "output_complete")
LATENCIES = (
    "getHostIpuLatency",
    "getComputeLatency",
    "getIpuHostLatency",
    "getLatency",
)


def both(self, x, y):
    return x + y, x * y, x - y


def infer(module=None, **settings):
    options = poptorch.Options()
    for name, value in settings.items():
        getattr(options, name)(value)
    return poptorch.inferenceModel(module or Function(both), options)


# Compilation time -------------------------------------------------------------


def test_the_compilation_time_is_known_after_compiling():
    _, executor = wrap()
    with pytest.raises(poptorch.Error, match="Please compile the model before"):
        executor.compilationTime()
    executor.compile(ONE)
    assert executor.compilationTime() > datetime.timedelta()
    executor.destroy()
    with pytest.raises(poptorch.Error, match="Please compile the model before"):
        executor.compilationTime()


# Counters and latencies -------------------------------------------------------


def test_before_a_call_there_is_nothing():
    executor = infer()
    empty = {name: [[]] for name in COUNTERS}
    assert executor.getPerfCounters() == empty
    executor.compile(ONE, ONE)
    assert executor.getPerfCounters() == empty
    for latency in LATENCIES:
        assert getattr(executor, latency)() == (0.0, 0.0, 0.0)


def test_times_are_in_the_order_of_what_happens():
    executor = infer(deviceIterations=3)
    executor(torch.ones(3), torch.ones(3))
    counters = {name: of[0] for name, of in executor.getPerfCounters().items()}
    for step in range(3):
        moments = [times[step] for times in counters.values()]
        assert moments == sorted(moments)
    for times in counters.values():
        assert times == sorted(times)
    for latency in LATENCIES:
        least, largest, mean = getattr(executor, latency)()
        assert 0 <= least <= mean <= largest
        assert largest > 0


# Cycles -----------------------------------------------------------------------


def test_cycles_are_counted_on_demand():
    executor = infer()
    executor(ONE, ONE)
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        executor.cycleCount()


def test_cycles_are_those_of_the_last_call(caplog):
    executor = infer(logCycleCount=True)
    for prepare in (lambda: None, lambda: executor.compile(ONE, ONE)):
        prepare()
        with pytest.raises(poptorch.Error, match="Please run the model at least once"):
            executor.cycleCount()
    with caplog.at_level("DEBUG", logger="poptorch::python"):
        executor(ONE, ONE)
    cycles = executor.cycleCount()
    assert cycles > 0
    assert f"Total number of IPU cycles: {cycles}" in caplog.text
    executor.destroy()
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        executor.cycleCount()
