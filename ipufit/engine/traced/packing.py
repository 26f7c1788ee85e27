# SPDX-License-Identifier: Apache-2.0
"""How a program's flat outputs nest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from torch import Tensor

from ipufit._tree import Structure
from ipufit.data import NOTHING
from ipufit.scalars import Scalars

from .hidden_tensors import refuse_hidden


@dataclass(frozen=True)
class Packing:
    """How the tensors that a program returns nest in what the module returned.

    Attributes:
        structure: The nesting of the module's outputs.
        leaves: The outputs that are no tensors, which are the same in every call;
            None in the place of a tensor.
        is_tensor: Whether each leaf is a tensor.
        names: The scalars that follow the outputs.
    """

    structure: Structure = NOTHING
    leaves: tuple[Any, ...] = ()
    is_tensor: tuple[bool, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Any, scalars: Scalars) -> tuple[tuple[Tensor, ...], Packing]:
        """Flatten outputs and scalars; traceable.

        Args:
            outputs: As the module returns them.
            scalars: What it gives besides, 0-d.

        Raises:
            UnsupportedError: A tensor is hidden in an object.

        Returns:
            The tensors among the outputs, then the scalars, `[1]` each; and how to
            get from such tensors back to outputs and scalars.

        Example:
            >>> import torch
            >>> tensors, packing = Packing.of({"a": torch.ones(2), "b": "c"}, {})
            >>> packing.unpack(tensors)
            ({'a': tensor([1., 1.]), 'b': 'c'}, {})
        """
        structure = Structure.of_outputs(outputs)
        leaves = structure.flatten(outputs)
        for leaf, path in zip(leaves, structure.paths("outputs")):
            if not isinstance(leaf, Tensor):
                refuse_hidden(leaf, path)
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        packing = cls(
            structure,
            tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            is_tensor,
            tuple(scalars),
        )
        tensors = [leaf for leaf, is_one in zip(leaves, is_tensor) if is_one]
        return (*tensors, *(value.reshape(1) for value in scalars.values())), packing

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, Scalars]:
        """Outputs as the module returns them, and scalars, `[micro-batches]` each.

        The tensors become plain ones: PopTorch's have an attribute of their own, with
        which they can't be pickled.
        """
        plain = [tensor.detach() for tensor in tensors]
        count = len(plain) - len(self.names)
        given = iter(plain[:count])
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self.is_tensor, self.leaves)
        ]
        return self.structure.rebuild(leaves), dict(zip(self.names, plain[count:]))
