# SPDX-License-Identifier: Apache-2.0
"""The plan of an epoch: its updates and calls, the samples left over, the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator

from ipufit.batching import BatchPlan
from ipufit.errors import ConfigError

from .divisors import divisors
from .pipeline_schedule import PipelineSchedule

_MOST_NEAREST = 2  # on either side


@dataclass(frozen=True)
class EpochPlan:
    """The factors of a training call, and the calls of an epoch.

    Attributes:
        batch: The factors of a call.
        num_samples: Number of samples of an epoch; None if the data don't say.
        is_padding: Whether samples that don't fill a call are padded, not left out.
        stages: Forward stages of the pipeline; 1 for none.
        nearest_batch_sizes: Batch sizes near this one that leave no sample over, in
            order; empty if this one doesn't, or the number of samples isn't known.
        reason: Why a call makes so many updates, if that was chosen; else empty.

    Example:
        >>> print(EpochPlan(BatchPlan(8, 2, device_iterations=3), 100))
        batch size 16 = micro-batch 8 * gradient accumulation 2 * replicas 1 * proc...
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
        """Samples of a call in all processes."""
        return self.batch.samples_per_call * self.batch.processes

    @property
    def calls(self) -> int | None:
        """Calls per epoch; None if the number of samples isn't known."""
        if self.num_samples is None:
            return None
        whole, rest = divmod(self.num_samples, self.samples_per_call)
        return whole + bool(rest and self.is_padding)

    @property
    def updates(self) -> int | None:
        """Weight updates per epoch; None if the number of samples isn't known."""
        return None if self.calls is None else self.calls * self.batch.device_iterations

    @property
    def dropped_samples(self) -> int:
        """Samples that an epoch leaves out."""
        if self.num_samples is None or self.is_padding:
            return 0
        return self.num_samples % self.samples_per_call

    @property
    def padded_rows(self) -> int:
        """Rows that fill up the last call, and count nothing."""
        if self.num_samples is None or not self.is_padding:
            return 0
        return -self.num_samples % self.samples_per_call

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The pipeline's cycles for one update; None without a pipeline."""
        if self.stages == 1:
            return None
        return PipelineSchedule(self.stages, self.batch.gradient_accumulation, True)

    def __str__(self) -> str:
        """The plan in lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        batch = self.batch
        yield (
            f"batch size {batch.batch_size} = micro-batch {batch.micro_batch_size} * "
            f"gradient accumulation {batch.gradient_accumulation} * replicas "
            f"{batch.replicas} * processes {batch.processes}"
        )
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
            yield "The data don't say how many samples an epoch has."
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


def nearest_batch_sizes(
    num_samples: int, batch: BatchPlan, derive: Callable[[int], BatchPlan]
) -> tuple[int, ...]:
    """Find the batch sizes next to one that divide an epoch into whole calls.

    Args:
        num_samples: Samples of an epoch.
        batch: The plan whose batch size isn't one of them, or is.
        derive: Makes the factors of another batch size, or raises a `ConfigError`.

    Returns:
        Up to two smaller ones and two larger ones, in order; empty if the batch size
        leaves no sample over itself.

    Example:
        >>> nearest_batch_sizes(100, BatchPlan(16), BatchPlan)
        (5, 10, 20, 25)
    """
    per_update, rest = divmod(num_samples, batch.device_iterations)
    if rest or not num_samples % (batch.batch_size * batch.device_iterations):
        return ()
    sizes = divisors(per_update)
    smaller = [size for size in reversed(sizes) if size < batch.batch_size]
    larger = [size for size in sizes if size > batch.batch_size]
    found = [*_derivable(smaller, derive), *_derivable(larger, derive)]
    return tuple(sorted(found))


def _derivable(sizes: list[int], derive: Callable[[int], BatchPlan]) -> list[int]:
    """The first two sizes that have factors."""
    found: list[int] = []
    for size in sizes:
        if len(found) == _MOST_NEAREST:
            break
        try:
            derive(size)
        except ConfigError:
            continue
        found.append(size)
    return found


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
