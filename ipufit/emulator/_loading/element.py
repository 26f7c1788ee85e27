# SPDX-License-Identifier: Apache-2.0
"""The structure of a dataset's elements, for the asynchronous accessor."""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple

import torch
from torch import Tensor

from ipufit.emulator._ground.custom_args import custom_arg_parser
from ipufit.emulator.errors import createPoptorchError


class ElementStructure(NamedTuple):
    """The arrangement of an element's tensors; small when pickled.

    Attributes:
        keys: Keys of a dict in the order of the first element; None for other types.
        skeleton: An object of a registered custom type, made of empty tensors.
        is_tensor: Whether the element is a bare tensor.
    """

    keys: tuple[Any, ...] | None
    skeleton: Any
    is_tensor: bool
    num_tensors: int

    @classmethod
    def of(cls, element: Any) -> ElementStructure:
        """Read the structure of a dataset's first element.

        Args:
            element: A tensor, a flat list, tuple or dict of tensors, or an object
                whose exact type has a registered parser.

        Raises:
            Error: If it is of another type, or has a member that isn't a tensor.

        Example:
            >>> ElementStructure.of({"x": torch.ones(2), "y": torch.ones(1)}).keys
            ('x', 'y')
        """
        parser = custom_arg_parser(element, exact=True)
        if parser is not None:
            num_tensors = len(list(parser.yieldTensors(element)))
            empty = iter([torch.empty(0) for _ in range(num_tensors)])
            skeleton = parser.reconstruct(element, empty)
            return cls(None, skeleton, is_tensor=False, num_tensors=num_tensors)
        if isinstance(element, Tensor):
            return cls(None, None, is_tensor=True, num_tensors=1)
        keys = tuple(element) if isinstance(element, dict) else None
        members = element.values() if isinstance(element, dict) else element
        if not isinstance(element, (dict, list, tuple)) or not all(
            isinstance(member, Tensor) for member in members
        ):
            raise createPoptorchError(
                "An element must be a tensor, a flat list, tuple or dict of tensors, "
                f"or of a type with a registered parser; got {_describe(element)}."
            )
        return cls(keys, None, is_tensor=False, num_tensors=len(element))

    def tensors(self, element: Any) -> list[Tensor]:
        """List the detached tensors of an element, in the order of the first one.

        Raises:
            Error: If the element has another structure.

        Example:
            >>> structure = ElementStructure.of([torch.ones(1), torch.ones(2)])
            >>> structure.tensors([torch.tensor(1), torch.tensor(2)])
            [tensor(1), tensor(2)]
        """
        tensors = list(self._members(element))
        if len(tensors) != self.num_tensors or not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):
            raise createPoptorchError(
                f"The first element has {self.num_tensors} tensors, but a later one "
                f"differs: {_describe(element)}."
            )
        return [tensor.detach() for tensor in tensors]

    def _members(self, element: Any) -> Iterable[Any]:
        parser = custom_arg_parser(element, exact=True)
        if parser is not None:
            return parser.yieldTensors(element)
        if self.is_tensor:
            return [element]
        if self.keys is not None:
            return [element[key] for key in self.keys]
        return list(element)

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """Arrange tensors as in the first element.

        Returns:
            A tensor, dict, custom object, or a list for any list or tuple: as
            PopTorch's accessor does.

        Example:
            >>> structure = ElementStructure.of((torch.ones(1), torch.ones(2)))
            >>> structure.rebuild([torch.tensor(1), torch.tensor(2)])
            [tensor(1), tensor(2)]
        """
        if self.skeleton is not None:
            parser = custom_arg_parser(self.skeleton, exact=True)
            if parser is None:
                raise createPoptorchError(
                    f"The parser of {type(self.skeleton).__name__} was unregistered."
                )
            return parser.reconstruct(self.skeleton, iter(tensors))
        if self.is_tensor:
            return tensors[0]
        if self.keys is not None:
            return dict(zip(self.keys, tensors))
        return list(tensors)


def _describe(element: Any) -> str:
    if isinstance(element, dict):
        parts = [f"{key!r}: {type(item).__name__}" for key, item in element.items()]
        return f"dict {{{', '.join(parts)}}}"
    if isinstance(element, (list, tuple)):
        names = ", ".join(type(item).__name__ for item in element)
        return f"{type(element).__name__} ({names})"
    return type(element).__name__
