# SPDX-License-Identifier: Apache-2.0
"""Effects that other settings of memory and of accumulation would have."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

from ipufit.batching import BatchPlan

from .memory import Estimate, MemorySettings, memory_by_ipu
from .pipeline_schedule import PipelineSchedule
from .stage_cost import StageCost


class PlanChoice(NamedTuple):
    """A change of settings, and what it leads to.

    Attributes:
        change: Fields of `IPUConfig` that change, as code; empty for none.
        memory: Bytes on the fullest IPU.
        share: Its expected share of an IPU's memory; code comes on top.
        bubble: Idle share of the pipeline in an update.
        batch_size: Samples of an update.
        cost: The price of the change in words; empty if none is known.
    """

    change: str
    memory: Estimate
    share: float
    bubble: float
    batch_size: int
    cost: str = ""


def plan_choices(
    stages: Sequence[StageCost],
    settings: MemorySettings,
    batch: BatchPlan,
    capacity: int,
    num_stages: int,
) -> tuple[PlanChoice, ...]:
    """Work out what other settings would change, one at a time.

    Args:
        stages: Costs of the stages.
        settings: Settings of now.
        batch: The factors of a call now.
        capacity: Bytes of an IPU's memory.
        num_stages: Stages that are busy at once.

    Returns:
        The settings of now first.
    """
    choices = []
    for change, other, size, cost in _changes(stages, settings, batch, num_stages):
        memories = memory_by_ipu(stages, other, capacity)
        fullest = max(memories, key=lambda memory: memory.total.value)
        accumulation = other.gradient_accumulation
        schedule = PipelineSchedule(num_stages, accumulation, trains=True)
        bubble = schedule.idle_share
        choices.append(
            PlanChoice(change, fullest.total, fullest.share, bubble, size, cost)
        )
    return tuple(choices)


def _changes(
    stages: Sequence[StageCost],
    settings: MemorySettings,
    batch: BatchPlan,
    num_stages: int,
) -> Iterator[tuple[str, MemorySettings, int, str]]:
    """Each change as code, the settings after it, the batch size, and its cost."""
    size = batch.batch_size
    yield "", settings, size, ""
    if settings.recomputes:
        other = settings._replace(recomputes=False)
        yield "recompute='off'", other, size, "saves the second forward pass"
    elif settings.is_pipelined:
        other = settings._replace(recomputes=True)
        yield "recompute='auto'", other, size, "a second forward pass"
    has_state = any(weight.state for stage in stages for weight in stage.weights)
    if has_state and not settings.is_off_chip:
        other = settings._replace(is_off_chip=True)
        yield "offload_optimizer=True", other, size, "state moves with each update"
    copies = batch.replicas * batch.processes
    if has_state and settings.num_shards == 1 and not settings.is_off_chip:
        shards = copies if copies > 1 else 2
        change = "shard_optimizer=True"
        if copies == 1:
            change = f"replicas={shards}, {change}"
        other = settings._replace(num_shards=shards)
        yield change, other, size * shards // copies, "weights are gathered"
    now = settings.gradient_accumulation
    least = 2 * num_stages - 1
    for accumulation in (now // 2, now * 2, now * 4):
        if accumulation >= least:
            other = settings._replace(gradient_accumulation=accumulation)
            change = f"gradient_accumulation={accumulation}"
            yield change, other, size // now * accumulation, ""
