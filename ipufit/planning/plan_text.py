# SPDX-License-Identifier: Apache-2.0
"""A `ModelPlan` as text: what people read before they compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

from ipufit.pictures import amount_in_words, share_in_words

from .plan_tables import (
    choice_table,
    first_names,
    memory_table,
    pipeline_table,
    stage_table,
    traffic_table,
)

if TYPE_CHECKING:
    from ipufit.pictures import Table

ModelPlan = Any
"""A `ModelPlan`, whose file imports this one."""

_STATIC_SHARES = (
    (0.5, "in the range of public configurations"),
    (0.8, "uncertain: compile to know"),
    (1.0, "where public configurations offload or shard the optimiser's state"),
)
"""Shares of an IPU's memory that exact figures take, and what is known of them. Public
configurations for Mk2 have up to 0.42 for parameters, accumulators and state."""


def plan_text(plan: ModelPlan) -> str:
    """Write a plan as lines and tables.

    Args:
        plan: The plan.
    """
    return "\n".join(_lines(plan))


def title_of(plan: ModelPlan) -> str:
    """The model, its optimiser and its IPUs in a line."""
    ipus = "1 IPU" if plan.num_ipus == 1 else f"{plan.num_ipus} IPUs"
    return f"Plan of {plan.title} with {plan.optimizer}, on {ipus}: {plan.device.name}"


def judgement(plan: ModelPlan) -> str:
    """Say what is known about the fullest IPU, from exact figures and bounds.

    No judgement says that a model fits: only a compilation shows that.
    """
    fullest = max(plan.memory, key=lambda memory: memory.exact)
    share = fullest.exact / fullest.capacity
    where = f"IPU {fullest.ipu}"
    largest = max(plan.memory, key=lambda memory: memory.total.least)
    if largest.total.least > largest.capacity:
        least, capacity = (
            amount_in_words(size, "B")
            for size in (largest.total.least, largest.capacity)
        )
        return (
            f"A compilation will run out of memory: IPU {largest.ipu} has {capacity}, "
            f"and what is counted takes {least} at least."
        )
    words = next(words for most, words in _STATIC_SHARES if share <= most)
    return (
        f"Parameters, state and accumulators take {share_in_words(share)} of {where}, "
        f"{words}. Only a compilation shows what code and temporary data take."
    )


def notes_of(plan: ModelPlan) -> Iterator[str]:
    """Say what isn't counted, and where the memory of the IPU was published."""
    least, given = plan.schedule.num_slots, plan.epoch.batch.gradient_accumulation
    if given < least:
        yield (
            f"PopTorch will refuse this pipeline: {plan.num_stages} stages need "
            f"gradient_accumulation={least} or more, and it is {given}."
        )
    if plan.epoch.calls == 0:
        yield (
            f"fit will refuse this data: a call takes {plan.epoch.samples_per_call} "
            f"samples, and there are {plan.epoch.num_samples}. Use a smaller "
            "batch_size or device_iterations, or drop_last=False."
        )
    if plan.refusal:
        yield f"fit will refuse this data: {plan.refusal}"
    taken = plan.ipus_per_replica * plan.epoch.batch.replicas
    reserved = 1 << (taken - 1).bit_length()
    if reserved > taken:
        whose = " in each process" if plan.epoch.batch.processes > 1 else ""
        yield (
            f"PopTorch reserves IPUs in powers of two: {reserved} for these {taken}"
            f"{whose}."
        )
    uncounted = sorted({name for stage in plan.stages for name in stage.uncounted})
    if uncounted:
        yield f"FLOPs leave out {', '.join(uncounted)}."
    if plan.unused:
        yield f"Not used, and not counted: {first_names(plan.unused)}."
    if plan.shared:
        yield (
            f"Used by several stages, and counted with the first: "
            f"{first_names(plan.shared)}."
        )
    yield f"Memory of {plan.device.name}: {plan.device.source}."


def _lines(plan: ModelPlan) -> Iterator[str]:
    yield title_of(plan)
    yield ""
    yield str(plan.epoch)
    tables = [stage_table(plan)]
    if plan.num_stages > 1:
        tables.append(pipeline_table(plan))
    tables += [memory_table(plan), traffic_table(plan), choice_table(plan)]
    for table in tables:
        yield ""
        yield f"{table.title}:"
        yield from _aligned(table)
        if table.caption:
            yield table.caption
        if table.title == "Memory":
            yield judgement(plan)
    yield ""
    yield from notes_of(plan)


def _aligned(table: Table) -> Iterator[str]:
    """Rows with aligned columns; numbers are on the right, names on the left."""
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows)]
    is_name = [
        not any(cell.lstrip("~<")[:1].isdigit() for cell in column)
        for column in zip(*table.rows)
    ]
    for row in (table.header, *table.rows):
        cells = [
            cell.ljust(width) if place == 0 or is_left else cell.rjust(width)
            for place, (cell, width, is_left) in enumerate(zip(row, widths, is_name))
        ]
        yield "  ".join(cells).rstrip()
