# SPDX-License-Identifier: Apache-2.0
"""Schedules of pipelines, beside a simulation that knows nothing but dependencies."""

from __future__ import annotations

import pytest

from ipufit.planning.pipeline_schedule import PipelineSchedule


def simulated(stages, micro_batches, *, trains):
    """Start times of each task: (micro-batch, slot) -> cycle.

    A task is one micro-batch in one slot, and takes a cycle. It waits for the same
    micro-batch in the slot before, and for the slot, which is free for one task at a
    time. The slots of training are made from what they compute: forward of each stage,
    then backward of each, where the last forward and its backward are one.
    """
    slots = [("forward", stage) for stage in range(stages)]
    if trains:
        slots += [("backward", stage) for stage in reversed(range(stages - 1))]
    started = {}
    free_at = dict.fromkeys(slots, 0)
    waiting = {(number, 0): 0 for number in range(micro_batches)}
    while waiting:
        # The task that can begin first; micro-batches go in order.
        task = min(waiting, key=lambda t: (max(waiting[t], free_at[slots[t[1]]]), t))
        number, place = task
        at = max(waiting.pop(task), free_at[slots[place]])
        started[task] = at
        free_at[slots[place]] = at + 1
        if place + 1 < len(slots):
            waiting[number, place + 1] = at + 1
    return slots, started


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("stages", range(1, 9))
def test_it_is_that_of_a_simulation(stages, trains):
    for micro_batches in range(1, 65):
        schedule = PipelineSchedule(stages, micro_batches, trains)
        slots, started = simulated(stages, micro_batches, trains=trains)
        num_cycles = 1 + max(started.values())
        assert schedule.num_slots == len(slots)
        assert schedule.num_cycles == num_cycles
        busy = [0] * num_cycles
        for (number, slot), cycle in started.items():
            assert schedule.micro_batch_in(slot, cycle) == number
            busy[cycle] += 1
        told = [
            sum(
                schedule.micro_batch_in(slot, cycle) is not None
                for slot in range(len(slots))
            )
            for cycle in range(num_cycles)
        ]
        assert told == busy
        assert schedule.num_full_cycles == busy.count(len(slots))
        idle = len(slots) * num_cycles - sum(busy)
        assert schedule.idle_share == pytest.approx(idle / (len(slots) * num_cycles))
        assert [schedule.stage_of(slot) for slot in range(len(slots))] == [
            stage for _, stage in slots
        ]


# Layouts of public scripts: stages, gradient accumulation, share that is idle in %.
PUBLISHED = {
    "mnist_pipeline": (4, 10, 37.5),
    "BERT-L SQuAD on a POD16": (8, 64, 17.9),
    "BERT-L SQuAD on a POD4": (4, 256, 2.3),
    "BERT pretrain_base_128": (5, 512, 1.5),
    "BERT squad_base_384": (4, 8, 42.9),
    "GPT-2 small": (5, 2048, 0.4),
    "ViT in1k fine-tuning": (4, 30, 16.7),
    "EfficientNet-B0": (2, 5, 28.6),
    "ResNet-50 on a POD16": (1, 57, 0.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_bubbles_of_public_layouts_come_out(name):
    stages, accumulation, idle = PUBLISHED[name]
    schedule = PipelineSchedule(stages, accumulation, trains=True)
    assert 100 * schedule.idle_share == pytest.approx(idle, abs=0.05)


def test_all_slots_work_after_as_many_cycles_as_the_walkthrough_says():
    # Graphcore's walkthrough: full use after 2N + 1 steps, N stages before the last.
    schedule = PipelineSchedule(4, 10, trains=True)
    full = [
        all(schedule.micro_batch_in(s, cycle) is not None for s in range(7))
        for cycle in range(schedule.num_cycles)
    ]
    assert full == [False] * 6 + [True] * 4 + [False] * 6
