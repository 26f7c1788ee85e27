# SPDX-License-Identifier: Apache-2.0
"""Figures of IPUs, against each other and against what their makers publish."""

from __future__ import annotations

import pytest

from ipufit.errors import UnknownNameError
from ipufit.planning.memory import DEVICES, device_named


def test_memory_is_tiles_times_the_memory_of_a_tile():
    # "In-Processor-Memory": 304 MiB, and 897 MiB, which is sold as 900 MB.
    assert DEVICES["mk1"].num_bytes == 304 * 2**20
    assert DEVICES["mk2"].num_bytes == DEVICES["bow"].num_bytes == 940_572_672
    assert DEVICES["mk2"].num_bytes / 2**20 == pytest.approx(897.0, abs=0.05)


@pytest.mark.parametrize(
    ("name", "per_cycle"), [("mk1", 64), ("mk2", 128), ("bow", 128)]
)
def test_peaks_are_tiles_times_clock_times_what_a_tile_does_in_a_cycle(name, per_cycle):
    device = DEVICES[name]
    peak = device.num_tiles * device.clock_hertz * per_cycle
    assert device.float16_flops == pytest.approx(peak, rel=0.01)
    assert device.float32_flops == pytest.approx(peak / 4, rel=0.01)


def test_each_has_a_source():
    assert all(device.source for device in DEVICES.values())


def test_a_kind_is_found_by_its_names():
    assert device_named("Bow-2000") is DEVICES["bow"]
    assert device_named("GC200") is device_named("mk2") is DEVICES["mk2"]
    own = DEVICES["mk2"]._replace(name="mine", num_tiles=2)
    assert device_named(own).num_bytes == 2 * 638_976


def test_an_unknown_kind_is_refused():
    with pytest.raises(UnknownNameError, match="'mk3'"):
        device_named("mk3")
