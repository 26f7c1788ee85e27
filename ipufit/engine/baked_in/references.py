# SPDX-License-Identifier: Apache-2.0
"""Places that hold objects, compared before every call: in loops of C."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, repeat
from operator import is_
from typing import Any, Iterable, Sequence, Tuple

MISSING: Any = object()
"""What a place gives that holds nothing."""

Place = Tuple[Any, Any, Any]
"""An owner, a key or the name of an attribute, and the value."""


class Places:
    """Items, attributes and containers, and the objects that they held.

    Args:
        items: Mappings, keys in them, and values; `MISSING` where there is no key.
        attributes: Objects, names of attributes, and values.
        contents: Containers that count as a whole, and what is in them.

    Example:
        >>> settings = {"k": 1.0}
        >>> places = Places([(settings, "k", settings["k"])], [], [])
        >>> places.are_unmoved()
        True
        >>> settings["k"] = 2.0
        >>> places.are_unmoved()
        False
    """

    def __init__(
        self,
        items: Iterable[Place],
        attributes: Sequence[Place],
        contents: Sequence[tuple[Any, tuple[Any, ...]]],
    ) -> None:
        in_dicts: list[Place] = []
        self._others: list[Place] = []  # with a `get` of their own
        for item in items:
            is_dict = type(item[0]) in (dict, OrderedDict)
            (in_dicts if is_dict else self._others).append(item)
        self._dicts, self._keys, self._values = _columns(in_dicts)
        self._owners, self._names, self._attributes = _columns(attributes)
        self._containers = [container for container, _ in contents]
        self._lengths = [len(elements) for _, elements in contents]
        self._elements = [one for _, elements in contents for one in elements]

    def are_unmoved(self) -> bool:
        """Whether every place holds the object that it held."""
        items = map(dict.get, self._dicts, self._keys, repeat(MISSING))
        attributes = map(getattr, self._owners, self._names, repeat(MISSING))
        elements = chain.from_iterable(self._containers)
        return (
            all(map(is_, items, self._values))
            and all(map(is_, attributes, self._attributes))
            and list(map(len, self._containers)) == self._lengths
            and all(map(is_, elements, self._elements))
            and all(owner.get(key, MISSING) is one for owner, key, one in self._others)
        )


def _columns(places: Sequence[Place]) -> tuple[list[Any], list[Any], list[Any]]:
    return (
        [owner for owner, _, _ in places],
        [key for _, key, _ in places],
        [value for _, _, value in places],
    )
