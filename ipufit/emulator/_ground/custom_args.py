# SPDX-License-Identifier: Apache-2.0
"""Nested tensors: taken apart, put together again, and taught about custom types."""

from __future__ import annotations

import importlib
import pickle
from abc import ABC, abstractmethod
from typing import Any, Callable, Iterable, Iterator

from torch import Tensor

from ipufit.emulator.errors import createPoptorchError


class ICustomArgParser(ABC):
    """How the tensors of a user's type are read, and put back.

    Subclass it and hand an instance to `registerCustomArgParser` to use the type as
    an input or output of a model, or as an element of an asynchronous data loader
    (PopTorch user guide, "Custom types").

    Example:
        >>> import torch
        >>> from ipufit.emulator import ICustomArgParser
        >>> class Pair:
        ...     def __init__(self, left, right):
        ...         self.left, self.right = left, right
        >>> class PairParser(ICustomArgParser):
        ...     def yieldTensors(self, struct):
        ...         yield struct.left
        ...         yield struct.right
        ...     def reconstruct(self, original_structure, tensor_iterator):
        ...         return Pair(next(tensor_iterator), next(tensor_iterator))
        >>> pair = Pair(torch.tensor(1), torch.tensor(2))
        >>> [int(tensor) for tensor in PairParser().yieldTensors(pair)]
        [1, 2]
    """

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[Tensor]:
        """Yield the tensors of `struct`, always in the same order."""

    @abstractmethod
    def reconstruct(
        self, original_structure: Any, tensor_iterator: Iterator[Tensor]
    ) -> Any:
        """Build an object like `original_structure` from other tensors.

        Args:
            original_structure: An object of the registered type; don't change it.
            tensor_iterator: As many tensors as `yieldTensors` gave for it, in that
                order. It may go on: take no more than those.

        Returns:
            The new object. An asynchronous data loader also asks for one made of
            empty tensors.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(
    arg_data_type: type, arg_parser: ICustomArgParser | None
) -> None:
    """Say how the tensors inside a type are found; `None` forgets the type.

    Subclasses of the type use the same parser unless they have their own; an
    asynchronous data loader looks for the exact type only.

    Args:
        arg_data_type: The user's type.
        arg_parser: Its parser.

    Raises:
        Error: If `arg_parser` isn't an `ICustomArgParser`.

    Example:
        >>> from ipufit.emulator import registerCustomArgParser
        >>> class Pair: ...
        >>> registerCustomArgParser(Pair, "not a parser")
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': The parser of Pair ...
    """
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, ICustomArgParser):
        raise createPoptorchError(
            f"The parser of {arg_data_type.__name__} must be an instance of a subclass "
            f"of ICustomArgParser, not {arg_parser!r}. To unregister a type pass None."
        )
    _parsers[arg_data_type] = arg_parser


def registerGeometricCustomArgParsers() -> None:
    """Have `poptorch_geometric` register its parsers, if it is installed.

    PopTorch calls this when it is imported. The emulator leaves it to whoever has that
    package, because importing it takes seconds.

    Example:
        >>> registerGeometricCustomArgParsers()
    """
    try:
        types = importlib.import_module("poptorch_geometric.types")
    except ImportError:
        return
    types.registerCustomArgParsers()


def custom_arg_parser(value: object, *, exact: bool = False) -> ICustomArgParser | None:
    """Find the parser for a value.

    Args:
        value: Anything.
        exact: Whether parsers of its base classes don't count.

    Returns:
        The parser of its very type; else of the first registered type it is an
        instance of; else `None`.

    Example:
        >>> custom_arg_parser(3) is None
        True
    """
    parser = _parsers.get(type(value))
    if parser is not None or exact:
        return parser
    return next(
        (found for base, found in _parsers.items() if isinstance(value, base)), None
    )


def pickled_parsers() -> list[bytes]:
    """The registered parsers, for a process that doesn't inherit them.

    Returns:
        One pickle per registration. Those of types or parsers that can't be
        pickled are left out: no element of theirs could cross over either.

    Example:
        >>> register_pickled_parsers(pickled_parsers())
    """
    pickles = []
    for registration in _parsers.items():
        try:
            pickles.append(pickle.dumps(registration))
        except (pickle.PicklingError, AttributeError, TypeError):
            continue
    return pickles


def register_pickled_parsers(pickles: Iterable[bytes]) -> None:
    """Register what `pickled_parsers` collected in another process.

    Args:
        pickles: Its result.

    Example:
        >>> register_pickled_parsers([])
    """
    for pickled in pickles:
        registered_type, parser = pickle.loads(pickled)
        registerCustomArgParser(registered_type, parser)


def flattenTensorStructure(
    tensors: Any, canonical_structure: Any = None
) -> Iterator[Tensor]:
    """Yield the tensors of a nested structure, depth first.

    Args:
        tensors: Tensors in dicts, lists, tuples and registered custom types, at any
            depth. Everything else is skipped.
        canonical_structure: A structure of the same shape whose dicts give the
            order of keys; without it, each dict's own order.

    Yields:
        The tensors.

    Example:
        >>> import torch
        >>> one, two = torch.tensor(1), torch.tensor(2)
        >>> [int(t) for t in flattenTensorStructure({"b": one, "a": ["x", two]})]
        [1, 2]
        >>> order = {"a": [None, None], "b": None}
        >>> nested = {"b": one, "a": ["x", two]}
        >>> [int(t) for t in flattenTensorStructure(nested, order)]
        [2, 1]
    """
    if isinstance(tensors, Tensor):
        yield tensors
        return
    parser = custom_arg_parser(tensors)
    if parser is not None:
        yield from parser.yieldTensors(tensors)
    elif isinstance(tensors, dict):
        ordered = tensors if canonical_structure is None else canonical_structure
        for key in ordered:
            yield from flattenTensorStructure(
                tensors[key], _child(canonical_structure, key)
            )
    elif isinstance(tensors, (list, tuple)):
        for index, element in enumerate(tensors):
            yield from flattenTensorStructure(
                element, _child(canonical_structure, index)
            )


def _child(structure: Any, key: Any) -> Any:
    return None if structure is None else structure[key]


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


def reconstructTensorStructure(
    structure: Any,
    values: Iterable[Any],
    filter_fn: Callable[[Any], bool] = _is_tensor,
) -> Any:
    """Rebuild a structure with other values in place of its tensors.

    Containers keep their class: named tuples are built from positions, other lists
    and tuples from one iterable, dicts and their subclasses from one dict, custom
    types by their parser.

    Args:
        structure: The structure, as `flattenTensorStructure` takes it.
        values: The new values in the order of that function. Only as many as are
            needed are taken.
        filter_fn: Which leaves are replaced: by default the tensors. In custom types
            it sees the tensors only.

    Returns:
        A new structure that holds the other leaves as they are.

    Raises:
        Error: If there are fewer values than leaves to replace.

    Example:
        >>> import torch
        >>> structure = {"x": (torch.tensor(1), "kept")}
        >>> reconstructTensorStructure(structure, [42])
        {'x': (42, 'kept')}
    """
    return _rebuild(structure, iter(values), filter_fn)


def _rebuild(
    structure: Any, values: Iterator[Any], filter_fn: Callable[[Any], bool]
) -> Any:
    if filter_fn(structure):
        return _next_value(values)
    if isinstance(structure, Tensor):
        return structure
    parser = custom_arg_parser(structure)
    if parser is not None:
        leaves = [
            _next_value(values) if filter_fn(tensor) else tensor
            for tensor in parser.yieldTensors(structure)
        ]
        return parser.reconstruct(structure, iter(leaves))
    if isinstance(structure, dict):
        return type(structure)(
            {key: _rebuild(item, values, filter_fn) for key, item in structure.items()}
        )
    if isinstance(structure, (list, tuple)):
        items = [_rebuild(item, values, filter_fn) for item in structure]
        is_named_tuple = hasattr(structure, "_fields")
        return type(structure)(*items) if is_named_tuple else type(structure)(items)
    return structure


_NOTHING = object()


def _next_value(values: Iterator[Any]) -> Any:
    value = next(values, _NOTHING)
    if value is _NOTHING:
        raise createPoptorchError(
            "There are fewer values than tensors in the structure to rebuild."
        )
    return value
