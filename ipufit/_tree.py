# SPDX-License-Identifier: Apache-2.0
"""Nested tuples, lists, dicts and objects of tensors: flatten, rebuild, map.

Samples, inputs and outputs may nest; loaders and executors pass flat lists. None and
strings are not leaves but parts of the structure: a program has them compiled in, so
they must not change.

Outputs may nest in objects too: data classes, classes of attrs, `SimpleNamespace` and
subclasses of dict are rebuilt as such. Samples are rebuilt from tuples, lists and dicts
only, and batches also from types with a parser of PopTorch's.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator, Sequence

from torch import Tensor

CONSTANT = "constant"
"""Kind of a structure that is a constant; the constant is the only key."""


class ConstantChangedError(TypeError):
    """Raised if a constant of a structure has changed."""


@dataclass(frozen=True)
class Structure:
    """The nesting of a value, without its leaves.

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
    attributes: tuple[str, ...] = ()  # their children follow those of the keys
    template: Any = field(default=None, compare=False, repr=False)
    parser: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, value: Any) -> Structure:
        """Return the structure of a value.

        Tuples, lists and mappings nest, other values are leaves. None and strings are
        constants of the structure. Mappings become dicts.
        """
        return cls._of(value, cls.of)

    @classmethod
    def of_outputs(cls, value: Any) -> Structure:
        """Return the structure of a module's outputs, which may nest in objects too.

        Example:
            >>> from collections import OrderedDict
            >>> outputs = SimpleNamespace(a=1, b=OrderedDict(c=2))
            >>> structure = Structure.of_outputs(outputs)
            >>> structure.paths("outputs")
            ['outputs.a', "outputs.b['c']"]
            >>> structure.rebuild([10, 20])
            namespace(a=10, b=OrderedDict([('c', 20)]))
        """
        if isinstance(value, Tensor):
            return _LEAF
        is_dict = isinstance(value, dict)
        if not (is_dict and type(value) is not dict) and not is_record(value):
            return cls._of(value, cls.of_outputs)
        items = value if is_dict else {}
        names = [
            name
            for name in attribute_names(value)
            if not (name in items and items[name] is getattr(value, name))
        ]
        elements = [*items.values(), *(getattr(value, name) for name in names)]
        children = tuple(cls.of_outputs(element) for element in elements)
        bare = cls(type(value), tuple(items), children, tuple(names), value)
        # With the leaves out of it the template keeps no tensors alive.
        nothing: list[Any] = [None] * len(children)
        return dataclasses.replace(bare, template=bare._refilled(nothing))

    @classmethod
    def of_batch(cls, value: Any, parser_of: Callable[[Any], Any]) -> Structure:
        """Return the structure of a batch, in which types with a parser nest, too.

        Args:
            value: The batch. In a type with a parser all values but tensors are
                constants.
            parser_of: Returns PopTorch's parser for a value; None if there is none.
        """
        parser = parser_of(value)
        if parser is None:
            return cls._of(value, lambda one: cls.of_batch(one, parser_of))
        leaves = (_LEAF,) * len(list(parser.yieldTensors(value)))
        return cls(type(value), (), leaves, template=value, parser=parser)

    @classmethod
    def _of(cls, value: Any, of: Callable[[Any], Structure]) -> Structure:
        if value is None or isinstance(value, (str, bytes)):
            return cls(CONSTANT, (value,))
        if isinstance(value, (tuple, list)):
            return cls(type(value), (), tuple(of(element) for element in value))
        if isinstance(value, Mapping):
            return cls(dict, tuple(value), tuple(of(e) for e in value.values()))
        return _LEAF

    @cached_property
    def num_leaves(self) -> int:
        """Number of leaves."""
        if self.kind is None:
            return 1
        return sum(child.num_leaves for child in self.children)

    def paths(self, path: str = "") -> list[str]:
        """Return the path of each leaf, as Python writes it.

        Args:
            path: Name to begin the paths with, such as `outputs` in `outputs[0]`.

        Example:
            >>> Structure.of(({"a": 1}, 2)).paths("x")
            ["x[0]['a']", 'x[1]']
        """
        if self.kind is None:
            return [path]
        return [
            leaf
            for step, child in zip(self._steps(), self.children)
            for leaf in child.paths(path + step)
        ]

    def _steps(self) -> list[str]:
        """Return the code that accesses each child: `[0]`, `.a`."""
        if self.parser is not None:
            return self._steps_of_template()
        names = [f".{name}" for name in self.attributes]
        keys = self.keys or range(len(self.children) - len(names))
        return [*(f"[{key!r}]" for key in keys), *names]

    def _steps_of_template(self) -> list[str]:
        """Return the attribute of each tensor, or its number without an attribute."""
        own = getattr(self.template, "to_dict", None)  # PyG's; others have attributes
        named = own() if callable(own) else parts_of(self.template)
        of = {id(value): f".{name}" for name, value in named.items()}
        tensors = self.parser.yieldTensors(self.template)
        return [of.get(id(t), f" (tensor {i})") for i, t in enumerate(tensors)]

    def flatten(self, value: Any, path: str = "") -> list[Any]:
        """Return the leaves of `value` in the order of this structure.

        Args:
            value: A value of this structure.
            path: Name of the value in messages.

        Raises:
            TypeError: `value` nests differently.
            ConstantChangedError: A constant has changed.
        """
        if self.kind is None:
            return [value]
        if self.kind == CONSTANT:
            (expected,) = self.keys
            if type(value) is type(expected) and value == expected:
                return []
            raise ConstantChangedError(f"{path} was {expected!r} and is {value!r} now")
        return [
            leaf
            for step, child, element in zip(
                self._steps(), self.children, self._elements(value)
            )
            for leaf in child.flatten(element, path + step)
        ]

    def _elements(self, value: Any) -> Sequence[Any]:
        if self.parser is not None:
            expected, given = self.kind.__name__, type(value)
            if given is not self.kind:
                raise TypeError(f"expected a {expected}, got a {given.__name__}")
            tensors = list(self.parser.yieldTensors(value))
            if len(tensors) != len(self.children):
                counts = f"{len(self.children)} tensors, got {len(tensors)}"
                raise TypeError(f"expected a {expected} of {counts}")
            return tensors
        if self.template is not None:
            if type(value) is not self.kind:
                raise TypeError(f"expected a {self.kind.__name__}, got {value!r}")
            items = [value[key] for key in self.keys]
            return [*items, *(getattr(value, name) for name in self.attributes)]
        if self.kind is dict:
            if not isinstance(value, Mapping) or value.keys() != set(self.keys):
                raise TypeError(f"expected a dict with keys {self.keys}, got {value!r}")
            return [value[key] for key in self.keys]
        if not isinstance(value, (tuple, list)) or len(value) != len(self.children):
            raise TypeError(f"expected {len(self.children)} elements, got {value!r}")
        return value

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a value of this structure with these leaves."""
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        if self.kind is None:
            return next(leaves)
        if self.kind == CONSTANT:
            return self.keys[0]
        if self.parser is not None:
            return self.parser.reconstruct(self.template, leaves)
        elements = [child._rebuild(leaves) for child in self.children]
        if self.template is not None:
            return self._refilled(elements)
        if self.kind is dict:
            return dict(zip(self.keys, elements))
        if hasattr(self.kind, "_fields"):  # a namedtuple
            return self.kind(*elements)
        return self.kind(elements)

    def _refilled(self, elements: Sequence[Any]) -> Any:
        """Copy the template with other elements, without calling its constructor."""
        new = self.kind.__new__(self.kind)
        own = dict(getattr(self.template, "__dict__", {}))
        if isinstance(new, defaultdict):
            new.default_factory = self.template.default_factory
        base: Any = OrderedDict if isinstance(new, OrderedDict) else dict
        for key, element in zip(self.keys, elements):
            base.__setitem__(new, key, element)
            if key in own:  # the same as an attribute
                own[key] = element
        own.update(zip(self.attributes, elements[len(self.keys) :]))
        for name, element in own.items():
            object.__setattr__(new, name, element)
        return new


def is_record(value: Any) -> bool:
    """Return whether a value is of a data class, attrs or `SimpleNamespace`."""
    is_one = is_dataclass(value) or hasattr(type(value), "__attrs_attrs__")
    return (is_one and not isinstance(value, type)) or type(value) is SimpleNamespace


def attribute_names(value: Any) -> list[str]:
    """Return the names of an object's own attributes, with those in slots."""
    names = list(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                names.append(name)
    return names


def parts_of(value: Any) -> dict[Any, Any]:
    """Return the elements of a dict, or the attributes of an object.

    Example:
        >>> parts_of(SimpleNamespace(a=1)), parts_of({"b": 2})
        ({'a': 1}, {'b': 2})
    """
    if isinstance(value, dict):
        return dict(value.items())
    return {name: getattr(value, name) for name in attribute_names(value)}


def without(value: Any, name: Any) -> Any:
    """Copy a dict without an element, or an object with None for an attribute.

    Args:
        value: Dict or object; a subclass of dict may have both an element and an
            attribute of the name.
        name: Name of the element or attribute.

    Example:
        >>> without(SimpleNamespace(a=1, b=2), "b"), without({"a": 1, "b": 2}, "b")
        (namespace(a=1, b=None), {'a': 1})
    """
    items = value if isinstance(value, dict) else {}
    keys = tuple(key for key in items if key != name)
    names = tuple(attribute_names(value))
    left = [None if one == name else getattr(value, one) for one in names]
    like = Structure(type(value), keys, (), names, value)
    return like._refilled([*(items[key] for key in keys), *left])


_LEAF = Structure(None)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of outputs, without constants.

    Example:
        >>> leaves_of({"a": 1, "b": (2, None)})
        [1, 2]
    """
    if isinstance(value, Tensor):
        return [value]
    return Structure.of_outputs(value).flatten(value)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each leaf of outputs; constants stay.

    Example:
        >>> tree_map(lambda x: x + 1, {"a": (1, 2)})
        {'a': (2, 3)}
    """
    if isinstance(value, Tensor):
        return function(value)
    structure = Structure.of_outputs(value)
    return structure.rebuild(function(leaf) for leaf in structure.flatten(value))


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to each tensor of nested values; everything else stays.

    Example:
        >>> import torch
        >>> map_tensors(torch.neg, {"a": (torch.tensor(1), 2)})
        {'a': (tensor(-1), 2)}
    """
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, value)
