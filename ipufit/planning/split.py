# SPDX-License-Identifier: Apache-2.0
"""Divide the blocks of a module into the stages of a pipeline, as evenly as possible.

All stages of a pipeline wait for the slowest one. So a split minimizes, in this order:
the floating-point operations of the slowest stage; the memory of the fullest IPU, in
whole MiB; the bytes that pass from stage to stage; the number of submodules that are
cut; and the position of the cuts. Dynamic programming over all splits finds the
minimum. Blocks that share a weight stay on one IPU.
"""

from __future__ import annotations

import functools
import math
from itertools import accumulate
from typing import Callable, Iterable, NamedTuple, Sequence

from ipufit.batching import MOST_IPUS
from ipufit.errors import ConfigError

from .memory import imbalance

MEMORY_STEP = 1 << 20
"""Bytes: smaller differences in memory are ignored."""

_MOST_TIES = 2  # that a message explains


class BlockCost(NamedTuple):
    """The costs of one micro-batch in a block: from a submodule's call to the next's.

    The blocks of a module are in the order in which `forward` runs them, and cover all
    of it. A stage of a pipeline may begin where a block begins.

    Attributes:
        name: Name of the submodule whose call begins the block. The first block begins
            with the module. "" if the module has no submodule at which a stage may
            begin; then the module is one block.
        flops: Floating-point operations of the forward pass; a multiplication and an
            addition are two. Matrix products, convolutions, attention and recurrent
            layers are counted; activations, normalization, pooling and the rest aren't.
        weights: Names of the parameters that the block uses, including those that an
            earlier block uses.
        held_bytes: Bytes that the block holds permanently: parameters, buffers,
            optimizer states and accumulators that no earlier block uses.
        output_bytes: Bytes of all activations, skip connections included, that this
            block or an earlier block computes and a later block uses. They pass to the
            next IPU if a stage begins after this block.
        uncounted: Operators with much work that have no formula here; `flops` leaves
            them out.

    Example:
        >>> BlockCost("head", flops=2_000, held_bytes=10).flops
        2000
    """

    name: str
    flops: int = 0
    weights: tuple[str, ...] = ()
    held_bytes: int = 0
    output_bytes: int = 0
    uncounted: tuple[str, ...] = ()


class Split(NamedTuple):
    """The stages that a module is divided into.

    Attributes:
        names: Name of the submodule that begins each stage.
        flops: Floating-point operations of each stage's forward pass, for a micro-
            batch.
        held_bytes: Bytes that each stage holds permanently.
        crossing_bytes: Bytes that each stage, except the last, sends to the next stage.

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
        """Operations of the slowest stage divided by the mean; 1 without any."""
        return imbalance(self.flops)


class TooFullError(ConfigError):
    """Raised if no split of a module fits into the memory of the IPUs."""


def best_split(
    costs: Sequence[BlockCost],
    stages: int,
    capacity: int | None = None,
    memory_step: int = MEMORY_STEP,
) -> Split:
    """Find the best split of blocks into a number of stages.

    Args:
        costs: Costs of the blocks, in their order.
        stages: Number of stages, 1 or more.
        capacity: Bytes that a stage may hold at most; None for any.
        memory_step: Granularity in which memory is compared, in bytes.

    Returns:
        The stages; equal for equal costs.

    Raises:
        ConfigError: There are too few places to cut.
        TooFullError: In every split some stage would hold more than `capacity`.

    Example:
        >>> costs = [BlockCost(name, n) for name, n in zip("abcd", (3, 1, 1, 2))]
        >>> best_split(costs, 2).names
        ('a', 'b')
    """
    parts = _parts(costs)
    if stages > len(parts):
        raise ConfigError(
            f"ipus={stages}, and the model can't be cut into more stages than "
            f"{len(parts)}. A stage begins where a submodule is called that is called "
            "once. Use fewer IPUs, or name blocks of your own in pipeline=(...). "
            f"{_about_ties(costs)}".rstrip()
        )
    count = len(parts)
    flops = _sums(part.flops for part in parts)
    held = _sums(part.held_bytes for part in parts)
    most_held = held(0, count) if capacity is None else capacity
    least_held = _least_maximum(stages, count, held)
    if least_held > most_held:
        raise TooFullError(_too_full(parts, stages, least_held, most_held, costs))
    slowest = _least_maximum(stages, count, flops, lambda i, j: held(i, j) <= most_held)
    fullest = _least_maximum(stages, count, held, lambda i, j: flops(i, j) <= slowest)
    most_held = min(most_held, -(-fullest // memory_step) * memory_step)
    cuts = _cheapest_cuts(
        stages, parts, lambda i, j: flops(i, j) <= slowest and held(i, j) <= most_held
    )
    ends = [*cuts[1:], len(parts)]
    return Split(
        tuple(parts[cut].name for cut in cuts),
        tuple(map(flops, cuts, ends)),
        tuple(map(held, cuts, ends)),
        tuple(parts[end - 1].output_bytes for end in ends[:-1]),
    )


def smallest_split(costs: Sequence[BlockCost], capacity: int) -> Split:
    """Find the best split over the fewest IPUs that fits, a power of two.

    Args:
        costs: Costs of the blocks, in their order.
        capacity: Bytes of an IPU's memory.

    Raises:
        TooFullError: No number of IPUs has a split that fits.

    Example:
        >>> costs = [BlockCost(name, 1, held_bytes=5) for name in "abcd"]
        >>> smallest_split(costs, capacity=10).names
        ('a', 'c')
    """
    stages = 1
    while True:
        try:
            return best_split(costs, stages, capacity)
        except TooFullError:
            stages *= 2
            if stages > min(MOST_IPUS, len(_parts(costs))):
                raise


def refuse_idle_stages(costs: Sequence[BlockCost], stages: int) -> None:
    """Refuse a split with one stage that has all weights and operations.

    Raises:
        ConfigError: Only one of the parts between cuts has weights or operations.

    Example:
        >>> refuse_idle_stages([BlockCost("linear", 8, ("w",)), BlockCost("relu")], 2)
        Traceback (most recent call last):
        ...
        ipufit.errors.ConfigError: ipus=2, and all weights and operations ...
    """
    if stages > 1 and sum(bool(p.flops or p.weights) for p in _parts(costs)) == 1:
        raise ConfigError(
            f"ipus={stages}, and all weights and operations of the model stay on one "
            "IPU, wherever it is cut. A stage begins where a submodule is called that "
            "is called once. Use ipus=1, or name blocks of your own in pipeline=(...). "
            f"{_about_ties(costs)}".rstrip()
        )


def _parts(costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Join consecutive blocks that must stay in one stage: they share weights."""
    last_use = {name: i for i, cost in enumerate(costs) for name in cost.weights}
    parts: list[BlockCost] = []
    end = -1  # the last block that the part goes to at least
    for index, cost in enumerate(costs):
        if index <= end:
            before = parts.pop()
            parts.append(
                before._replace(
                    flops=before.flops + cost.flops,
                    weights=before.weights + cost.weights,
                    held_bytes=before.held_bytes + cost.held_bytes,
                    output_bytes=cost.output_bytes,
                )
            )
        else:
            parts.append(cost)
        end = max([end, *(last_use[name] for name in cost.weights)])
    return parts


_Sums = Callable[[int, int], int]
"""Returns the sum of a number over the parts from index `i` to before `j`."""


def _sums(numbers: Iterable[int]) -> _Sums:
    sums = [0, *accumulate(numbers)]
    return lambda i, j: sums[j] - sums[i]


def _least_maximum(
    stages: int,
    count: int,
    sums: _Sums,
    may_be: Callable[[int, int], bool] = lambda i, j: True,
) -> int:
    """Minimize the largest sum of a stage, by bisection.

    Args:
        stages: Number of stages.
        count: Number of parts.
        sums: Sums of a number of the parts.
        may_be: Returns whether a stage may consist of the parts from `i` to before `j`.
            If so, every shorter stage inside it is allowed, too.
    """

    def needed(most: int) -> int:
        """Count stages that are as long as `most` allows."""
        used, begin = 1, 0
        for end in range(1, count + 1):
            if sums(begin, end) > most or not may_be(begin, end):
                used, begin = used + 1, end - 1
        return used

    low = max(sums(i, i + 1) for i in range(count))
    high = sums(0, count)
    while low < high:
        middle = (low + high) // 2
        if needed(middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _cheapest_cuts(
    stages: int, parts: Sequence[BlockCost], may_be: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Return the index of each stage's first part.

    The cuts minimize the bytes that pass between stages, then the number of submodules
    that are cut, then the positions.
    """
    infinite = math.inf, math.inf

    @functools.lru_cache(maxsize=None)
    def best(i: int, left: int) -> tuple[tuple[float, float], tuple[int, ...]]:
        """Return price and positions of the cheapest cuts from part `i` on."""
        if left == 1:
            return (0, 0) if may_be(i, len(parts)) else infinite, ()
        found: tuple[tuple[float, float], tuple[int, ...]] = infinite, ()
        for j in range(i + 1, len(parts) - left + 2):
            if not may_be(i, j):
                break
            (crossing, depth), later = best(j, left - 1)
            crossing += parts[j - 1].output_bytes
            depth += parts[j].name.count(".")  # submodules that the cut is inside of
            found = min(found, ((crossing, depth), (j, *later)))
        return found

    return (0, *best(0, stages)[1])


def _too_full(
    parts: Sequence[BlockCost],
    stages: int,
    least_held: int,
    capacity: int,
    costs: Sequence[BlockCost],
) -> str:
    kinds = "parameters, optimizer state and accumulators"
    largest = max(parts, key=lambda part: part.held_bytes)
    if largest.held_bytes > capacity:
        what = (
            f"What begins with {largest.name!r} can't be cut, and holds "
            f"{largest.held_bytes:,} bytes of {kinds}. An IPU has {capacity:,}: more "
            "IPUs don't help. Divide it into submodules that are called one after the "
            "other, or use "
        )
    else:
        what = (
            f"ipus={stages}, and the fullest of them would hold {least_held:,} bytes "
            f"of {kinds}, wherever the model is cut. An IPU has {capacity:,}. Use more "
            "IPUs, "
        )
    return (
        f"{what}offload_optimizer=True, shard_optimizer=True with several replicas, or "
        f"precision='16.16'. {_about_ties(costs)}"
    ).rstrip()


def _about_ties(costs: Sequence[BlockCost]) -> str:
    """Explain which shared weights forbid which cuts, most forbidden cuts first.

    A weight is left out if earlier ones in the text forbid all its cuts.
    """
    users: dict[str, list[int]] = {}
    for index, cost in enumerate(costs):
        for weight in cost.weights:
            users.setdefault(weight, []).append(index)
    explained: set[int] = set()
    clauses, advice = [], ""
    for weight, by in sorted(users.items(), key=lambda item: item[1][0] - item[1][-1]):
        cuts = range(by[0] + 1, by[-1] + 1)
        if explained.issuperset(cuts):
            continue
        explained.update(cuts)
        first, begin, last = (costs[index].name for index in (by[0], cuts[0], by[-1]))
        more = f", {len(by) - 2} more" if len(by) > 2 else ""
        where = f"at {last}" if begin == last else f"from {begin} to {last}"
        clauses.append(
            f"{weight} is used by {first}{more} and {last}: no stage may begin {where}"
        )
        advice = advice or (
            "Give each its own weight, or name the stages in pipeline=(...)."
            if begin == last  # nothing is between them that another IPU could have
            else f"Give each its own weight, or name the stages, with {last} on the "
            f"IPU of {first}: pipeline=[{first!r}, {begin!r}, "
            f"poptorch.Stage({last!r}).ipu(0)], with a name after {begin!r} for each "
            "further IPU."
        )
    if not clauses:
        return ""
    if len(clauses) > _MOST_TIES:
        left_out = f"{len(clauses) - _MOST_TIES} more weights are used so"
        clauses = [*clauses[:_MOST_TIES], left_out]
    return (
        "Submodules that share a weight stay on one IPU. "
        f"{'; '.join(clauses)}. {advice}"
    )
