# SPDX-License-Identifier: Apache-2.0
"""Divides the blocks of a module into the stages of a pipeline, evenly and exactly.

All stages of a pipeline wait for the slowest one. So the first thing that counts is the
floating-point operations of the slowest stage; then the memory of the fullest IPU, in
whole MiB; then the bytes that cross from stage to stage; then that submodules stay
whole; and then that stages begin early. Each is made as small as it can be without
giving up one before it, by a dynamic programme over all ways to cut. Blocks that share
a weight stay on one IPU.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Callable, NamedTuple, Sequence

from ipufit.errors import ConfigError

from .block_cost import BlockCost
from .stage_cost import imbalance
from .ties import about_ties

MEMORY_STEP = 1 << 20
"""Bytes: less of a difference in memory decides nothing."""

MOST_STAGES = 64
"""Stages that `smallest_split` tries at most: a process has so many IPUs."""


class Split(NamedTuple):
    """The stages that the blocks of a module are divided into.

    Attributes:
        names: Name of the submodule that begins each stage.
        flops: Floating-point operations of each stage, forward, for a micro-batch.
        held_bytes: Bytes that each stage holds all the time.
        crossing_bytes: Bytes that cross to the next stage, after each but the last.

    Example:
        >>> Split(("a", "b"), (10, 30), (0, 0), (8,)).imbalance
        1.5
    """

    names: tuple[str, ...]
    flops: tuple[int, ...]
    held_bytes: tuple[int, ...]
    crossing_bytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Operations of the slowest stage over those of the mean one; 1 if none has."""
        return imbalance(self.flops)


class TooFullError(ConfigError):
    """No way to cut a module has stages that fit in the memory of an IPU."""


def best_split(
    costs: Sequence[BlockCost],
    stages: int,
    held_bytes: Sequence[int] | None = None,
    capacity: int | None = None,
    memory_step: int = MEMORY_STEP,
) -> Split:
    """Find the best way to cut blocks into so many stages.

    Args:
        costs: Costs of the blocks, in their order.
        stages: Number of stages, 1 or more.
        held_bytes: Bytes that each block holds all the time; by default those of its
            parameters and buffers.
        capacity: Bytes that a stage may hold at most; None for any.
        memory_step: Bytes by which memory is told apart.

    Returns:
        The stages. The same costs always give the same.

    Raises:
        ConfigError: There are fewer places to cut.
        TooFullError: Some stage would hold more than that, wherever cuts are.

    Example:
        >>> costs = [BlockCost(name, n) for name, n in zip("abcd", (3, 1, 1, 2))]
        >>> best_split(costs, 2).names
        ('a', 'b')
    """
    parts = _Parts(costs, held_bytes)
    if stages > len(parts):
        raise ConfigError(
            f"ipus={stages}, and the model can't be cut into more stages than "
            f"{len(parts)}. A stage begins where a submodule is called that is called "
            "once. Use fewer IPUs, or name blocks of your own in pipeline=(...). "
            f"{about_ties(costs)}".rstrip()
        )
    capacity = sum(parts.held) if capacity is None else capacity
    least_held = _least_maximum(stages, parts.held, lambda i, j: True)
    if least_held > capacity:
        raise TooFullError(_too_full(parts, stages, least_held, capacity, costs))
    held = parts.between(parts.held)
    slowest = _least_maximum(stages, parts.flops, lambda i, j: held(i, j) <= capacity)
    flops = parts.between(parts.flops)
    fullest = _least_maximum(stages, parts.held, lambda i, j: flops(i, j) <= slowest)
    most_held = min(capacity, -(-fullest // memory_step) * memory_step)
    cuts = _cheapest_cuts(
        stages,
        [(0, 0), *zip(parts.crossing, parts.depths[1:])],
        lambda i, j: flops(i, j) <= slowest and held(i, j) <= most_held,
    )
    ends = [*cuts[1:], len(parts)]
    return Split(
        tuple(parts.names[cut] for cut in cuts),
        tuple(flops(i, j) for i, j in zip(cuts, ends)),
        tuple(held(i, j) for i, j in zip(cuts, ends)),
        tuple(parts.crossing[end - 1] for end in ends[:-1]),
    )


def _too_full(
    parts: _Parts,
    stages: int,
    least_held: int,
    capacity: int,
    costs: Sequence[BlockCost],
) -> str:
    """Say that some stage would hold more than an IPU has, and what would help."""
    kinds = "parameters, optimiser state and accumulators"
    largest = max(parts.held)
    if largest > capacity:
        name = parts.names[parts.held.index(largest)]
        what = (
            f"What begins with {name!r} can't be cut, and holds {largest:,} bytes of "
            f"{kinds}. An IPU has {capacity:,}: more IPUs don't help. Divide it into "
            "submodules that are called one after the other, or use "
        )
    else:
        what = (
            f"ipus={stages}, and the fullest of them would hold {least_held:,} bytes "
            f"of {kinds}, wherever the model is cut. An IPU has {capacity:,}. Use more "
            "IPUs, "
        )
    return (
        f"{what}offload_optimizer=True, shard_optimizer=True with several replicas, or "
        f"precision='16.16'. {about_ties(costs)}"
    ).rstrip()


def refuse_idle_stages(costs: Sequence[BlockCost], stages: int) -> None:
    """Refuse to cut where one stage would have everything, and the others nothing.

    Args:
        costs: Costs of the blocks, in their order.
        stages: Number of stages.

    Raises:
        ConfigError: Only one of the parts between cuts has weights or operations.

    Example:
        >>> refuse_idle_stages([BlockCost("linear", 8, ("w",)), BlockCost("relu")], 2)
        Traceback (most recent call last):
        ...
        ipufit.errors.ConfigError: ipus=2, and all weights and operations ...
    """
    if stages > 1 and sum(_Parts(costs, None).are_busy) == 1:
        raise ConfigError(
            f"ipus={stages}, and all weights and operations of the model stay on one "
            "IPU, wherever it is cut. A stage begins where a submodule is called that "
            "is called once. Use ipus=1, or name blocks of your own in pipeline=(...). "
            f"{about_ties(costs)}".rstrip()
        )


def smallest_split(
    costs: Sequence[BlockCost], held_bytes: Sequence[int], capacity: int
) -> Split:
    """Find the best split over the fewest IPUs whose stages fit, a power of two.

    Args:
        costs: Costs of the blocks, in their order.
        held_bytes: Bytes that each block holds all the time.
        capacity: Bytes that an IPU has.

    Raises:
        TooFullError: Stages fit on no number of IPUs.

    Example:
        >>> costs = [BlockCost(name, 1) for name in "abcd"]
        >>> smallest_split(costs, [5, 5, 5, 5], capacity=10).names
        ('a', 'c')
    """
    stages = 1
    while True:
        try:
            return best_split(costs, stages, held_bytes, capacity)
        except TooFullError:
            stages *= 2
            if stages > min(MOST_STAGES, len(_Parts(costs, held_bytes))):
                raise


class _Parts:
    """The blocks that stages are made of, joined where no cut may be.

    Attributes:
        names: Name of the first block of each part.
        flops: Their floating-point operations.
        held: Bytes that they hold.
        crossing: Bytes that cross after each.
        are_busy: Whether each has weights or operations.
    """

    def __init__(
        self, costs: Sequence[BlockCost], held_bytes: Sequence[int] | None
    ) -> None:
        if held_bytes is None:
            held_bytes = [cost.parameter_bytes + cost.buffer_bytes for cost in costs]
        until: dict[str, int] = {}
        for index, cost in enumerate(costs):
            until.update(dict.fromkeys(cost.weights, index))
        self.names: list[str] = []
        self.flops: list[int] = []
        self.held: list[int] = []
        self.crossing: list[int] = []
        self.are_busy: list[bool] = []
        last = -1  # block that the part goes to at least
        for index, (cost, held) in enumerate(zip(costs, held_bytes)):
            if index > last:
                self.names.append(cost.name)
                for numbers in (self.flops, self.held, self.crossing):
                    numbers.append(0)
                self.are_busy.append(False)
            self.flops[-1] += cost.flops
            self.held[-1] += held
            self.crossing[-1] = cost.output_bytes
            self.are_busy[-1] |= bool(cost.flops or cost.weights)
            last = max([index, last, *(until[name] for name in cost.weights)])

    def __len__(self) -> int:
        return len(self.names)

    @property
    def depths(self) -> list[int]:
        """Number of submodules that a cut before each would be inside of."""
        return [name.count(".") for name in self.names]

    @staticmethod
    def between(numbers: Sequence[int]) -> Callable[[int, int], int]:
        """A function of two places that sums the numbers between them."""
        sums = [0, *accumulate(numbers)]
        return lambda i, j: sums[j] - sums[i]


def _least_maximum(
    stages: int, numbers: Sequence[int], may_be: Callable[[int, int], bool]
) -> int:
    """The least that the largest sum of a stage can be.

    Args:
        stages: Number of stages.
        numbers: Numbers of 0 or more, one for each part.
        may_be: Whether a stage may have the parts from `i` to before `j`; all stages
            within one that may be must be possible, too.
    """
    count, between = len(numbers), _Parts.between(numbers)
    too_much = sum(numbers) + 1
    best = [0] + [too_much] * count  # for the first parts, in so many stages as yet
    for stage in range(1, stages + 1):
        now = [too_much] * (count + 1)
        for j in range(stage, count - (stages - stage) + 1):
            for i in range(j - 1, stage - 2, -1):
                own = between(i, j)
                if own >= now[j] or not may_be(i, j):
                    break  # a longer stage has no less
                now[j] = min(now[j], max(own, best[i]))
        best = now
    return best[count]


def _cheapest_cuts(
    stages: int,
    prices: Sequence[tuple[int, int]],
    may_be: Callable[[int, int], bool],
) -> list[int]:
    """The first cuts among those with the lowest sums of prices.

    Args:
        stages: Number of stages.
        prices: Two prices of a cut before each part; the first counts before the other.
        may_be: As for `_least_maximum`; there is a way to cut into such stages.

    Returns:
        The first part of each stage.
    """
    count, too_much = len(prices), (float("inf"), 0.0)

    @functools.lru_cache(maxsize=None)
    def best(i: int, left: int) -> tuple[tuple[float, float], int]:
        """Price of the cuts after part `i`, where a stage begins, and its end."""
        if left == 1:
            return ((0, 0) if may_be(i, count) else too_much), count
        found = too_much, count
        for j in range(i + 1, count - left + 2):
            if not may_be(i, j):
                break
            later = best(j, left - 1)[0]
            price = prices[j][0] + later[0], prices[j][1] + later[1]
            found = min(found, (price, j))
        return found

    cuts = [0]
    for left in range(stages, 1, -1):
        cuts.append(best(cuts[-1], left)[1])
    return cuts
