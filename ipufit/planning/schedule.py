# SPDX-License-Identifier: Apache-2.0
"""The calls of an epoch, and the cycles of a pipeline.

`PipelineSchedule` says which micro-batch each stage works on, cycle by cycle.

A micro-batch passes through a sequence of slots, one in each cycle. In inference the
slots are the stages. In training they are the forward stages and then the backward
ones; the last forward stage and its backward stage share a slot, which makes 2 * stages
- 1 slots (PopTorch's check of gradient accumulation, `CompilerImpl.cpp`). So the IPU of
the last stage has one slot, each other IPU two.

All slots are assumed to take the same time. If they don't, each cycle takes as long as
its slowest IPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterator, NamedTuple, Sequence

from ipufit.batching import BatchPlan, as_product, micro_batches_in_flight
from ipufit.types import ShownAsText

if TYPE_CHECKING:
    from rich.console import Console

    from ipufit.types import PathLike

    from .pictures import Timeline

_MOST_FULL_CYCLES = 8
"""Maximum number of full cycles in a picture; further full cycles are left out."""


class PipelineSchedule(NamedTuple):
    """The cycles of one update, or of one call of inference.

    Attributes:
        stages: Number of forward stages, 1 or more.
        micro_batches: Number of micro-batches until the pipeline is empty again: the
            gradient accumulation of an update, or the iterations of a call.
        trains: Whether there are backward stages.

    Example:
        >>> schedule = PipelineSchedule(4, 10, trains=True)
        >>> schedule.num_cycles, schedule.num_full_cycles, schedule.idle_share
        (16, 4, 0.375)
    """

    stages: int
    micro_batches: int
    trains: bool

    @property
    def num_slots(self) -> int:
        """Number of slots that each micro-batch passes through, one per cycle."""
        return micro_batches_in_flight(self.stages) if self.trains else self.stages

    @property
    def num_cycles(self) -> int:
        """Number of cycles from the first slot to the last micro-batch's last slot."""
        return self.micro_batches + self.num_slots - 1

    @property
    def num_full_cycles(self) -> int:
        """Number of cycles in which all slots work."""
        return max(self.micro_batches - self.num_slots + 1, 0)

    @property
    def idle_share(self) -> float:
        """Share of idle slots over all cycles, from 0 to 1.

        It is `(slots - 1) / cycles`, the bubble of the pipeline.
        """
        return (self.num_slots - 1) / self.num_cycles

    def micro_batch_in(self, slot: int, cycle: int) -> int | None:
        """Return the micro-batch of a slot in a cycle; None while it is idle.

        Args:
            slot: Index of the slot; 0 is the first forward stage.
            cycle: Index of the cycle, from 0.

        Example:
            >>> schedule = PipelineSchedule(2, 3, trains=True)
            >>> [schedule.micro_batch_in(2, cycle) for cycle in range(5)]
            [None, None, 0, 1, 2]
        """
        number = cycle - slot
        return number if 0 <= number < self.micro_batches else None

    def stage_of(self, slot: int) -> int:
        """Return the stage whose IPU runs a slot; backward slots descend to stage 0.

        Example:
            >>> schedule = PipelineSchedule(3, 8, trains=True)
            >>> [schedule.stage_of(slot) for slot in range(schedule.num_slots)]
            [0, 1, 2, 1, 0]
        """
        return min(slot, self.num_slots - 1 - slot) if self.trains else slot

    # Pictures -------------------------------------------------------------------------

    def show(self, console: Console | None = None) -> None:
        """Print the schedule with characters, from 40 columns on.

        Args:
            console: Console of rich; standard output by default.

        Example:
            >>> PipelineSchedule(2, 5, trains=True).show()
            Pipeline of 2 stages, 5 micro-batches in training
            cycle   0 1 2 3 4 5 6
            0 F     0 1 2 3 4 . .
            0 B     . . 0 1 2 3 4
            1 FB    . 0 1 2 3 4 .
            at work 1 2 3 3 3 2 1
            F is forward, B is backward. 7 cycles: 2 to fill the pipeline, 3 in which...
        """
        from .pictures import show

        show([self.timeline()], console)

    def save(self, path: PathLike) -> None:
        """Write the schedule to a file.

        Args:
            path: A path that ends with `.svg`, `.png` or `.pdf`, for matplotlib.

        Raises:
            ConfigError: Another ending, or matplotlib isn't installed.
            FileError: The file can't be written.
        """
        from .pictures import save

        timeline = self.timeline()
        save([timeline], timeline.title, path)

    def timeline(self, work: Sequence[float] = ()) -> Timeline:
        """Return the slots over the cycles, as data of a picture.

        If all slots work in more than eight cycles, the first four and the last four of
        these are shown.

        Args:
            work: Work of each stage, in any unit: a cycle takes as long as the stage
                with most work. By default all stages take the whole cycle.

        Example:
            >>> timeline = PipelineSchedule(2, 100, trains=False).timeline()
            >>> timeline.columns
            (0, 1, 2, 3, 4, None, 96, 97, 98, 99, 100)
            >>> timeline.rows["1 F"]
            (None, 0, 1, 2, 3, None, 95, 96, 97, 98, 99)
        """
        from .pictures import Timeline

        columns: tuple[int | None, ...] = tuple(range(self.num_cycles))
        if self.num_full_cycles > _MOST_FULL_CYCLES:
            kept = self.num_slots - 1 + _MOST_FULL_CYCLES // 2
            columns = (*columns[:kept], None, *columns[-kept:])
        rows: dict[str, tuple[int | None, ...]] = {}
        for slot in sorted(range(self.num_slots), key=self.stage_of):
            stage = self.stage_of(slot)
            letters = "F" if slot < self.stages else ""
            if self.trains and slot >= self.stages - 1:
                letters += "B"
            rows[f"{stage} {letters}"] = tuple(
                None if cycle is None else self.micro_batch_in(slot, cycle)
                for cycle in columns
            )
        rows["at work"] = tuple(
            None if cycle is None else sum(number is not None for number in numbers)
            for cycle, *numbers in zip(columns, *rows.values())
        )
        stages = _counted(self.stages, "stage")
        passed = _counted(self.micro_batches, "micro-batch")
        where = "training" if self.trains else "inference"
        return Timeline(
            f"Pipeline of {stages}, {passed} in {where}",
            columns,
            rows,
            " ".join(self._sentences()),
            {
                name: work[int(name.partition(" ")[0])] / max(work)
                for name in [*rows][:-1]
                if any(work)
            },
        )

    def _sentences(self) -> Iterator[str]:
        """Yield sentences that explain the picture, and the schedule's numbers."""
        yield "F is forward, B is backward." if self.trains else "F is forward."
        fill, full = self.num_slots - 1, self.num_full_cycles
        cycles = _counted(self.num_cycles, "cycle")
        if full:
            yield (
                f"{cycles}: {fill} to fill the pipeline, {full} in which all slots "
                f"work, {fill} to empty it."
            )
        else:
            yield f"{cycles}, none of which has work for all {self.num_slots} slots."
        used = 1 - self.idle_share
        yield f"{used:.1%} of the slots are in use, {self.idle_share:.1%} are idle."
        if full > _MOST_FULL_CYCLES:
            yield f"{full - _MOST_FULL_CYCLES} full cycles are left out."
        yield "All cycles are drawn equally long."


@dataclass(frozen=True, repr=False)
class EpochPlan(ShownAsText):
    """The factors of a training call, and the calls of an epoch.

    Attributes:
        batch: The factors of a call.
        num_samples: Number of samples of an epoch; None if the data has no length.
        is_padding: Whether samples that don't fill a call are padded, and not left out.
        stages: Number of forward stages of the pipeline; 1 without one.
        nearest_batch_sizes: Batch sizes near the present one that leave out no sample,
            in ascending order; empty if the present size leaves out no sample, or the
            number of samples isn't known.
        reason: Why a call makes this number of updates, if ipufit chose the number;
            else "".

    Example:
        >>> print(EpochPlan(BatchPlan(8, 2, device_iterations=3), 100))
        batch size 16 = micro-batch 8 * gradient accumulation 2
        A call makes 3 updates, of 48 samples together.
        An epoch of 100 samples is 2 calls, 6 updates. 4 samples are left out.
    """

    batch: BatchPlan
    num_samples: int | None
    is_padding: bool = False
    stages: int = 1
    nearest_batch_sizes: tuple[int, ...] = ()
    reason: str = ""

    @property
    def samples_per_call(self) -> int:
        """Number of samples of a call in all processes."""
        return self.batch.samples_per_call * self.batch.processes

    @property
    def calls(self) -> int | None:
        """Number of calls per epoch; None if the number of samples isn't known."""
        if self.num_samples is None:
            return None
        whole, rest = divmod(self.num_samples, self.samples_per_call)
        return whole + bool(rest and self.is_padding)

    @property
    def updates(self) -> int | None:
        """Number of weight updates per epoch; None if it isn't known."""
        return None if self.calls is None else self.calls * self.batch.device_iterations

    @property
    def dropped_samples(self) -> int:
        """Number of samples that an epoch leaves out."""
        if self.num_samples is None or self.is_padding:
            return 0
        return self.num_samples % self.samples_per_call

    @property
    def padded_rows(self) -> int:
        """Number of rows that pad the last call."""
        if self.num_samples is None or not self.is_padding:
            return 0
        return -self.num_samples % self.samples_per_call

    @property
    def schedule(self) -> PipelineSchedule | None:
        """Cycles of the pipeline for one update; None without a pipeline."""
        if self.stages == 1:
            return None
        return PipelineSchedule(self.stages, self.batch.gradient_accumulation, True)

    def __str__(self) -> str:
        """Return the plan in lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        batch = self.batch
        factors = {
            "micro-batch": batch.micro_batch_size,
            "gradient accumulation": batch.gradient_accumulation,
            "replicas": batch.replicas,
            "processes": batch.processes,
        }
        yield f"batch size {batch.batch_size}{as_product(factors)}"
        why = f" (not more because {self.reason})" if self.reason else ""
        updates = _counted(batch.device_iterations, "update")
        yield (
            f"A call makes {updates}, of {self.samples_per_call} samples together{why}."
        )
        schedule = self.schedule
        if schedule is not None:
            yield (
                f"The pipeline of {self.stages} stages takes {schedule.num_cycles} "
                f"cycles for an update. {schedule.idle_share:.1%} of its slots are "
                "idle, while it fills and empties."
            )
        if self.num_samples is None or self.updates is None or self.calls is None:
            yield "The number of samples of an epoch isn't known."
            return
        ending = ""
        if self.dropped_samples:
            ending = f" {_counted(self.dropped_samples, 'sample')} are left out."
        if self.padded_rows:
            ending = f" The last call is filled up with {self.padded_rows} rows."
        yield (
            f"An epoch of {self.num_samples} samples is {_counted(self.calls, 'call')},"
            f" {_counted(self.updates, 'update')}.{ending}"
        )
        if self.nearest_batch_sizes:
            sizes = ", ".join(map(str, self.nearest_batch_sizes))
            yield f"Batch sizes near it that leave no sample over: {sizes}."


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"
