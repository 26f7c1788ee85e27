# SPDX-License-Identifier: Apache-2.0
"""The values that code can reach, recorded to tell later whether they have changed."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Mapping

from .code_walk import ENTRIES, Check, CodeWalk
from .records import NOTHING
from .references import References


class ReachableValues:
    """A record of all values that code can reach.

    Args:
        roots: Modules and functions, by their names in messages.

    Attributes:
        is_complete: Whether the walk through the code met none of its bounds.

    Example:
        >>> import torch
        >>> module = torch.nn.Dropout(0.5)
        >>> before = ReachableValues({"module": module})
        >>> module.p = 0.25
        >>> before.are_unmoved(), before.difference(ReachableValues({"module": module}))
        (False, ('module.p', 0.5, 0.25))
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        names, is_open = ENTRIES, False
        while True:  # each name that code reads may lead to more code
            walk = CodeWalk(names, is_open)
            walk.go(roots)
            if walk.names == names and walk.is_open == is_open:
                break
            names, is_open = frozenset(walk.names), walk.is_open
        self.is_complete = walk.is_complete
        self._values = walk.values
        self._checks, self._thorough_checks = walk.checks, walk.thorough_checks
        self._references = References(walk.items, walk.attributes, walk.contents)

    def are_unmoved(self, *, thoroughly: bool = False) -> bool:
        """Whether every object is where it was.

        Args:
            thoroughly: Compare the contents of constants and of large containers too.
        """
        return (
            self._references.are_unmoved()
            and _hold(self._checks)
            and (not thoroughly or _hold(self._thorough_checks))
        )

    def difference(self, now: ReachableValues) -> tuple[str, Any, Any] | None:
        """The first value that differs: its path, before and now; None if none does."""
        return next(self.differences(now), None)

    def differences(self, now: ReachableValues) -> Iterator[tuple[str, Any, Any]]:
        """All values that differ: their paths, before and now."""
        for path in {**self._values, **now._values}:
            was, new = self._values.get(path, NOTHING), now._values.get(path, NOTHING)
            if was is not new and not (type(was) is type(new) and _equal(was, new)):
                yield path, was, new


def _hold(checks: Iterable[Check]) -> bool:
    return all(read(holder) == recorded for read, holder, recorded in checks)


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
