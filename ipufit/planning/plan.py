# SPDX-License-Identifier: Apache-2.0
"""`ModelPlan`: compute the memory and work of training a model before compiling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

from ipufit.types import ShownAsText

from .memory import (
    Device,
    Estimate,
    IPUMemory,
    MemorySettings,
    StageCost,
    imbalance,
    memory_by_ipu,
)
from .pictures import (
    Bars,
    Columns,
    Content,
    Table,
    amount_in_words,
    as_text,
    save,
    share_in_words,
    show,
)
from .schedule import EpochPlan, PipelineSchedule

if TYPE_CHECKING:
    from rich.console import Console

    from ipufit.types import PathLike

_WORTH_ADVICE = 0.1
"""Share of an IPU's memory below which a plan doesn't advise how to save memory."""

_STATIC_SHARES = (
    (0.5, "in the range of public configurations"),
    (0.8, "uncertain: compile to know"),
    (1.0, "where public configurations offload or shard the optimizer's state"),
)
"""Shares of an IPU's memory for parameters, accumulators and state, with a verdict.
Public configurations for Mk2 have up to 0.42."""


class HostTraffic(NamedTuple):
    """Bytes that one call moves between the host and the IPUs of a process.

    Attributes:
        program: "training" or "inference".
        output_mode: Mode of the outputs: PopTorch's name, or "EveryN(n)".
        input_bytes: Bytes of inputs and targets that are sent to the IPUs. Exact.
        output_bytes: Bytes of the module's outputs that are sent to the host. Exact for
            a program that returns them all; ipufit's metrics add some bytes each.
    """

    program: str
    output_mode: str
    input_bytes: int
    output_bytes: int


class PlanChoice(NamedTuple):
    """A change of settings, and its effects.

    Attributes:
        change: Fields of `IPUConfig` that change, as code; "" for no change.
        memory: Bytes on the fullest IPU.
        share: Expected share of the IPU's memory, without code.
        least_share: Lower bound of that share.
        bubble: Idle share of the pipeline in an update.
        batch_size: Samples of an update.
        cost: The drawback of the change in words; "" if none is known.
    """

    change: str
    memory: Estimate
    share: float
    least_share: float
    bubble: float
    batch_size: int
    cost: str = ""


@dataclass(frozen=True, repr=False)
class ModelPlan(ShownAsText):
    """Memory and work of training a model, and its pipeline.

    `print` shows it as a short text. All numbers are data: bytes, FLOPs of one forward
    pass of a micro-batch, cycles of the pipeline.

    Attributes:
        title: Class of the module.
        optimizer: Class of the optimizer.
        device: The kind of IPU.
        epoch: Factors of a call, calls and updates of an epoch, samples left out.
        stages: Costs of each stage, in order; one without a pipeline.
        settings: The settings that determine the memory.
        inference_iterations: Minimum number of micro-batches in a call of `evaluate` or
            `predict` with this pipeline.
        traffic: Bytes between host and IPUs per call, for each output mode.
        unused: Names of parameters that `forward` doesn't use; they aren't counted.
        shared: Names of parameters that several stages use. Each is counted once, in
            the first of them; the other stages get copies.
        refusal: Why `fit` would refuse these samples, such as missing targets; "" if
            `fit` would accept them.
    """

    title: str
    optimizer: str
    device: Device
    epoch: EpochPlan
    stages: tuple[StageCost, ...]
    settings: MemorySettings
    inference_iterations: int = 1
    traffic: tuple[HostTraffic, ...] = ()
    unused: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    refusal: str = ""

    # Memory ----------------------------------------------------------------------

    @property
    def memory(self) -> tuple[IPUMemory, ...]:
        """Memory that training takes on each IPU of a replica."""
        return memory_by_ipu(self.stages, self.settings, self.device.num_bytes)

    @property
    def fullest(self) -> IPUMemory:
        """The IPU with the largest expected share of its memory."""
        return max(self.memory, key=lambda memory: memory.total.value)

    @property
    def num_parameters(self) -> int:
        """Number of elements in all parameters that are used."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def ipus_per_replica(self) -> int:
        """Number of IPUs of a replica: all up to the highest that has a stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def num_ipus(self) -> int:
        """Number of IPUs of all replicas of all processes."""
        batch = self.epoch.batch
        return self.ipus_per_replica * batch.replicas * batch.processes

    # Work ------------------------------------------------------------------------

    @property
    def flops(self) -> tuple[int, ...]:
        """FLOPs of each stage's forward pass for a micro-batch."""
        return tuple(stage.flops for stage in self.stages)

    @property
    def flop_shares(self) -> tuple[float, ...]:
        """Share of each stage in all FLOPs."""
        total = sum(self.flops)
        return tuple(flops / total if total else 0.0 for flops in self.flops)

    @property
    def slowest_stage(self) -> int:
        """Index of the stage with most FLOPs."""
        return max(self.stages, key=lambda stage: stage.flops).stage

    @property
    def imbalance(self) -> float:
        """FLOPs of the slowest stage divided by the mean."""
        return imbalance(self.flops)

    @property
    def ideal_speedup(self) -> float:
        """Speedup of the stages over one IPU, by FLOPs and bubble alone.

        It is stages / imbalance * (1 - bubble). Small layers take longer than their
        FLOPs say, so this is a first guess.
        """
        if not self.settings.is_pipelined:
            return 1.0
        return len(self.stages) / self.imbalance * (1.0 - self.bubble)

    # Schedule --------------------------------------------------------------------

    @property
    def schedule(self) -> PipelineSchedule:
        """Cycles of the pipeline for one update; a single stage without a pipeline."""
        accumulation = self.epoch.batch.gradient_accumulation
        return PipelineSchedule(self.num_stages, accumulation, trains=True)

    @property
    def inference_schedule(self) -> PipelineSchedule:
        """Cycles of the pipeline for one call of `evaluate` or `predict`."""
        iterations = self.inference_iterations
        return PipelineSchedule(self.num_stages, iterations, trains=False)

    @property
    def num_stages(self) -> int:
        """Number of stages that are busy at once."""
        return len(self.stages) if self.settings.is_pipelined else 1

    @property
    def bubble(self) -> float:
        """Idle share of the pipeline in an update, from 0 to 1."""
        return self.schedule.idle_share

    def bubble_at(self, gradient_accumulation: int) -> float:
        """Return the idle share of the pipeline for another gradient accumulation.

        Args:
            gradient_accumulation: Micro-batches of an update, enough for all stages.
        """
        schedule = self.schedule._replace(micro_batches=gradient_accumulation)
        return schedule.idle_share

    # Choices ---------------------------------------------------------------------

    @property
    def choices(self) -> tuple[PlanChoice, ...]:
        """Return the effects of other settings; the first entry is the plan itself."""
        return tuple(_choices(self))

    def on(self, device: Device) -> ModelPlan:
        """Return the same plan for another kind of IPU."""
        return replace(self, device=device)

    # Showing it ------------------------------------------------------------------

    def __str__(self) -> str:
        """Return the plan as text."""
        return as_text(list(_contents(self)))

    def show(self, console: Console | None = None) -> None:
        """Print the plan with bars and the schedule, from 40 columns on.

        Args:
            console: Console of rich; standard output by default.
        """
        show(list(_contents(self)), console)

    def save(self, path: PathLike) -> None:
        """Write the plan to a file.

        Args:
            path: A path that ends with `.svg`, `.png` or `.pdf`: matplotlib draws
                memory, FLOPs and schedule.

        Raises:
            ConfigError: Another ending, or matplotlib isn't installed.
            FileError: The file can't be written.
        """
        save(list(_contents(self)), _title(self), path)


# Choices ------------------------------------------------------------------------------


def _choices(plan: ModelPlan) -> Iterator[PlanChoice]:
    """Yield the effects of other settings, one change at a time."""
    for change, cost, size, settings, stages in _changes(plan):
        other = plan.settings._replace(**settings)
        memories = memory_by_ipu(stages, other, plan.device.num_bytes)
        fullest = max(memories, key=lambda memory: memory.total.value)
        yield PlanChoice(
            change,
            fullest.total,
            fullest.share,
            fullest.total.least / plan.device.num_bytes,
            plan.bubble_at(other.gradient_accumulation),
            size,
            cost,
        )


def _changes(
    plan: ModelPlan,
) -> Iterator[tuple[str, str, int, dict[str, Any], Sequence[StageCost]]]:
    """Yield changes: code, drawback, batch size, changed settings, and the stages."""
    stages, settings, batch = plan.stages, plan.settings, plan.epoch.batch
    size, now = batch.batch_size, settings.gradient_accumulation
    yield "", "", size, {}, stages
    if settings.recomputes:
        price, other = "no second forward pass", {"recomputes": False}
        yield "recompute='off'", price, size, other, stages
    elif settings.is_pipelined:
        other = {"recomputes": True}
        yield "recompute='auto'", "a second forward pass", size, other, stages
    has_state = any(weight.state for stage in stages for weight in stage.weights)
    if has_state and not settings.is_off_chip:
        price, other = "state moves with each update", {"is_off_chip": True}
        yield "offload_optimizer=True", price, size, other, stages
        if settings.num_shards == 1:
            copies = batch.replicas * batch.processes
            shards = copies if copies > 1 else 2
            change = "" if copies > 1 else f"replicas={shards}, "
            change += "shard_optimizer=True"
            of_all = size * shards // copies
            yield change, "weights are gathered", of_all, {"num_shards": shards}, stages
    for accumulation in (now // 2, now * 2, now * 4):
        if accumulation >= plan.schedule.num_slots:
            change = f"gradient_accumulation={accumulation}"
            counts = {"gradient_accumulation": accumulation}
            yield change, "", size // now * accumulation, counts, stages
    micro, odd = divmod(batch.micro_batch_size, 2)
    if micro and not odd:
        change = f"micro_batch_size={micro}, gradient_accumulation={2 * now}"
        counts, halves = {"gradient_accumulation": 2 * now}, [*map(_halved, stages)]
        yield change, "smaller passes", size, counts, halves


def _halved(stage: StageCost) -> StageCost:
    """Return a stage for half of the samples, with half of the activations' bytes."""
    names = ("flops", "input_bytes", "saved_bytes", "kept_bytes", "made_bytes")
    return stage._replace(**{name: getattr(stage, name) // 2 for name in names})


# Text ---------------------------------------------------------------------------------


def _contents(plan: ModelPlan) -> Iterator[Content]:
    """Yield the plan's texts, tables and pictures from top to bottom."""
    yield _title(plan)
    yield str(plan.epoch)
    yield from _work(plan)
    yield from _memory(plan)
    first, *others = plan.choices
    has_room = max(first.share, first.least_share) < _WORTH_ADVICE
    worthwhile = [
        choice
        for choice in others
        if choice.bubble < first.bubble
        or (choice.share < _WORTH_ADVICE if "off'" in choice.change else not has_room)
    ]
    columns: Columns = {
        "change": lambda choice: choice.change or "as it is",
        "batch": lambda choice: str(choice.batch_size),
        "idle": lambda choice: share_in_words(choice.bubble),
        "memory": lambda choice: _about(choice.memory),
        "share": lambda choice: share_in_words(choice.share),
        "price": lambda choice: choice.cost,
    }
    if worthwhile:
        yield Table("What may be changed", columns, [first, *worthwhile])
    notes = "\n".join(_notes(plan))
    if notes:
        yield notes


def _work(plan: ModelPlan) -> Iterator[Content]:
    """Yield the stages with their FLOPs, and the cycles of the pipeline."""
    columns: Columns = {
        "stage": lambda stage: str(stage.stage),
        "IPU": lambda stage: str(stage.ipu),
        "begins with": lambda stage: _first_names(stage.names),
        "parameters": lambda stage: f"{stage.num_parameters:,}",
        "forward": lambda stage: amount_in_words(stage.flops, "FLOP"),
        "of all": lambda stage: share_in_words(plan.flop_shares[stage.stage]),
    }
    caption = ""
    if len(plan.stages) > 1:
        caption = (
            f"Stage {plan.slowest_stage} is the slowest: it has {plan.imbalance:.2f} "
            "times the mean."
        )
    if plan.num_stages > 1:
        least = plan.schedule.num_slots
        tried = (least * factor for factor in (1, 2, 4, 8, 16))
        idle = ", ".join(f"{share_in_words(plan.bubble_at(g))} at {g}" for g in tried)
        caption += (
            f" {plan.num_stages} stages are ideally {plan.ideal_speedup:.2f} times as "
            f"fast as one IPU.\nIdle by gradient accumulation: {idle}."
        )
    yield Table("Stages", columns, plan.stages, caption)
    yield Bars(
        "FLOPs of a micro-batch",
        [f"stage {stage.stage}" for stage in plan.stages],
        {"forward": plan.flops},
        "FLOP",
        [f"{columns['forward'](s)}, {columns['of all'](s)}" for s in plan.stages],
        f"A micro-batch has {plan.epoch.batch.micro_batch_size} samples.",
    )
    if plan.num_stages == 1:
        return
    yield plan.schedule.timeline(plan.flops)


def _memory(plan: ModelPlan) -> Iterator[Content]:
    """Yield the bytes on each IPU."""
    capacity = _size(plan.device.num_bytes)
    columns: Columns = {
        "IPU": lambda memory: str(memory.ipu),
        "weights": lambda memory: _size(memory.parameters + memory.buffers),
        "optimizer": lambda memory: _size(memory.optimizer_state + memory.accumulators),
        "gradients": lambda memory: _about(memory.gradients),
        "activations": lambda memory: _about(memory.activations),
        "total": lambda memory: _about(memory.total),
        f"of {capacity}": lambda memory: share_in_words(memory.share),
        "at most": lambda memory: _size(memory.total.most),
    }
    traffic = next(call for call in plan.traffic if call.program == "training")
    caption = (
        f"~ marks estimates. Code isn't counted. {_judgement(plan)}\n"
        f"A call of the training takes {_size(traffic.input_bytes)} from the host."
    )
    yield Table("Memory", columns, plan.memory, caption)
    yield Bars(
        f"Memory in training; an IPU has {capacity}",
        [f"IPU {memory.ipu}" for memory in plan.memory],
        {
            "parameters": [m.parameters + m.buffers for m in plan.memory],
            "optimizer state": [m.optimizer_state for m in plan.memory],
            "accumulators": [m.accumulators for m in plan.memory],
            "gradients (estimate)": [m.gradients.value for m in plan.memory],
            "activations (estimate)": [m.activations.value for m in plan.memory],
        },
        "B",
        [f"{_about(m.total)}, {share_in_words(m.share)}" for m in plan.memory],
        "Code and temporary data aren't counted.",
        ("memory of one IPU", plan.device.num_bytes),
    )


def _title(plan: ModelPlan) -> str:
    """Describe model, optimizer and IPUs in a line."""
    ipus = "1 IPU" if plan.num_ipus == 1 else f"{plan.num_ipus} IPUs"
    return f"Plan of {plan.title} with {plan.optimizer}, on {ipus}: {plan.device.name}"


def _judgement(plan: ModelPlan) -> str:
    """Describe how full the fullest IPU is, from exact sizes and bounds.

    The text never claims that a model fits: only a compilation shows that.
    """
    fullest = max(plan.memory, key=lambda memory: memory.exact)
    share = fullest.exact / fullest.capacity
    largest = max(plan.memory, key=lambda memory: memory.total.least)
    if largest.total.least > largest.capacity:
        return (
            f"A compilation will run out of memory: IPU {largest.ipu} has "
            f"{_size(largest.capacity)}, and what is counted takes "
            f"{_size(largest.total.least)} at least."
        )
    words = next(words for most, words in _STATIC_SHARES if share <= most)
    return (
        f"Parameters, state and accumulators take {share_in_words(share)} of IPU "
        f"{fullest.ipu}, {words}. Only a compilation shows what code and temporary "
        "data take."
    )


def _notes(plan: ModelPlan) -> Iterator[str]:
    """List warnings: settings that `fit` will refuse, and costs that aren't counted."""
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
        yield f"Not used, and not counted: {_first_names(plan.unused)}."
    if plan.shared:
        yield (
            f"Used by several stages, and counted with the first: "
            f"{_first_names(plan.shared)}."
        )


def _first_names(names: Sequence[str]) -> str:
    """Join the first two names, and the number of further ones."""
    more = len(names) - 2
    shown = ", ".join(names[:2])
    return f"{shown} and {more} more" if more > 0 else shown or "-"


def _size(num_bytes: int) -> str:
    return amount_in_words(num_bytes, "B")


def _about(estimate: Estimate) -> str:
    is_estimate = estimate.least != estimate.most
    return amount_in_words(estimate.value, "B", is_estimate)
