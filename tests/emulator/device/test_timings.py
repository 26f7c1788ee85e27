# SPDX-License-Identifier: Apache-2.0
"""What follows from the time stamps of a call."""

from __future__ import annotations

import pytest

from ipufit.emulator import OutputMode
from ipufit.emulator._device.timings import CLOCK_HZ, COUNTERS, CallTimes, Transfers
from ipufit.emulator._layout.layout import Layout


def times(D=1, G=1, R=1, mode=OutputMode.All, period=1, is_synthetic=False):  # noqa: N803
    """Started at 0, each micro-batch took a second, returned after two more."""
    layout = Layout(D, G, R, input_groups=R)
    count = D * G * R
    transfers = Transfers(layout, mode, period, 2, 3, is_synthetic)
    taken = [1.0 + index for index in range(count)]
    return CallTimes(0.0, taken, 1.0 + count, 3.0 + count, transfers)


def test_each_tensor_has_a_time_for_each_micro_batch():
    counters = times(D=2, R=2).counters()
    assert tuple(counters) == COUNTERS
    assert counters["input"] == [[0, 2, 3, 4]] * 2
    assert counters["input_complete"] == [[1, 2, 3, 4]] * 2
    assert counters["output"] == [[2, 3, 4, 5]] * 3
    assert counters["output_complete"] == [[2, 3, 4, 7]] * 3


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        (OutputMode.Final, 1, [8, 9]),
        (OutputMode.Sum, 1, [8, 9]),
        (OutputMode.EveryN, 2, [4, 5, 8, 9]),
    ],
)
def test_results_that_are_dropped_are_not_sent(mode, period, expected):
    counters = times(D=4, R=2, mode=mode, period=period).counters()
    assert counters["output"][0] == expected
    assert counters["output_complete"][0] == [*expected[:-1], 11]
    assert len(counters["input"][0]) == 8


def test_latencies_are_least_largest_and_mean():
    call = times(D=4)
    assert call.latency("input", "input_complete") == (0, 1, 0.25)
    assert call.latency("input_complete", "output") == (1, 1, 1)
    assert call.latency("output", "output_complete") == (0, 2, 0.5)
    assert call.latency("input", "output_complete") == (1, 3, 1.75)


def test_each_output_belongs_to_a_block_of_inputs():
    call = times(D=4, mode=OutputMode.EveryN, period=2)
    # Starts 0, 2, 3, 4 in blocks of two; ends 3 and 7.
    assert call.latency("input", "output_complete") == (3, 4, 3.5)


def test_with_synthetic_data_nothing_is_sent():
    call = times(D=4, is_synthetic=True)
    counters = call.counters()
    assert counters["input"] == counters["input_complete"] == [[], []]
    assert counters["output"] == counters["output_complete"] == [[], [], []]
    assert call.latency("input", "output_complete") == (0.0, 0.0, 0.0)


def test_the_lists_are_the_callers_own():
    call = times()
    call.counters()["input_complete"][0].append(9)
    assert call.counters()["input_complete"] == [[1], [1]]


def test_cycles_are_seconds_on_the_device_at_the_clock_of_an_ipu():
    assert times(D=2).cycles() == 2 * CLOCK_HZ


def test_without_inputs_there_is_no_latency():
    call = times()
    call = call._replace(transfers=call.transfers._replace(num_inputs=0))
    assert call.latency("input", "output_complete") == (0.0, 0.0, 0.0)
