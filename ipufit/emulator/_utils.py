# SPDX-License-Identifier: Apache-2.0
"""Flatten and rebuild structures of nested tensors, custom types included."""

from __future__ import annotations

import importlib
import pickle
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .errors import createPoptorchError


class ICustomArgParser(ABC):
    """Parser that lists the tensors of a user's type, and rebuilds it from others.

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
            tensor_iterator: The new tensors, in the order of `yieldTensors`. Take only
                as many as it yields: others may follow. An asynchronous data loader
                also passes empty tensors.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(
    arg_data_type: type, arg_parser: ICustomArgParser | None
) -> None:
    """Register the parser of a user's type; `None` removes it.

    Subclasses of the type use the same parser unless they have their own; an
    asynchronous data loader looks for the exact type only.

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
    """Let `poptorch_geometric` register its parsers, if it is installed.

    PopTorch calls this when it is imported. The emulator leaves the call to users of
    that package, because importing it takes seconds.

    Example:
        >>> registerGeometricCustomArgParsers()
    """
    try:
        types = importlib.import_module("poptorch_geometric.types")
    except ImportError:
        return
    types.registerCustomArgParsers()


def getCustomParser(value: object, *, exact: bool = False) -> ICustomArgParser | None:
    """Return the registered parser for a value, or `None`.

    The parser of the value's own type comes first, then that of the first registered
    type which the value is an instance of.

    Args:
        value: Anything.
        exact: If True, only the value's own type counts.

    Example:
        >>> getCustomParser(3) is None
        True
    """
    parser = _parsers.get(type(value))
    if parser is not None or exact:
        return parser
    for base, parser in _parsers.items():
        if isinstance(value, base):
            return parser
    return None


def pickled_parsers() -> list[bytes]:
    """Pickle each registered parser, for a process that doesn't inherit them.

    Types and parsers that can't be pickled are left out: no object of such a type could
    reach the process either.

    Example:
        >>> for parser in pickled_parsers():
        ...     registerCustomArgParser(*pickle.loads(parser))
    """
    pickles = []
    for registration in _parsers.items():
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            pickles.append(pickle.dumps(registration))
    return pickles


def flattenTensorStructure(
    tensors: Any, canonical_structure: Any = None
) -> Iterator[Tensor]:
    """Yield the tensors of a nested structure, depth first.

    Args:
        tensors: Tensors in dicts, lists, tuples and registered custom types, at any
            depth. Everything else is skipped.
        canonical_structure: A structure of the same shape whose dicts give the
            order of keys; without it, each dict's own order.

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
    parser = getCustomParser(tensors)
    if parser is not None:
        yield from parser.yieldTensors(tensors)
    elif isinstance(tensors, (dict, list, tuple)):
        order = tensors if canonical_structure is None else canonical_structure
        for key in order if isinstance(tensors, dict) else range(len(tensors)):
            child = None if canonical_structure is None else canonical_structure[key]
            yield from flattenTensorStructure(tensors[key], child)


def reconstructTensorStructure(
    structure: Any,
    values: Iterable[Any],
    filter_fn: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Tensor),
) -> Any:
    """Rebuild a structure with other values in place of its tensors.

    Containers keep their class: named tuples are built from positions, other lists
    and tuples from one iterable, dicts and their subclasses from one dict, custom
    types by their parser. Other leaves stay as they are.

    Args:
        structure: A structure that `flattenTensorStructure` takes.
        values: The new values in the order of that function. Only as many as are
            needed are taken.
        filter_fn: Returns True for a leaf to replace, by default a tensor. It isn't
            asked about leaves of custom types that are no tensors.

    Raises:
        Error: If there are fewer values than leaves to replace.

    Example:
        >>> import torch
        >>> structure = {"x": (torch.tensor(1), "kept")}
        >>> reconstructTensorStructure(structure, [42])
        {'x': (42, 'kept')}
    """
    values = iter(values)  # the same iterator in each part
    if filter_fn(structure):
        for value in values:
            return value
        raise createPoptorchError(
            "There are fewer values than tensors in the structure to rebuild."
        )
    parser = None if isinstance(structure, Tensor) else getCustomParser(structure)
    if parser is not None:
        leaves = [
            reconstructTensorStructure(leaf, values, filter_fn)
            if filter_fn(leaf)
            else leaf
            for leaf in parser.yieldTensors(structure)
        ]
        return parser.reconstruct(structure, iter(leaves))
    if not isinstance(structure, (dict, list, tuple)):
        return structure
    parts = structure.values() if isinstance(structure, dict) else structure
    items = [reconstructTensorStructure(part, values, filter_fn) for part in parts]
    if isinstance(structure, dict):
        return type(structure)(dict(zip(structure, items)))
    is_named = hasattr(structure, "_fields")
    return type(structure)(*items) if is_named else type(structure)(items)


def combine_batch_tensors_gen(tensors: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors of several batches, joined along dimension 0.

    Example:
        >>> batches = [[torch.tensor([1])], [torch.tensor([2, 3])]]
        >>> list(combine_batch_tensors_gen(batches))
        [tensor([1, 2, 3])]
    """
    yield from map(torch.cat, zip(*tensors))
