# SPDX-License-Identifier: Apache-2.0
"""A `ModelPlan` as text: what people read before they compile."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from .memory import Estimate

ModelPlan = Any
"""A `ModelPlan`, whose file imports this one."""

_UNITS = ("B", "KB", "MB", "GB", "TB")
_MOST_NAMES = 2
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


def size(num_bytes: float) -> str:
    """Bytes in decimal units, with about three digits.

    Example:
        >>> size(940_572_672), size(512), size(4_160)
        ('941 MB', '512 B', '4.16 KB')
    """
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if not unit:
        return f"{value:.0f} B"
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"


def judgement(plan: ModelPlan) -> str:
    """Say what is known about the fullest IPU, from exact figures and bounds.

    No judgement says that a model fits: only a compilation shows that.
    """
    fullest = max(plan.memory, key=lambda memory: memory.exact)
    share = fullest.exact / fullest.capacity
    where = f"IPU {fullest.ipu}"
    if max(memory.total.least for memory in plan.memory) > fullest.capacity:
        return (
            f"More than {plan.device.name} has: a compilation will run out of memory."
        )
    words = next(words for most, words in _STATIC_SHARES if share <= most)
    return (
        f"Parameters, state and accumulators take {share:.1%} of {where}, "
        f"{words}. Only a compilation shows what code and temporary data take."
    )


def _lines(plan: ModelPlan) -> Iterator[str]:
    ipus = "1 IPU" if plan.num_ipus == 1 else f"{plan.num_ipus} IPUs"
    yield f"Plan of {plan.title} with {plan.optimizer}, on {ipus}: {plan.device.name}"
    yield ""
    yield str(plan.epoch)
    yield ""
    yield from _stages(plan)
    yield ""
    yield from _pipeline(plan)
    yield from _memory(plan)
    yield ""
    yield from _traffic(plan)
    yield ""
    yield from _choices(plan)
    notes = list(_notes(plan))
    if notes:
        yield ""
        yield from notes


def _stages(plan: ModelPlan) -> Iterator[str]:
    rows = [["Stage", "IPU", "Begins with", "Parameters", "Forward FLOP", "Share"]]
    for stage, share in zip(plan.stages, plan.flop_shares):
        row = [
            str(stage.stage),
            str(stage.ipu),
            _names(stage.names),
            f"{stage.num_parameters:,}",
            _count(stage.flops),
            f"{share:.1%}",
        ]
        rows.append(row)
    yield from _table(rows, left=(2,))
    if len(plan.stages) > 1:
        yield (
            f"Stage {plan.slowest_stage} is the slowest: it has {plan.imbalance:.2f} "
            f"times the mean. {plan.num_stages} stages are ideally "
            f"{plan.ideal_speedup:.2f} times as fast as one IPU."
        )


def _pipeline(plan: ModelPlan) -> Iterator[str]:
    if plan.num_stages == 1:
        return
    rows = [["Pipeline", "Micro-batches", "Cycles", "Fill", "Full", "Drain", "Idle"]]
    pairs = ("an update", plan.schedule), ("inference call", plan.inference_schedule)
    for name, schedule in pairs:
        full = schedule.num_full_cycles
        filling = schedule.num_slots - 1 if full else "-"  # it is never full
        row = [name, schedule.micro_batches, schedule.num_cycles, filling, full]
        row += [filling, f"{schedule.idle_share:.1%}"]
        rows.append([str(cell) for cell in row])
    yield from _table(rows, left=(0,))
    least = 2 * plan.num_stages - 1
    tried = [least * factor for factor in (1, 2, 4, 8, 16)]
    shares = ", ".join(f"{plan.bubble_at(g):.1%} at {g}" for g in tried)
    yield f"Idle by gradient accumulation: {shares}."
    yield ""


def _memory(plan: ModelPlan) -> Iterator[str]:
    capacity = plan.device.num_bytes
    head = ["IPU", "Parameters", "Buffers", "State", "Accumulators", "Exact"]
    head += ["~Gradients", "~Activations", "~Total", "of " + size(capacity), "bounds"]
    rows = [head]
    for memory in plan.memory:
        row = [str(memory.ipu)]
        row += [size(memory.parameters), size(memory.buffers)]
        row += [size(memory.optimizer_state), size(memory.accumulators)]
        row += [size(memory.exact), size(memory.gradients.value)]
        row += [size(memory.activations.value), size(memory.total.value)]
        row += [f"{memory.share:.1%}", _bounds(memory.total)]
        rows.append(row)
    yield from _table(rows)
    yield (
        "Figures with ~ are estimates, and the bounds are how far they may be off. "
        "Code isn't counted."
    )
    yield judgement(plan)


def _traffic(plan: ModelPlan) -> Iterator[str]:
    rows = [["Host traffic per call", "Output mode", "To IPUs", "To host"]]
    for one in plan.traffic:
        row = [one.program, one.output_mode]
        rows.append([*row, size(one.input_bytes), size(one.output_bytes)])
    yield from _table(rows, left=(0, 1))


def _choices(plan: ModelPlan) -> Iterator[str]:
    rows = [
        ["Choices", "Batch size", "Idle", "~Fullest IPU", "~Share", "at least", "Price"]
    ]
    for choice in plan.choices:
        row = [choice.change or "as it is", str(choice.batch_size)]
        row += [f"{choice.bubble:.1%}", size(choice.memory.value)]
        row += [f"{choice.share:.1%}", f"{choice.least_share:.1%}", choice.cost]
        rows.append(row)
    yield from _table(rows, left=(0, 6))


def _notes(plan: ModelPlan) -> Iterator[str]:
    uncounted = sorted({name for stage in plan.stages for name in stage.uncounted})
    if uncounted:
        yield f"FLOPs leave out {', '.join(uncounted)}."
    if plan.unused:
        yield f"Not used, and not counted: {_names(plan.unused)}."
    if plan.shared:
        yield (
            f"Used by several stages, and counted with the first: "
            f"{_names(plan.shared)}."
        )
    yield f"Memory of {plan.device.name}: {plan.device.source}."


def _bounds(estimate: Estimate) -> str:
    return f"{size(estimate.least)} to {size(estimate.most)}"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def _count(number: float) -> str:
    for unit in ("", " K", " M", " G", " T"):
        if number < 999.5 or unit == " T":
            break
        number /= 1000
    return f"{number:.3g}{unit}"


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Iterator[str]:
    """Rows with aligned columns; numbers are on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        yield "  ".join(cells).rstrip()
