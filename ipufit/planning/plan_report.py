# SPDX-License-Identifier: Apache-2.0
"""A `ModelPlan` as pictures and tables: in a terminal, as SVG, as a page."""

from __future__ import annotations

from typing import Any, Iterator

from ipufit.pictures import Bar, BarChart, Content, Part, Report

from .plan_tables import (
    bounds_table,
    choice_table,
    pipeline_table,
    stage_table,
    traffic_table,
)
from .plan_text import judgement, notes_of, title_of

ModelPlan = Any
"""A `ModelPlan`, whose file imports this one."""


def plan_report(plan: ModelPlan) -> Report:
    """Join the pictures and tables of a plan.

    Args:
        plan: The plan.
    """
    lines = (*str(plan.epoch).splitlines(), judgement(plan), *notes_of(plan))
    return Report(title_of(plan), lines, tuple(_contents(plan)))


def memory_chart(plan: ModelPlan) -> BarChart:
    """Bytes on each IPU, against the memory that it has."""
    bars = tuple(
        Bar(
            f"IPU {memory.ipu}",
            (
                Part("parameters", memory.parameters + memory.buffers),
                Part("optimiser state", memory.optimizer_state),
                Part("accumulators", memory.accumulators),
                Part("gradients", memory.gradients.value, is_estimate=True),
                Part("activations", memory.activations.value, is_estimate=True),
            ),
        )
        for memory in plan.memory
    )
    return BarChart(
        "Memory in training",
        "Code and temporary data aren't counted.",
        "B",
        bars,
        limit=plan.device.num_bytes,
        limit_name="memory of one IPU",
    )


def flops_chart(plan: ModelPlan) -> BarChart:
    """FLOPs of each stage's forward pass of a micro-batch."""
    bars = tuple(
        Bar(f"stage {stage.stage}", (Part("forward", stage.flops),))
        for stage in plan.stages
    )
    caption = f"A micro-batch has {plan.epoch.batch.micro_batch_size} samples."
    return BarChart("FLOPs of a micro-batch", caption, "FLOP", bars)


def _contents(plan: ModelPlan) -> Iterator[Content]:
    yield memory_chart(plan)
    yield bounds_table(plan)
    yield flops_chart(plan)
    yield stage_table(plan)
    if plan.num_stages > 1:
        yield plan.schedule.timeline()
        yield pipeline_table(plan)
    yield traffic_table(plan)
    yield choice_table(plan)
