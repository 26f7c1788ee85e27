# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory that training takes on each IPU, before compiling.

Parameters, buffers, the optimizer's state and accumulators are counted exactly.
Gradients and activations are estimated, with bounds. Code, exchange buffers, copies in
other layouts and temporary data of operators aren't counted: only a compilation shows
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

from ipufit._arguments import shown
from ipufit.batching import micro_batches_in_flight
from ipufit.errors import UnknownNameError

LEAST_OFF_CHIP = 2
"""Elements of the smallest tensor that PopART keeps off the chip by default
(`minElementsForOffChip`, `sessionoptions.hpp`)."""

LEAST_SHARDED = 8192
"""Elements of the smallest tensor that PopART divides among replicas by default
(`minElementsForReplicatedTensorSharding`, `sessionoptions.hpp`)."""


# Costs of stages ----------------------------------------------------------------------


class StateCost(NamedTuple):
    """A tensor of the optimizer's state.

    Attributes:
        num_elements: Number of its elements.
        num_bytes: Their size in bytes.
    """

    num_elements: int
    num_bytes: int


class WeightCost(NamedTuple):
    """A parameter on a device.

    Attributes:
        name: Its name in the module.
        num_elements: Number of its elements.
        num_bytes: Their size in bytes.
        state: Tensors that the optimizer keeps for it; empty if it isn't trained.
        accumulator_bytes: Bytes of the accumulated gradients; 0 if an update has one
            micro-batch, or if the state holds them.
        gradient_bytes: Bytes of its gradient; 0 if it isn't trained.
    """

    name: str
    num_elements: int
    num_bytes: int
    state: tuple[StateCost, ...] = ()
    accumulator_bytes: int = 0
    gradient_bytes: int = 0


class StageCost(NamedTuple):
    """The parameters of a stage, and the costs of one micro-batch in it.

    Bytes of activations are those of tensors on a device, where no number has more than
    32 bits. Views of one tensor count as one.

    Attributes:
        stage: Number of the stage, from 0.
        ipu: IPU of the stage in a replica, from 0.
        names: Names of the submodules or blocks at which the stage begins.
        weights: Parameters that no earlier stage uses.
        buffer_bytes: Bytes of the buffers that no earlier stage uses.
        flops: Floating-point operations of the forward pass, in matrix products,
            convolutions and the like.
        input_bytes: Bytes of the tensors that come from the host or other stages.
        saved_bytes: Bytes of the tensors that torch saves for the backward pass.
        kept_bytes: Bytes of the tensors from which activations are recomputed: inputs,
            and outputs of submodules that `recompute` names.
        made_bytes: Bytes of the stage's inputs and of all results of its operators.
        num_kept: Number of the stage's submodules that `recompute` names.
        uncounted: Operators with much work that `flops` leaves out.
    """

    stage: int
    ipu: int
    names: tuple[str, ...] = ()
    weights: tuple[WeightCost, ...] = ()
    buffer_bytes: int = 0
    flops: int = 0
    input_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    made_bytes: int = 0
    num_kept: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Number of elements in the stage's parameters.

        Example:
            >>> StageCost(0, 0, weights=(WeightCost("w", 6, 24),)).num_parameters
            6
        """
        return sum(weight.num_elements for weight in self.weights)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the stage's parameters."""
        return sum(weight.num_bytes for weight in self.weights)


def imbalance(flops: tuple[int, ...]) -> float:
    """Return the work of the slowest stage divided by the mean.

    Args:
        flops: Work of each stage.

    Example:
        >>> imbalance((1, 3))
        1.5
    """
    total = sum(flops)
    return max(flops) * len(flops) / total if total else 1.0


# Kinds of IPUs ----------------------------------------------------------------------


class Device(NamedTuple):
    """The memory and speed of one kind of IPU.

    Attributes:
        name: Name, as used in sentences.
        num_tiles: Tiles, each a processor with memory of its own.
        tile_bytes: Memory of one tile.
        clock_hertz: Nominal clock.
        float16_flops: Nominal peak in float16 with float16 sums, FLOP per second.
        float32_flops: Nominal peak in float32, FLOP per second.
        link_bytes_per_second: Nominal rate of all links to other IPUs together, both
            directions.
        source: Publication of the numbers.

    Example:
        >>> DEVICES["mk2"].num_bytes
        940572672
    """

    name: str
    num_tiles: int
    tile_bytes: int
    clock_hertz: float
    float16_flops: float
    float32_flops: float
    link_bytes_per_second: float
    source: str

    @property
    def num_bytes(self) -> int:
        """Memory of the whole IPU, for code and data together."""
        return self.num_tiles * self.tile_bytes


_PER_TILE = (
    'docs.graphcore.ai, "Memory and Performance Optimisation", out-of-memory page '
    "(638976 bytes per tile)"
)

DEVICES: dict[str, Device] = {
    "mk1": Device(
        name="Mk1 (GC2)",
        num_tiles=1216,
        tile_bytes=256 * 1024,
        clock_hertz=1.6e9,
        float16_flops=124.5e12,
        float32_flops=31.1e12,
        link_bytes_per_second=320e9,
        source="Jia et al., arXiv:1912.03413",
    ),
    "mk2": Device(
        name="Mk2 (GC200)",
        num_tiles=1472,
        tile_bytes=638_976,
        clock_hertz=1.33e9,
        float16_flops=250e12,
        float32_flops=62.5e12,
        link_bytes_per_second=320e9,
        source=_PER_TILE + '; docs.graphcore.ai, "IPU Programmer\'s Guide"',
    ),
    "bow": Device(
        name="Bow",
        num_tiles=1472,
        tile_bytes=638_976,
        clock_hertz=1.85e9,
        float16_flops=350e12,
        float32_flops=87e12,
        link_bytes_per_second=320e9,
        source=_PER_TILE + '; docs.graphcore.ai, "Bow-2000 datasheet" (the float32 '
        "peak is a quarter of the float16 one)",
    ),
}
"""Kinds of IPUs by the names that `model.plan(device=)` takes."""

_OTHER_NAMES = {"gc2": "mk1", "gc200": "mk2", "bow-2000": "bow", "m2000": "mk2"}


def device_named(device: str | Device) -> Device:
    """Return the memory and speed of a kind of IPU.

    Args:
        device: "mk1", "mk2" or "bow", or another name of one of them; or your own
            `Device`, which is returned.

    Raises:
        UnknownNameError: There is no such kind; the nearest name is suggested.

    Example:
        >>> device_named("GC200").name
        'Mk2 (GC200)'
    """
    if isinstance(device, Device):
        return device
    text = device if isinstance(device, str) else shown(device)
    name = _OTHER_NAMES.get(text.lower(), text.lower())
    if name not in DEVICES:
        raise UnknownNameError("kind of IPU", text, DEVICES)
    return DEVICES[name]


# Memory ---------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A number that depends on the compiler, with its bounds.

    Attributes:
        value: The expected number.
        least: The lower bound.
        most: The upper bound, without copies that the compiler makes.
    """

    value: int
    least: int
    most: int


class MemorySettings(NamedTuple):
    """Settings that determine the memory of training.

    Attributes:
        gradient_accumulation: Micro-batches of an update.
        is_pipelined: Whether all stages are busy at once, so that each holds several
            micro-batches.
        recomputes: Whether activations are recomputed for the backward pass.
        is_off_chip: Whether the optimizer's state is kept off the chip.
        num_shards: Number of replicas that share the optimizer's state; 1 if each has
            all of it.
        least_off_chip: Number of elements of the smallest tensor kept off the chip.
        least_sharded: Number of elements of the smallest tensor that is shared.
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
        stages: Stages of the pipeline on this IPU.
        parameters: Bytes of parameters. Exact.
        buffers: Bytes of buffers, such as running statistics. Exact.
        optimizer_state: Bytes of the optimizer's state on the chip. Exact.
        accumulators: Bytes of accumulated gradients; 0 if an update has one micro-
            batch. Exact.
        gradients: Bytes of gradients: at least the largest one, at most all of them.
        activations: Bytes of activations held for the backward pass. The expected value
            counts the tensors that torch saves. The lower bound counts only the inputs
            of the stage, the upper bound all results of its operators.
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
        """Number of bytes that are counted exactly."""
        return self.parameters + self.buffers + self.optimizer_state + self.accumulators

    @property
    def total(self) -> Estimate:
        """All bytes that are counted."""
        return _sum([Estimate(*[self.exact] * 3), self.gradients, self.activations])

    @property
    def share(self) -> float:
        """Expected share of the IPU's memory that data takes; code isn't counted."""
        return self.total.value / self.capacity


def memory_by_ipu(
    stages: Sequence[StageCost], settings: MemorySettings, capacity: int
) -> tuple[IPUMemory, ...]:
    """Return the memory that training takes on each IPU of a replica.

    Args:
        stages: All stages of the model.
        settings: Settings that determine the memory.
        capacity: Bytes of an IPU's memory.

    Returns:
        The IPUs that have a stage, in order.

    Example:
        >>> weight = WeightCost("w", 6, 24, (StateCost(6, 24),), 24, 24)
        >>> stage = StageCost(0, 0, weights=(weight,))
        >>> memory_by_ipu([stage], MemorySettings(4), 1000)[0].exact
        72
    """
    last = max(stage.stage for stage in stages)
    is_summed = settings.gradient_accumulation > 1
    memories = []
    for ipu in sorted({stage.ipu for stage in stages}):
        mine = [stage for stage in stages if stage.ipu == ipu]
        weights = [weight for stage in mine for weight in stage.weights]
        memories.append(
            IPUMemory(
                ipu=ipu,
                stages=tuple(stage.stage for stage in mine),
                parameters=sum(stage.parameter_bytes for stage in mine),
                buffers=sum(stage.buffer_bytes for stage in mine),
                optimizer_state=sum(state_bytes(w.state, settings) for w in weights),
                accumulators=is_summed * sum(w.accumulator_bytes for w in weights),
                gradients=_sum([_gradients(stage, settings) for stage in mine]),
                activations=_sum([_activations(s, last, settings) for s in mine]),
                capacity=capacity,
            )
        )
    return tuple(memories)


def held_micro_batches(stage: int, num_stages: int) -> int:
    """Return how many micro-batches' activations a pipeline stage holds in training.

    A stage holds them from its forward slot to its backward slot: `2 * (S - 1 - i) + 1`
    for stage `i` of `S` (see `PipelineSchedule`).

    Example:
        >>> [held_micro_batches(stage, 3) for stage in range(3)]
        [5, 3, 1]
    """
    return micro_batches_in_flight(num_stages - stage)


def state_bytes(tensors: Sequence[StateCost], settings: MemorySettings) -> int:
    """Return the bytes of an optimizer's state that stay on the IPU.

    Args:
        tensors: The whole state, as a single replica has it.
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


def _sum(estimates: Sequence[Estimate]) -> Estimate:
    return Estimate(*map(sum, zip(*estimates)))


def _gradients(stage: StageCost, settings: MemorySettings) -> Estimate:
    sizes = [weight.gradient_bytes for weight in stage.weights]
    largest, together = max(sizes, default=0), sum(sizes)
    is_summed = settings.gradient_accumulation > 1
    return Estimate(largest if is_summed else together, largest, together)


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
