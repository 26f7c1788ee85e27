# SPDX-License-Identifier: Apache-2.0
"""`batch_size` and its factors: give what you care about, the rest is derived.

    batch_size = micro_batch_size * gradient_accumulation * replicas * processes

It is Keras's batch size: the samples of one weight update. A call of the executor
makes `device_iterations` updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import ConfigError

DEFAULT_BATCH_SIZE = 32
"""Keras's batch size, for when no factor is given."""


@dataclass(frozen=True)
class BatchPlan:
    """The factors of a call, decided once.

    Attributes:
        micro_batch_size: Samples of one forward pass on one replica.
        gradient_accumulation: Micro-batches that a replica sees per update.
        replicas: Copies of the model on the devices of one process.
        processes: Processes that train together, each with such replicas.
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
        """Samples of one weight update, over all processes."""
        return self.samples_per_update * self.processes

    @property
    def samples_per_update(self) -> int:
        """Samples of one weight update in one process."""
        return self.micro_batch_size * self.gradient_accumulation * self.replicas

    @property
    def samples_per_call(self) -> int:
        """Samples one call consumes in one process.

        PopTorch calls it the combined batch size (user guide, "Efficient data
        batching").
        """
        return self.samples_per_update * self.device_iterations

    @property
    def micro_batches_per_call(self) -> int:
        """Forward passes of one call, over the replicas of one process."""
        return self.samples_per_call // self.micro_batch_size

    def describe(self) -> str:
        """The factors of a call, for messages.

        Example:
            >>> print(BatchPlan(4, 5, replicas=2).describe())
            40 = micro-batch 4 * gradient accumulation 5 * replicas 2 * device...
        """
        each = f" in each of {self.processes} processes" if self.processes > 1 else ""
        return (
            f"{self.samples_per_call} = micro-batch {self.micro_batch_size} * gradient "
            f"accumulation {self.gradient_accumulation} * replicas {self.replicas} * "
            f"device iterations {self.device_iterations}{each}"
        )

    def describe_unfilled(self, num_samples: int) -> str:
        """The update that samples left over don't fill, else the call, for messages.

        Args:
            num_samples: Number of samples left over.

        Example:
            >>> print(BatchPlan(4, 5, device_iterations=3).describe_unfilled(10))
            an update of 20 = micro-batch 4 * gradient accumulation 5 * replicas 1 *...
        """
        if num_samples < self.batch_size:
            return f"an update of {replace(self, device_iterations=1).describe()}"
        return f"a call of {self.describe()}"


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
    """Fill in the factors that were left open.

    Args:
        batch_size: Samples per update; None to take the product of the factors given.
        micro_batch_size: None to derive it.
        gradient_accumulation: None to derive it: the smallest that is legal.
        replicas: Replicas in one process.
        processes: Processes that train together.
        device_iterations: Updates per call.
        stages: Forward stages of the pipeline, which needs `2 * stages - 1`
            micro-batches per update in flight.

    Raises:
        ConfigError: The factors don't fit together, or not the pipeline.

    Example:
        >>> derive_plan(400, micro_batch_size=40, gradient_accumulation=None,
        ...             replicas=2, processes=1, device_iterations=1)
        ... # doctest: +NORMALIZE_WHITESPACE
        BatchPlan(micro_batch_size=40, gradient_accumulation=5, replicas=2,
                  processes=1, device_iterations=1)
    """
    least = 2 * stages - 1
    copies = replicas * processes
    for name, value in (
        ("batch_size", batch_size),
        ("micro_batch_size", micro_batch_size),
        ("gradient_accumulation", gradient_accumulation),
    ):
        if value is not None:
            check_positive(name, value)
    if gradient_accumulation is not None and gradient_accumulation < least:
        raise ConfigError(
            f"gradient_accumulation={gradient_accumulation} is too small for a "
            f"pipeline of {stages} stages: training keeps 2 * {stages} - 1 = {least} "
            f"micro-batches in flight. Use gradient_accumulation={least} or more, "
            "fewer stages, or execution='sharded'."
        )
    if batch_size is None and micro_batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE
    if batch_size is None:
        accumulation = gradient_accumulation or least
        micro = micro_batch_size or 1
    else:
        micro, accumulation = _divide(
            batch_size, micro_batch_size, gradient_accumulation, copies, least
        )
    plan = BatchPlan(micro, accumulation, replicas, processes, device_iterations)
    if plan.gradient_accumulation < least:
        raise ConfigError(
            f"batch_size={plan.batch_size} leaves gradient_accumulation="
            f"{plan.gradient_accumulation} ({_product(plan)}), too small for a "
            f"pipeline of {stages} stages, which needs 2 * {stages} - 1 = {least}. Use "
            f"batch_size={micro * least * copies} or more, or a smaller "
            "micro_batch_size."
        )
    return plan


def check_count(name: str, value: object) -> None:
    """Refuse values that are no whole numbers of 0 or more.

    Raises:
        ConfigError: The value is something else.

    Example:
        >>> check_count("warmup", -1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: warmup=-1 is not a whole number of 0 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={value!r} is not a whole number of 0 or more.")


def check_positive(name: str, value: object) -> None:
    """Refuse values that are no positive whole numbers.

    Raises:
        ConfigError: The value is something else.

    Example:
        >>> check_positive("replicas", 0)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: replicas=0 is not a whole number of 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a whole number of 1 or more.")


def _divide(
    batch_size: int,
    micro: int | None,
    accumulation: int | None,
    copies: int,
    least: int,
) -> tuple[int, int]:
    """Micro-batch size and accumulation that multiply with `copies` up to the batch."""
    per_copy = batch_size // copies
    if micro is not None:
        found = micro, accumulation or per_copy // micro
    elif accumulation is not None:
        found = per_copy // accumulation, accumulation
    else:
        legal = (g for g in range(least, per_copy + 1) if per_copy % g == 0)
        accumulation = next(legal, least)
        found = per_copy // accumulation, accumulation
    if found[0] * found[1] * copies != batch_size:
        raise _indivisible(batch_size, micro, accumulation, copies, least)
    return found


def _indivisible(
    batch_size: int,
    micro: int | None,
    accumulation: int | None,
    copies: int,
    least: int,
) -> ConfigError:
    given = [
        f"{name} {value}"
        for name, value in (
            ("micro-batch", micro),
            ("gradient accumulation", accumulation),
            ("replicas * processes", copies),
        )
        if value is not None
    ]
    unit = (micro or 1) * (accumulation or (1 if micro else least)) * copies
    if micro is not None and accumulation is not None:
        remedy = f"Use batch_size={unit}, or leave one of the factors open."
    else:
        nearest = _nearest_multiples(batch_size, unit)
        remedy = f"The nearest legal values are {' and '.join(map(str, nearest))}."
    return ConfigError(
        f"batch_size={batch_size} is not made of its factors: batch_size = micro-batch "
        "* gradient accumulation * replicas * processes, and given are "
        f"{', '.join(given)} (together {unit}). {remedy}"
    )


def _nearest_multiples(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def _product(plan: BatchPlan) -> str:
    return (
        f"= batch / (micro-batch {plan.micro_batch_size} * replicas {plan.replicas} * "
        f"processes {plan.processes})"
    )
