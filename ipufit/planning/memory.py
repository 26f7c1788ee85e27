# SPDX-License-Identifier: Apache-2.0
"""The memory that training takes on each IPU, as far as it is known before compiling.

Parameters, buffers, the optimiser's state and accumulators are counted exactly. What
gradients and activations take is estimated, with bounds. Code, exchange buffers, copies
in other layouts and temporary data of operators aren't counted: only a compilation
shows those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

from .stage_cost import StageCost, StateCost

LEAST_OFF_CHIP = 2
"""Elements of the smallest tensor that PopART keeps off the chip by default
(`minElementsForOffChip`, `sessionoptions.hpp`)."""

LEAST_SHARDED = 8192
"""Elements of the smallest tensor that PopART divides among replicas by default
(`minElementsForReplicatedTensorSharding`, `sessionoptions.hpp`)."""


class Estimate(NamedTuple):
    """A number that depends on the compiler.

    Attributes:
        value: The number that is to be expected.
        least: The least that it can be.
        most: The most that it can be, apart from copies that the compiler makes.

    Example:
        >>> Estimate(4, 2, 8).plus(Estimate(1, 1, 1))
        Estimate(value=5, least=3, most=9)
    """

    value: int
    least: int
    most: int

    def plus(self, other: Estimate) -> Estimate:
        """The sum of two estimates; an exact number is one whose bounds are equal."""
        return Estimate(
            self.value + other.value,
            self.least + other.least,
            self.most + other.most,
        )


class MemorySettings(NamedTuple):
    """Settings that memory depends on.

    Attributes:
        gradient_accumulation: Micro-batches of an update.
        is_pipelined: Whether all stages are busy at once, so that each holds several
            micro-batches.
        recomputes: Whether activations are computed again for the backward pass.
        is_off_chip: Whether the optimiser's state is kept off the chip.
        num_shards: Replicas that share the optimiser's state; 1 if each has all.
        least_off_chip: Elements of the smallest tensor that is kept off the chip.
        least_sharded: Elements of the smallest tensor that is shared.
    """

    gradient_accumulation: int = 1
    is_pipelined: bool = False
    recomputes: bool = False
    is_off_chip: bool = False
    num_shards: int = 1
    least_off_chip: int = LEAST_OFF_CHIP
    least_sharded: int = LEAST_SHARDED


@dataclass(frozen=True)
class IPUMemory:
    """Bytes that training takes on one IPU.

    Attributes:
        ipu: Number of the IPU in a replica.
        stages: Stages of the pipeline that are on it.
        parameters: Bytes of parameters. Exact.
        buffers: Bytes of buffers, such as running statistics. Exact.
        optimizer_state: Bytes of the optimiser's state on the chip. Exact.
        accumulators: Bytes of the sums of gradients, where an update has several
            micro-batches. Exact.
        gradients: Bytes of gradients: at least the largest alone, at most all at once.
        activations: Bytes of activations that are held for the backward pass. Expected
            are those that torch saves; at least the inputs of the stage are held, and
            at most all tensors that its operators make.
        capacity: Bytes of the IPU's memory.
    """

    ipu: int
    stages: tuple[int, ...]
    parameters: int
    buffers: int
    optimizer_state: int
    accumulators: int
    gradients: Estimate
    activations: Estimate
    capacity: int

    @property
    def exact(self) -> int:
        """Bytes that are counted exactly."""
        return self.parameters + self.buffers + self.optimizer_state + self.accumulators

    @property
    def total(self) -> Estimate:
        """All that is counted."""
        exact = Estimate(self.exact, self.exact, self.exact)
        return exact.plus(self.gradients).plus(self.activations)

    @property
    def share(self) -> float:
        """Share of the memory that is expected to be taken; code comes on top."""
        return self.total.value / self.capacity


def memory_by_ipu(
    stages: Sequence[StageCost], settings: MemorySettings, capacity: int
) -> tuple[IPUMemory, ...]:
    """Add up what training takes on each IPU of a replica.

    Args:
        stages: All stages of the model.
        settings: The settings.
        capacity: Bytes of an IPU's memory.

    Returns:
        The IPUs that have a stage, in order.

    Example:
        >>> from ipufit.planning.stage_cost import WeightCost
        >>> weight = WeightCost("w", 6, 24, (StateCost(6, 24),), 24, 24)
        >>> stage = StageCost(0, 0, weights=(weight,))
        >>> memory_by_ipu([stage], MemorySettings(4), 1000)[0].exact
        72
    """
    last = max(stage.stage for stage in stages)
    memories: dict[int, IPUMemory] = {}
    for stage in stages:
        mine = _of_stage(stage, last, settings, capacity)
        before = memories.get(stage.ipu)
        memories[stage.ipu] = mine if before is None else _joined(before, mine)
    return tuple(memories[ipu] for ipu in sorted(memories))


def held_micro_batches(stage: int, num_stages: int) -> int:
    """Micro-batches whose activations a stage of a pipeline holds in training.

    They are those between their forward slot and their backward slot: `2 * (S - 1 - i)
    + 1` for stage `i` of `S` (see `PipelineSchedule`).

    Example:
        >>> [held_micro_batches(stage, 3) for stage in range(3)]
        [5, 3, 1]
    """
    return 2 * (num_stages - 1 - stage) + 1


def state_bytes(tensors: Sequence[StateCost], settings: MemorySettings) -> int:
    """Bytes of an optimiser's state that stay on the IPU.

    Args:
        tensors: The state, as if each replica had all of it.
        settings: Where the state is kept.

    Example:
        >>> moments = [StateCost(10_000, 40_000), StateCost(100, 400)]
        >>> state_bytes(moments, MemorySettings(num_shards=4))
        10400
    """
    total = 0
    for tensor in tensors:
        if settings.is_off_chip and tensor.num_elements >= settings.least_off_chip:
            continue
        is_shared = tensor.num_elements >= settings.least_sharded
        shards = settings.num_shards if is_shared else 1
        each = -(-tensor.num_elements // shards)
        total += tensor.num_bytes // max(1, tensor.num_elements) * each
    return total


def _of_stage(
    stage: StageCost, last: int, settings: MemorySettings, capacity: int
) -> IPUMemory:
    is_summed = settings.gradient_accumulation > 1
    sizes = [weight.gradient_bytes for weight in stage.weights]
    largest, together = max(sizes, default=0), sum(sizes)
    return IPUMemory(
        ipu=stage.ipu,
        stages=(stage.stage,),
        parameters=stage.parameter_bytes,
        buffers=stage.buffer_bytes,
        optimizer_state=sum(state_bytes(w.state, settings) for w in stage.weights),
        accumulators=is_summed * sum(w.accumulator_bytes for w in stage.weights),
        gradients=Estimate(largest if is_summed else together, largest, together),
        activations=_activations(stage, last, settings),
        capacity=capacity,
    )


def _activations(stage: StageCost, last: int, settings: MemorySettings) -> Estimate:
    held = 1
    if settings.is_pipelined:
        held = held_micro_batches(stage.stage, last + 1)
    made = max(stage.made_bytes, stage.saved_bytes)
    saved = stage.saved_bytes
    others = stage.saved_bytes  # bytes of each micro-batch that waits for its turn
    most_of_others = made
    if settings.recomputes and (settings.is_pipelined or stage.num_kept):
        others = most_of_others = stage.kept_bytes
        parts = stage.num_kept + 1
        between = max(0, saved - others)
        saved = min(saved, others + -(-between // parts))
    least = held * min(stage.input_bytes, saved)
    value = (held - 1) * others + saved
    return Estimate(
        max(value, least), least, max(value, (held - 1) * most_of_others + made)
    )


def _joined(one: IPUMemory, other: IPUMemory) -> IPUMemory:
    return IPUMemory(
        ipu=one.ipu,
        stages=one.stages + other.stages,
        parameters=one.parameters + other.parameters,
        buffers=one.buffers + other.buffers,
        optimizer_state=one.optimizer_state + other.optimizer_state,
        accumulators=one.accumulators + other.accumulators,
        gradients=one.gradients.plus(other.gradients),
        activations=one.activations.plus(other.activations),
        capacity=one.capacity,
    )
