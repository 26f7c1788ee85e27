# SPDX-License-Identifier: Apache-2.0
"""Schedules of pipelines, beside a simulation that knows nothing but dependencies."""

from __future__ import annotations

import pytest

from ipufit.planning.schedule import PipelineSchedule
from tests.planning.simulated_pipeline import simulated

COUNTS = [*range(1, 20), 33, 64]
"""Numbers of micro-batches."""


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("stages", range(1, 9))
def test_it_is_that_of_a_simulation(stages, trains):
    for micro_batches in COUNTS:
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
