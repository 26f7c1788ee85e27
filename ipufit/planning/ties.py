# SPDX-License-Identifier: Apache-2.0
"""Weights that several blocks use, and the cuts between blocks that they forbid."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from .block_cost import BlockCost

_MOST_TIES = 2
"""Ties that a message explains at most."""


class Tie(NamedTuple):
    """A weight that several blocks use, which therefore stay on one IPU.

    Attributes:
        weight: Name of the weight.
        users: Names of the blocks that use it, in the order in which they run.
        forbidden: Names of the blocks after the first user, up to the last one: no
            stage may begin there.
    """

    weight: str
    users: tuple[str, ...]
    forbidden: tuple[str, ...]

    def __str__(self) -> str:
        """The tie and its cuts in a clause.

        Example:
            >>> print(Tie("table", ("embedding", "head"), ("layer", "head")))
            table is used by embedding and head: no stage may begin from layer to head
        """
        first, last = self.users[0], self.users[-1]
        more = f", {len(self.users) - 2} more" if len(self.users) > 2 else ""
        begin = self.forbidden[0]
        where = f"at {last}" if begin == last else f"from {begin} to {last}"
        return (
            f"{self.weight} is used by {first}{more} and {last}: no stage may begin "
            f"{where}"
        )


def ties_of(costs: Sequence[BlockCost]) -> tuple[Tie, ...]:
    """Find the ties that forbid cuts.

    Args:
        costs: Costs of the blocks, in their order.

    Returns:
        The ties, the one first that forbids most cuts. A tie is left out if others
        before it forbid all its cuts.

    Example:
        >>> users = BlockCost("a", 1, ("w",)), BlockCost("c", 1, ("w",))
        >>> ties_of([users[0], BlockCost("b"), users[1]])
        (Tie(weight='w', users=('a', 'c'), forbidden=('b', 'c')),)
    """
    users: dict[str, list[int]] = {}
    for index, cost in enumerate(costs):
        for weight in cost.weights:
            users.setdefault(weight, []).append(index)
    widest = sorted(users.items(), key=lambda item: item[1][0] - item[1][-1])
    explained: set[int] = set()
    ties = []
    for weight, by in widest:
        cuts = range(by[0] + 1, by[-1] + 1)
        if explained.issuperset(cuts):
            continue
        explained.update(cuts)
        names = tuple(costs[index].name for index in by)
        ties.append(Tie(weight, names, tuple(costs[cut].name for cut in cuts)))
    return tuple(ties)


def about_ties(costs: Sequence[BlockCost]) -> str:
    """Say which weights forbid which cuts, and what a user can do about that.

    Args:
        costs: Costs of the blocks, in their order.

    Returns:
        Sentences; empty if no weight forbids a cut.

    Example:
        >>> costs = [BlockCost("a", 1, ("w",)), BlockCost("b", 1, ("w",))]
        >>> print(about_ties(costs))
        Submodules that share a weight stay on one IPU. w is used by a and b: no stage
        may begin at b. Give each its own weight, or name the stages in pipeline=(...).
    """
    ties = ties_of(costs)
    if not ties:
        return ""
    clauses = [str(tie) for tie in ties[:_MOST_TIES]]
    if len(ties) > _MOST_TIES:
        clauses.append(f"{len(ties) - _MOST_TIES} more weights are used so")
    return (
        "Submodules that share a weight stay on one IPU. "
        f"{'; '.join(clauses)}. {_way_out_of(ties[0])}"
    )


def _way_out_of(tie: Tie) -> str:
    first, begin, last = tie.users[0], tie.forbidden[0], tie.users[-1]
    if begin == last:  # there is nothing between them that another IPU could have
        return "Give each its own weight, or name the stages in pipeline=(...)."
    return (
        f"Give each its own weight, or name the stages, with {last} on the IPU of "
        f"{first}: pipeline=[{first!r}, {begin!r}, poptorch.Stage({last!r}).ipu(0)], "
        f"with a name after {begin!r} for each further IPU."
    )
