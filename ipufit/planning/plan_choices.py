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
        least_share: The least share that it can be.
        bubble: Idle share of the pipeline in an update.
        batch_size: Samples of an update.
        cost: The price of the change in words; empty if none is known.
    """

    change: str
    memory: Estimate
    share: float
    least_share: float
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
    for change, costs, other, size, cost in _changes(
        stages, settings, batch, num_stages
    ):
        memories = memory_by_ipu(costs, other, capacity)
        fullest = max(memories, key=lambda memory: memory.total.value)
        accumulation = other.gradient_accumulation
        schedule = PipelineSchedule(num_stages, accumulation, trains=True)
        bubble = schedule.idle_share
        total, share = fullest.total, fullest.share
        least = total.least / capacity
        choices.append(PlanChoice(change, total, share, least, bubble, size, cost))
    return tuple(choices)


def _changes(
    stages: Sequence[StageCost],
    settings: MemorySettings,
    batch: BatchPlan,
    num_stages: int,
) -> Iterator[tuple[str, Sequence[StageCost], MemorySettings, int, str]]:
    """Each change as code; stages, settings and batch size after it; its price."""
    for change, other, size, price in _of_settings(stages, settings, batch):
        yield change, stages, other, size, price
    now, size = settings.gradient_accumulation, batch.batch_size
    least = 2 * num_stages - 1
    for accumulation in (now // 2, now * 2, now * 4):
        if accumulation >= least:
            other = settings._replace(gradient_accumulation=accumulation)
            change = f"gradient_accumulation={accumulation}"
            yield change, stages, other, size // now * accumulation, ""
    micro, odd = divmod(batch.micro_batch_size, 2)
    if micro and not odd:
        other = settings._replace(gradient_accumulation=2 * now)
        change = f"micro_batch_size={micro}, gradient_accumulation={2 * now}"
        halves = [_halved(stage) for stage in stages]
        yield change, halves, other, size, "more and smaller passes"


def _of_settings(
    stages: Sequence[StageCost], settings: MemorySettings, batch: BatchPlan
) -> Iterator[tuple[str, MemorySettings, int, str]]:
    """Settings of memory that keep the micro-batches as they are."""
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


def _halved(stage: StageCost) -> StageCost:
    """A stage with half of the samples, whose activations take half of the bytes."""
    return stage._replace(
        flops=stage.flops // 2,
        input_bytes=stage.input_bytes // 2,
        saved_bytes=stage.saved_bytes // 2,
        kept_bytes=stage.kept_bytes // 2,
        made_bytes=stage.made_bytes // 2,
    )
