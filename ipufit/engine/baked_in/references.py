# SPDX-License-Identifier: Apache-2.0
"""References from objects to objects, compared before every call: in loops of C."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, repeat
from operator import is_
from typing import Any, Iterable, NamedTuple, Sequence

MISSING: Any = object()
"""Target of a reference that leads nowhere."""


class Reference(NamedTuple):
    """A way from one object to another.

    Attributes:
        owner: A mapping, or an object with attributes.
        name: A key of the mapping, or the name of an attribute.
        target: The object that was there.
    """

    owner: Any
    name: Any
    target: Any


class References:
    """References, and the objects that they led to.

    Args:
        items: References by keys of mappings, to `MISSING` where there is no such key.
        attributes: References by attributes of objects.
        contents: Containers that count as a whole, and the objects in them.

    Example:
        >>> settings = {"k": 1.0}
        >>> references = References([Reference(settings, "k", settings["k"])], [], [])
        >>> references.are_unmoved()
        True
        >>> settings["k"] = 2.0
        >>> references.are_unmoved()
        False
    """

    def __init__(
        self,
        items: Iterable[Reference],
        attributes: Sequence[Reference],
        contents: Sequence[tuple[Any, tuple[Any, ...]]],
    ) -> None:
        in_dicts: list[Reference] = []
        self._others: list[Reference] = []  # mappings with a `get` of their own
        for item in items:
            is_dict = type(item.owner) in (dict, OrderedDict)
            (in_dicts if is_dict else self._others).append(item)
        self._dicts, self._keys, self._values = _columns(in_dicts)
        self._owners, self._names, self._attributes = _columns(attributes)
        self._containers = [container for container, _ in contents]
        self._lengths = [len(elements) for _, elements in contents]
        self._elements = [one for _, elements in contents for one in elements]

    def are_unmoved(self) -> bool:
        """Whether every reference leads to the object that it led to."""
        items = map(dict.get, self._dicts, self._keys, repeat(MISSING))
        attributes = map(getattr, self._owners, self._names, repeat(MISSING))
        elements = chain.from_iterable(self._containers)
        return (
            all(map(is_, items, self._values))
            and all(map(is_, attributes, self._attributes))
            and list(map(len, self._containers)) == self._lengths
            and all(map(is_, elements, self._elements))
            and all(get_item(owner, key) is one for owner, key, one in self._others)
        )


def get_item(mapping: Any, key: Any) -> Any:
    """The value of a key of a mapping, or `MISSING`.

    A class of dicts may have a `get` with other arguments.

    Example:
        >>> get_item({"k": 1.0}, "k")
        1.0
    """
    get = dict.get if isinstance(mapping, dict) else type(mapping).get
    return get(mapping, key, MISSING)


def _columns(
    references: Sequence[Reference],
) -> tuple[list[Any], list[Any], list[Any]]:
    return (
        [reference.owner for reference in references],
        [reference.name for reference in references],
        [reference.target for reference in references],
    )
