# SPDX-License-Identifier: Apache-2.0
"""`batch_size` and its factors: users set some, and the others are derived.

    batch_size = micro_batch_size * gradient_accumulation * replicas * processes

It is Keras's batch size: the samples of one weight update. A call of the executor makes
`device_iterations` updates.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Callable, Mapping, NamedTuple

from ._arguments import check_integer
from .errors import ConfigError

MOST_IPUS = 64
"""IPUs of one process (PopTorch, `CompilerImpl.cpp`: more need several processes)."""

DEFAULT_BATCH_SIZE = 32
"""Keras's batch size, used if the user sets no factor."""

_MOST_NEAREST = 2  # batch sizes on either side


def as_product(factors: Mapping[str, int]) -> str:
    """Return the factors that aren't 1 as a product; "" for fewer than two.

    Example:
        >>> as_product({"micro-batch": 4, "replicas": 2, "processes": 1})
        ' = micro-batch 4 * replicas 2'
    """
    others = [f"{name} {value}" for name, value in factors.items() if value != 1]
    return f" = {' * '.join(others)}" if len(others) > 1 else ""


def micro_batches_in_flight(stages: int) -> int:
    """Return the micro-batches of an update that keep all stages of a pipeline busy.

    The last stage trains on a micro-batch in one step, all others go forward and then
    backward. PopTorch refuses fewer micro-batches (`CompilerImpl.cpp`).

    Example:
        >>> [micro_batches_in_flight(stages) for stages in (1, 2, 3)]
        [1, 3, 5]
    """
    return 2 * stages - 1


def most_stages(micro_batches: int) -> int:
    """Return the largest number of stages that these micro-batches keep busy.

    Example:
        >>> [most_stages(micro_batches) for micro_batches in (1, 2, 3)]
        [1, 1, 2]
    """
    return (micro_batches + 1) // 2


@dataclass(frozen=True)
class BatchPlan:
    """The factors of a call.

    Attributes:
        micro_batch_size: Samples of one forward pass on one replica.
        gradient_accumulation: Micro-batches of each replica per update.
        replicas: Copies of the model on the devices of one process.
        processes: Processes that train together, each with `replicas` replicas.
        device_iterations: Updates per call; in inference, forward passes.

    Example:
        >>> plan = BatchPlan(40, gradient_accumulation=10, device_iterations=10)
        >>> plan.batch_size, plan.samples_per_call
        (400, 4000)
    """

    micro_batch_size: int
    gradient_accumulation: int = 1
    replicas: int = 1
    processes: int = 1
    device_iterations: int = 1

    @property
    def batch_size(self) -> int:
        """Number of samples of one weight update, over all processes."""
        return self.samples_per_update * self.processes

    @property
    def samples_per_update(self) -> int:
        """Number of samples of one weight update in one process."""
        return self.micro_batch_size * self.gradient_accumulation * self.replicas

    @property
    def samples_per_call(self) -> int:
        """Number of samples of one call in one process.

        PopTorch calls it the combined batch size (user guide, "Efficient data
        batching").
        """
        return self.samples_per_update * self.device_iterations

    @property
    def micro_batches_per_call(self) -> int:
        """Number of forward passes of one call, over the replicas of one process."""
        return self.samples_per_call // self.micro_batch_size

    def describe(self) -> str:
        """Return the factors of a call that aren't 1 as text, for messages.

        Example:
            >>> print(BatchPlan(4, 5, replicas=2).describe())
            40 = micro-batch 4 * gradient accumulation 5 * replicas 2
            >>> print(BatchPlan(4).describe())
            4
        """
        return f"{self.samples_per_call}{as_product(self._factors)}{self._each}"

    def describe_as_too_large(self) -> str:
        """Return all factors of a training call, and how to make it smaller.

        Example:
            >>> print(BatchPlan(4, 5, replicas=2).describe_as_too_large())
            40 = micro-batch 4 * gradient accumulation 5 * replicas 2 * device ...
        """
        factors = " * ".join(f"{name} {count}" for name, count in self._factors.items())
        return (
            f"{self.samples_per_call} = {factors}{self._each}. Lower batch_size "
            f"({self.batch_size} here) or a factor of IPUConfig, pass more data, or "
            "pad with fit(drop_last='pad')."
        )

    @property
    def _factors(self) -> dict[str, int]:
        return {
            "micro-batch": self.micro_batch_size,
            "gradient accumulation": self.gradient_accumulation,
            "replicas": self.replicas,
            "device iterations": self.device_iterations,
        }

    @property
    def _each(self) -> str:
        return f" in each of {self.processes} processes" if self.processes > 1 else ""

    def describe_unfilled(self, num_samples: int) -> str:
        """Describe the update, or the call, that remaining samples don't fill.

        Args:
            num_samples: Number of remaining samples.

        Example:
            >>> print(BatchPlan(4, 5, device_iterations=3).describe_unfilled(10))
            an update of 20 = micro-batch 4 * gradient accumulation 5
        """
        if num_samples < self.batch_size:
            return f"an update of {replace(self, device_iterations=1).describe()}"
        return f"a call of {self.describe()}"


class Choice(NamedTuple):
    """A number that ipufit has chosen, because the user left it open.

    Attributes:
        value: The number.
        reason: Why the number isn't larger, as a part of a sentence; "" for no reason.

    Example:
        >>> Choice(10, "an epoch has 10 updates")
        Choice(value=10, reason='an epoch has 10 updates')
    """

    value: int
    reason: str = ""

    def remark(self, unit: str, name: str) -> str:
        """Describe the number and why it isn't larger; "" if there is no reason.

        Example:
            >>> choice = Choice(16, "32 would pad 80 passes to 96")
            >>> choice.remark("pass", "inference_iterations")
            '16 passes per call (inference_iterations left open); not more because ...'
        """
        if not self.reason:
            return ""
        plural = f"{unit}es" if unit.endswith("s") else f"{unit}s"
        return (
            f"{self.value} {unit if self.value == 1 else plural} per call ({name} left "
            f"open); not more because {self.reason}"
        )


def derive_plan(
    batch_size: int | None,
    *,
    micro_batch_size: int | None,
    gradient_accumulation: int | None,
    replicas: int,
    processes: int,
    device_iterations: int,
    stages: int = 1,
) -> BatchPlan:
    """Derive the factors that were left open.

    Args:
        batch_size: Samples per update; None for the product of the factors that are
            set.
        micro_batch_size: None to derive it.
        gradient_accumulation: None to derive the smallest that is allowed.
        replicas: Replicas in one process.
        processes: Processes that train together.
        device_iterations: Updates per call.
        stages: Forward stages of the pipeline.

    Raises:
        ConfigError: The factors don't fit each other or the pipeline.

    Example:
        >>> derive_plan(400, micro_batch_size=40, gradient_accumulation=None,
        ...             replicas=2, processes=1, device_iterations=1)
        ... # doctest: +NORMALIZE_WHITESPACE
        BatchPlan(micro_batch_size=40, gradient_accumulation=5, replicas=2,
                  processes=1, device_iterations=1)
    """
    least = micro_batches_in_flight(stages)
    copies = replicas * processes
    for name, value in (
        ("batch_size", batch_size),
        ("micro_batch_size", micro_batch_size),
        ("gradient_accumulation", gradient_accumulation),
    ):
        if value is not None:
            check_integer(name, value, least=1)
    if gradient_accumulation is not None and gradient_accumulation < least:
        raise ConfigError(
            f"gradient_accumulation={gradient_accumulation} is too small for a "
            f"pipeline of {stages} stages: training keeps 2 * {stages} - 1 = {least} "
            f"micro-batches in flight. Use gradient_accumulation={least} or more, "
            "fewer stages, or execution='sharded'."
        )
    if batch_size is None and micro_batch_size is not None:
        micro, accumulation = micro_batch_size, gradient_accumulation or least
    else:
        micro, accumulation = _divide(
            batch_size or DEFAULT_BATCH_SIZE,
            micro_batch_size,
            gradient_accumulation,
            copies,
            least,
        )
    plan = BatchPlan(micro, accumulation, replicas, processes, device_iterations)
    if plan.gradient_accumulation < least:
        raise ConfigError(
            f"batch_size={plan.batch_size} leaves gradient_accumulation="
            f"{plan.gradient_accumulation} (= batch / (micro-batch {micro} * replicas "
            f"{replicas} * processes {processes})), too small for a pipeline of "
            f"{stages} stages, which needs 2 * {stages} - 1 = {least}. Use "
            f"batch_size={micro * least * copies} or more, or a smaller "
            "micro_batch_size."
        )
    return plan


def _divide(
    batch_size: int,
    micro: int | None,
    accumulation: int | None,
    copies: int,
    least: int,
) -> tuple[int, int]:
    """Return micro-batch size and accumulation for a batch size and `copies`.

    Where both are open, the accumulation is the smallest one that a pipeline allows.
    """
    per_copy = batch_size // copies
    if micro is None and accumulation is None:
        legal = (g for g in range(least, per_copy + 1) if per_copy % g == 0)
        accumulation = next(legal, least)
    found = (
        micro or per_copy // (accumulation or 1),
        accumulation or per_copy // (micro or 1),
    )
    if found[0] * found[1] * copies == batch_size:
        return found
    given = {
        "micro-batch": micro,
        "gradient accumulation": accumulation,
        "replicas * processes": copies,
    }
    factors = [f"{name} {value}" for name, value in given.items() if value is not None]
    unit = (micro or 1) * (accumulation or 1) * copies
    if micro is not None and accumulation is not None:
        remedy = f"Use batch_size={unit}, or leave one of the factors open."
    else:
        below = batch_size // unit * unit
        nearest = [str(multiple) for multiple in (below, below + unit) if multiple]
        remedy = f"The nearest legal values are {' and '.join(nearest)}."
    raise ConfigError(
        f"batch_size={batch_size} is not made of its factors: batch_size = micro-batch "
        "* gradient accumulation * replicas * processes, and the settings are "
        f"{', '.join(factors)} (together {unit}). {remedy}"
    )


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order.

    The search goes up to the square root: an epoch may have billions of samples.

    Args:
        number: 1 or more.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_batch_sizes(
    num_samples: int, batch: BatchPlan, derive: Callable[[int], BatchPlan]
) -> tuple[int, ...]:
    """Find the batch sizes near the plan's that divide an epoch into whole calls.

    Args:
        num_samples: Samples of an epoch.
        batch: The plan with the present batch size.
        derive: Returns the plan of another batch size, or raises a `ConfigError`.

    Returns:
        Up to two smaller and two larger sizes, none below half or above twice the
        present one, in ascending order; empty if the present one divides the epoch.

    Example:
        >>> nearest_batch_sizes(100, BatchPlan(16), BatchPlan)
        (10, 20, 25)
    """
    per_update, rest = divmod(num_samples, batch.device_iterations)
    if rest or not num_samples % (batch.batch_size * batch.device_iterations):
        return ()
    size_now = batch.batch_size
    sizes = [n for n in divisors(per_update) if size_now <= 2 * n <= 4 * size_now]
    smaller = [size for size in reversed(sizes) if size < size_now]
    larger = [size for size in sizes if size > size_now]

    def has_plan(size: int) -> bool:
        try:
            derive(size)
        except ConfigError:
            return False
        return True

    found = [
        size
        for side in (smaller, larger)
        for size in itertools.islice(filter(has_plan, side), _MOST_NEAREST)
    ]
    return tuple(sorted(found))
