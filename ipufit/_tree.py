# SPDX-License-Identifier: Apache-2.0
"""Nested tuples, lists and dicts of tensors: flatten, rebuild, map.

Samples, inputs and outputs may nest; loaders and executors pass flat lists. What can
be no tensor, None or a string, is no leaf but a part of the structure: a compiled
model has it baked in, so it must not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Sequence

CONSTANT = "constant"
"""The kind of a structure that is a fixed value: its one key."""


class ConstantChangedError(TypeError):
    """A constant has another value than the one that was baked in."""


@dataclass(frozen=True)
class Structure:
    """The shape of a nesting, without its leaves.

    Example:
        >>> structure = Structure.of({"a": 1, "b": (2, 3)})
        >>> structure.num_leaves
        3
        >>> structure.rebuild([10, 20, 30])
        {'a': 10, 'b': (20, 30)}
    """

    kind: Any
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Structure:
        """How `value` nests: tuples, lists and mappings do, the rest are leaves.

        None and strings are constants of the structure. Mappings become dicts.
        """
        if value is None or isinstance(value, (str, bytes)):
            return cls(CONSTANT, (value,))
        if isinstance(value, (tuple, list)):
            children = tuple(cls.of(element) for element in value)
            return cls(type(value), (), children)
        if isinstance(value, Mapping):
            children = tuple(cls.of(element) for element in value.values())
            return cls(dict, tuple(value), children)
        return _LEAF

    @property
    def num_leaves(self) -> int:
        """How many leaves it holds."""
        if self.kind is None:
            return 1
        return sum(child.num_leaves for child in self.children)

    def paths(self, path: str = "") -> list[str]:
        """What each leaf is called.

        Args:
            path: What the whole is called.

        Example:
            >>> Structure.of(({"a": 1}, 2)).paths("x")
            ["x[0]['a']", 'x[1]']
        """
        if self.kind is None:
            return [path]
        keys = self.keys or range(len(self.children))
        return [
            leaf
            for key, child in zip(keys, self.children)
            for leaf in child.paths(f"{path}[{key!r}]")
        ]

    def flatten(self, value: Any, path: str = "") -> list[Any]:
        """The leaves of `value` in the order of this structure.

        Args:
            value: Nested as this structure.
            path: What messages call it.

        Raises:
            TypeError: `value` nests differently.
            ConstantChangedError: A constant in it is another.
        """
        if self.kind is None:
            return [value]
        if self.kind == CONSTANT:
            self._check_constant(value, path)
            return []
        return [
            leaf
            for key, child, element in zip(
                self.keys or range(len(self.children)),
                self.children,
                self._elements(value),
            )
            for leaf in child.flatten(element, f"{path}[{key!r}]")
        ]

    def _check_constant(self, value: Any, path: str) -> None:
        (expected,) = self.keys
        if type(value) is not type(expected) or value != expected:
            raise ConstantChangedError(f"{path} was {expected!r} and is {value!r} now")

    def _elements(self, value: Any) -> Sequence[Any]:
        if self.kind is dict:
            if not isinstance(value, Mapping) or value.keys() != set(self.keys):
                raise TypeError(f"expected a dict with keys {self.keys}, got {value!r}")
            return [value[key] for key in self.keys]
        if not isinstance(value, (tuple, list)) or len(value) != len(self.children):
            raise TypeError(f"expected {len(self.children)} elements, got {value!r}")
        return value

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """A value of this structure with `leaves` in it."""
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        if self.kind == CONSTANT:
            return self.keys[0]
        elements = [child._rebuild(leaves) for child in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, elements))
        if hasattr(self.kind, "_fields"):  # a namedtuple
            return self.kind(*elements)
        return self.kind(elements)


_LEAF = Structure(None)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `function` applied to each leaf; constants stay.

    Example:
        >>> tree_map(lambda x: x + 1, {"a": (1, 2)})
        {'a': (2, 3)}
    """
    structure = Structure.of(value)
    return structure.rebuild(function(leaf) for leaf in structure.flatten(value))
