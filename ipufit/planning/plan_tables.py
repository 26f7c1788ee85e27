# SPDX-License-Identifier: Apache-2.0
"""The tables of a `ModelPlan`: stages, pipeline, memory, traffic, choices."""

from __future__ import annotations

from typing import Any, Sequence

from ipufit.pictures import Table, amount_in_words, share_in_words

from .memory import Estimate

ModelPlan = Any
"""A `ModelPlan`, whose file imports this one."""

_MOST_NAMES = 2


def stage_table(plan: ModelPlan) -> Table:
    """Parameters and FLOPs of each stage."""
    rows = tuple(
        (
            str(stage.stage),
            str(stage.ipu),
            first_names(stage.names),
            f"{stage.num_parameters:,}",
            amount_in_words(stage.flops, "FLOP"),
            share_in_words(share),
        )
        for stage, share in zip(plan.stages, plan.flop_shares)
    )
    caption = ""
    if len(rows) > 1:
        caption = (
            f"Stage {plan.slowest_stage} is the slowest: it has {plan.imbalance:.2f} "
            "times the mean."
        )
    if plan.num_stages > 1:
        caption += (
            f" {plan.num_stages} stages are ideally {plan.ideal_speedup:.2f} times as "
            "fast as one IPU."
        )
    header = ("stage", "IPU", "begins with", "parameters", "forward", "of all")
    return Table("Stages", caption, header, rows)


def pipeline_table(plan: ModelPlan) -> Table:
    """Cycles of an update and of an inference call."""
    rows = []
    pairs = ("update", plan.schedule), ("inference call", plan.inference_schedule)
    for name, schedule in pairs:
        full = schedule.num_full_cycles
        filling = str(schedule.num_slots - 1) if full else "-"  # it is never full
        passes, cycles = schedule.micro_batches, schedule.num_cycles
        row = [name, str(passes), str(cycles), filling, str(full), filling]
        rows.append((*row, share_in_words(schedule.idle_share)))
    least = 2 * plan.num_stages - 1
    tried = [least * factor for factor in (1, 2, 4, 8, 16)]
    shares = ", ".join(f"{share_in_words(plan.bubble_at(g))} at {g}" for g in tried)
    header = ("", "micro-batches", "cycles", "fill", "full", "drain", "idle")
    caption = f"Idle by gradient accumulation: {shares}."
    return Table("Pipeline", caption, header, tuple(rows))


def memory_table(plan: ModelPlan) -> Table:
    """Bytes on each IPU."""
    header = ["IPU", "parameters", "buffers", "state", "accumulators", "exact"]
    header += ["gradients", "activations", "total"]
    header += [f"of {_size(plan.device.num_bytes)}", "bounds of the total"]
    rows = []
    for memory in plan.memory:
        exact = (memory.parameters, memory.buffers, memory.optimizer_state)
        row = [str(memory.ipu), *map(_size, (*exact, memory.accumulators))]
        row += [_size(memory.exact), _about(memory.gradients)]
        row += [_about(memory.activations), _about(memory.total)]
        row += [share_in_words(memory.share), _bounds(memory.total)]
        rows.append(tuple(row))
    caption = (
        "Figures with ~ are estimates, and the bounds are how far they may be off. "
        "Code isn't counted."
    )
    return Table("Memory", caption, tuple(header), tuple(rows))


def bounds_table(plan: ModelPlan) -> Table:
    """Bytes on each IPU that are exact, and how far the total may be off."""
    rows = []
    for memory in plan.memory:
        total = memory.total
        numbers = map(_size, (memory.exact, total.least, total.value, total.most))
        share = share_in_words(total.most / memory.capacity)
        rows.append((f"IPU {memory.ipu}", *numbers, share))
    header = ("", "exact", "at least", "expected", "at most")
    last = f"at most, of {_size(plan.device.num_bytes)}"
    caption = "The exact part is parameters, buffers, state and accumulators."
    return Table("Bounds of memory", caption, (*header, last), tuple(rows))


def traffic_table(plan: ModelPlan) -> Table:
    """Bytes between host and IPUs in a call, for each output mode."""
    rows = tuple(
        (one.program, one.output_mode, _size(one.input_bytes), _size(one.output_bytes))
        for one in plan.traffic
    )
    header = ("program", "output mode", "to IPUs", "to host")
    return Table("Host traffic per call", "", header, rows)


def choice_table(plan: ModelPlan) -> Table:
    """The effects of other settings on the fullest IPU."""
    rows = tuple(
        (
            choice.change or "as it is",
            str(choice.batch_size),
            share_in_words(choice.bubble),
            _about(choice.memory),
            share_in_words(choice.share),
            share_in_words(choice.least_share),
            choice.cost,
        )
        for choice in plan.choices
    )
    header = ("change", "batch size", "idle", "fullest IPU", "share", "at least")
    return Table("Choices", "", (*header, "price"), rows)


def first_names(names: Sequence[str]) -> str:
    """The first names of some, and how many more there are.

    Example:
        >>> first_names(["a", "b", "c"]), first_names([])
        ('a, b and 1 more', '-')
    """
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def _size(num_bytes: int) -> str:
    return amount_in_words(num_bytes, "B")


def _about(estimate: Estimate) -> str:
    is_estimate = estimate.least != estimate.most
    return amount_in_words(estimate.value, "B", is_estimate)


def _bounds(estimate: Estimate) -> str:
    return f"{_size(estimate.least)} to {_size(estimate.most)}"
