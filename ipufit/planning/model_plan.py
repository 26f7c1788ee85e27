# SPDX-License-Identifier: Apache-2.0
"""`ModelPlan`: what training a model takes and gives, known before it is compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .devices import Device
from .epoch_plan import EpochPlan
from .memory import IPUMemory, MemorySettings, memory_by_ipu
from .pipeline_schedule import PipelineSchedule
from .plan_choices import PlanChoice, plan_choices
from .plan_report import plan_report
from .plan_text import plan_text
from .stage_cost import StageCost, imbalance

if TYPE_CHECKING:
    from rich.console import Console

    from ipufit.types import PathLike


class HostTraffic(NamedTuple):
    """Bytes that one call moves between the host and the IPUs of a process.

    Attributes:
        program: "training" or "inference".
        output_mode: Mode of the outputs: PopTorch's name, or "EveryN(n)".
        input_bytes: Bytes of the data that are given, inputs and targets, to the IPUs.
            Exact.
        output_bytes: Bytes of the module's outputs to the host. Exact for a program
            that returns them all; figures of ipufit come on top, some bytes each.
    """

    program: str
    output_mode: str
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class ModelPlan:
    """The memory and the work that training a model takes, and its pipeline.

    Printed, it is a short text. All numbers are data: bytes, FLOPs of one forward pass
    of a micro-batch, cycles of the pipeline.

    Attributes:
        title: Class of the module.
        optimizer: Class of the optimiser.
        device: The kind of IPU.
        epoch: Factors of a call, calls and updates of an epoch, samples left out.
        stages: Costs of each stage, in order; one without a pipeline.
        settings: The settings that memory depends on.
        inference_iterations: Micro-batches of a call of `evaluate` or `predict` that
            the pipeline needs at least.
        traffic: Bytes between host and IPUs per call, for each output mode.
        unused: Names of parameters that `forward` doesn't use; they aren't counted.
        shared: Names of parameters that several stages use. Each is counted once, with
            the first of them; the others get copies.
        refusal: Why `fit` would refuse such samples, as those without targets that a
            loss or a metric needs; empty if it wouldn't.
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
        """Bytes that training takes on each IPU of a replica."""
        return memory_by_ipu(self.stages, self.settings, self.device.num_bytes)

    @property
    def fullest(self) -> IPUMemory:
        """The IPU that is expected to be the fullest."""
        return max(self.memory, key=lambda memory: memory.total.value)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters that are used."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def ipus_per_replica(self) -> int:
        """IPUs of a replica: all up to the highest that has a stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def num_ipus(self) -> int:
        """IPUs of all replicas of all processes."""
        batch = self.epoch.batch
        return self.ipus_per_replica * batch.replicas * batch.processes

    # Work ------------------------------------------------------------------------

    @property
    def flops(self) -> tuple[int, ...]:
        """FLOPs of each stage's forward pass of a micro-batch."""
        return tuple(stage.flops for stage in self.stages)

    @property
    def flop_shares(self) -> tuple[float, ...]:
        """Share of each stage in the FLOPs of all."""
        total = sum(self.flops)
        return tuple(flops / total if total else 0.0 for flops in self.flops)

    @property
    def slowest_stage(self) -> int:
        """Number of the stage that has most FLOPs."""
        return max(self.stages, key=lambda stage: stage.flops).stage

    @property
    def imbalance(self) -> float:
        """FLOPs of the slowest stage over their mean: 1 where all have the same."""
        return imbalance(self.flops)

    @property
    def ideal_speedup(self) -> float:
        """Speed of the stages together over one IPU's, by FLOPs and bubble alone.

        It is stages / imbalance * (1 - bubble). Small layers take longer than their
        FLOPs say, so this is a first guess.
        """
        if not self.settings.is_pipelined:
            return 1.0
        return len(self.stages) / self.imbalance * (1.0 - self.bubble)

    # Schedule --------------------------------------------------------------------

    @property
    def schedule(self) -> PipelineSchedule:
        """Cycles of the pipeline for one update; of one stage without a pipeline."""
        accumulation = self.epoch.batch.gradient_accumulation
        return PipelineSchedule(self.num_stages, accumulation, trains=True)

    @property
    def inference_schedule(self) -> PipelineSchedule:
        """Cycles of the pipeline for one call of `evaluate` or `predict`."""
        iterations = self.inference_iterations
        return PipelineSchedule(self.num_stages, iterations, trains=False)

    @property
    def num_stages(self) -> int:
        """Stages that are busy at once."""
        return len(self.stages) if self.settings.is_pipelined else 1

    @property
    def bubble(self) -> float:
        """Idle share of the pipeline in an update, from 0 to 1."""
        return self.schedule.idle_share

    def bubble_at(self, gradient_accumulation: int) -> float:
        """Idle share of the pipeline with another gradient accumulation.

        Args:
            gradient_accumulation: Micro-batches of an update: `2 * stages - 1` or more.
        """
        schedule = self.schedule._replace(micro_batches=gradient_accumulation)
        return schedule.idle_share

    # Choices ---------------------------------------------------------------------

    @property
    def choices(self) -> tuple[PlanChoice, ...]:
        """The effects of other settings; the first is the plan as it is."""
        return plan_choices(
            self.stages,
            self.settings,
            self.epoch.batch,
            self.device.num_bytes,
            self.num_stages,
        )

    def on(self, device: Device) -> ModelPlan:
        """The same plan for another kind of IPU."""
        return replace(self, device=device)

    # Showing it ------------------------------------------------------------------

    def __str__(self) -> str:
        """The plan as text."""
        return plan_text(self)

    def show(self, console: Console | None = None) -> None:
        """Print the plan with pictures of characters, from 40 columns on.

        Args:
            console: Console of rich; standard output by default.
        """
        plan_report(self).show(console)

    def save(self, path: PathLike) -> None:
        """Write the plan to a file as pictures, by matplotlib.

        Args:
            path: The file: `.svg` for memory, FLOPs and schedule; `.html` for a page
                that has the tables, too.

        Raises:
            ConfigError: Another ending, or matplotlib isn't installed.
            FileError: The file can't be written.
        """
        plan_report(self).save(path)
