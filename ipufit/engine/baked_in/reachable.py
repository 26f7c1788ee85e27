# SPDX-License-Identifier: Apache-2.0
"""A picture of all that code can reach, to tell later whether it has changed."""

from __future__ import annotations

from typing import Any, Iterator, Mapping

from .code_walk import ENTRIES, Walk
from .places import Places
from .recorded import NOTHING, Elements, checksum_of, type_of_value, version_of


class Reach:
    """A picture of all that code can reach.

    Args:
        roots: Modules and functions, by what messages call them.

    Attributes:
        is_complete: Whether the walk met none of its bounds.

    Example:
        >>> import torch
        >>> module = torch.nn.Dropout(0.5)
        >>> reach = Reach({"module": module})
        >>> module.p = 0.25
        >>> reach.is_unmoved(), reach.difference(Reach({"module": module}))
        (False, ('module.p', 0.5, 0.25))
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        names, is_open = ENTRIES, False
        while True:  # what is read decides where to look, and there is more code
            walk = Walk(names, is_open)
            walk.go(roots)
            if walk.names == names and walk.is_open == is_open:
                break
            names, is_open = frozenset(walk.names), walk.is_open
        self.is_complete = walk.is_complete
        self._walk = walk
        self._places = Places(walk.items, walk.attributes, walk.contents)

    def is_unmoved(self, *, thoroughly: bool = False) -> bool:
        """Whether every place holds the object that it held.

        Args:
            thoroughly: Whether to compare the contents of constants and large
                containers, too.
        """
        walk = self._walk
        return (
            self._places.are_unmoved()
            and all(type_of_value(at.get(name)) is t for at, name, t in walk.scalars)
            and all(version_of(tensor) == version for tensor, version in walk.versions)
            and all(checksum_of(array) == before for array, before in walk.arrays)
            and not (thoroughly and self._has_other_contents())
        )

    def _has_other_contents(self) -> bool:
        walk = self._walk
        return any(
            checksum_of(constant) != before for constant, before in walk.constants
        ) or any(Elements.of(container) != before for container, before in walk.large)

    def difference(self, now: Reach) -> tuple[str, Any, Any] | None:
        """The first value that differs: its path, what it was and is; None if none."""
        return next(self.differences(now), None)

    def differences(self, now: Reach) -> Iterator[tuple[str, Any, Any]]:
        """All values that differ."""
        before, after = self._walk.values, now._walk.values
        for path in (*before, *(path for path in after if path not in before)):
            was, new = before.get(path, NOTHING), after.get(path, NOTHING)
            if was is not new and not (type(was) is type(new) and _equal(was, new)):
                yield path, was, new


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
