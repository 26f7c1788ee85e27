# SPDX-License-Identifier: Apache-2.0
"""Memory of IPUs: published layouts and kinds, and counts without the formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.planning.memory import (
    DEVICES,
    IPUMemory,
    MemorySettings,
    StageCost,
    StateCost,
    WeightCost,
    device_named,
    held_micro_batches,
    memory_by_ipu,
)
from ipufit.planning.schedule import PipelineSchedule

MK2 = DEVICES["mk2"].num_bytes

# Parameters of a layer of BERT: four square matrices with biases, two matrices of the
# feed-forward part with biases, two normalisations.
BERT_LARGE = 4 * (1024**2 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
BERT_BASE = 4 * (768**2 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
BERT_LARGE_EMBEDDINGS = (30522 + 512 + 2 + 2) * 1024


def a_weight(count, weight_bytes, first_bytes, second_bytes, accumulator_bytes):
    state = (
        StateCost(count, first_bytes * count),
        StateCost(count, second_bytes * count),
    )
    return WeightCost(
        "weight",
        count,
        weight_bytes * count,
        state,
        accumulator_bytes * count,
        weight_bytes * count,
    )


def half(count):
    """Weights, accumulator and first moment in float16, second moment in float32."""
    return a_weight(count, 2, 2, 4, 2)


def exact(weight, settings):
    memory = memory_by_ipu([StageCost(0, 0, weights=(weight,))], settings, MK2)[0]
    return memory.exact / 1e6, memory.exact / memory.capacity


# shared facts, "Memory per IPU": weights, accumulator and optimiser only, against
# 940.6 MB. The largest stage is named.
LAYERS = half(7 * BERT_LARGE)
SHARDED = half(BERT_LARGE_EMBEDDINGS + 2 * BERT_LARGE)
PUBLISHED = {
    "BERT-L on chip": (LAYERS, MemorySettings(256), 882, 0.94),
    "BERT-L off chip": (LAYERS, MemorySettings(256, is_off_chip=True), 353, 0.37),
    "BERT-L sharded by 2": (SHARDED, MemorySettings(64, num_shards=2), 399, 0.42),
    "BERT-B half": (half(4 * BERT_BASE), MemorySettings(8), 284, 0.30),
    "BERT-B float32": (a_weight(4 * BERT_BASE, *[4] * 4), MemorySettings(8), 454, 0.48),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_come_out(name):
    weight, settings, megabytes, share = PUBLISHED[name]
    found, part = exact(weight, settings)
    assert found == pytest.approx(megabytes, abs=0.5)
    assert part == pytest.approx(share, abs=0.005)


@given(st.integers(1, 8), st.integers(1, 40))
def test_held_micro_batches_are_those_between_forward_and_backward(stages, more):
    micro_batches = 2 * stages - 1 + more
    schedule = PipelineSchedule(stages, micro_batches, trains=True)
    for stage in range(stages):
        forward, backward = stage, 2 * stages - 2 - stage
        held = [
            sum(
                schedule.micro_batch_in(forward, earlier) == number
                for number in range(micro_batches)
                for earlier in range(cycle + 1)
            )
            - sum(
                schedule.micro_batch_in(backward, earlier) == number
                for number in range(micro_batches)
                for earlier in range(cycle)
            )
            for cycle in range(schedule.num_cycles)
        ]
        assert max(held) == held_micro_batches(stage, stages)


def an_activity(stage, ipu=0, **changes):
    cost = StageCost(
        *(stage, ipu),
        input_bytes=10,
        saved_bytes=100,
        kept_bytes=10,
        made_bytes=150,
    )
    return cost._replace(**changes)


def activations(stages, **settings):
    memories = memory_by_ipu(stages, MemorySettings(**settings), MK2)
    return [memory.activations.value for memory in memories]


def test_recomputing_between_submodules_holds_their_outputs():
    # 40 bytes are kept: one input and three outputs; a fourth of the rest is there.
    stage = an_activity(0, kept_bytes=40, num_kept=3)
    assert activations([stage], recomputes=True) == [40 + 15]


def test_bounds_hold_the_value():
    for recomputes in (True, False):
        for is_pipelined in (True, False):
            stages = [an_activity(number, ipu=number) for number in range(3)]
            settings = MemorySettings(5, is_pipelined, recomputes)
            for memory in memory_by_ipu(stages, settings, MK2):
                total = memory.total
                assert total.least <= total.value <= total.most


def test_stages_of_one_ipu_are_added_up():
    stages = [an_activity(0), an_activity(1, ipu=1), an_activity(2)]
    first, second = memory_by_ipu(stages, MemorySettings(5, True), MK2)
    assert (first.stages, second.stages) == ((0, 2), (1,))
    assert first.activations.value == 500 + 100
    assert isinstance(first, IPUMemory)
    assert first.share == pytest.approx(600 / MK2)


# Kinds of IPUs --------------------------------------------------------------------


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


def test_a_kind_is_found_by_its_names():
    assert device_named("Bow-2000") is DEVICES["bow"]
    assert device_named("GC200") is device_named("mk2") is DEVICES["mk2"]
    own = DEVICES["mk2"]._replace(name="mine", num_tiles=2)
    assert device_named(own).num_bytes == 2 * 638_976
