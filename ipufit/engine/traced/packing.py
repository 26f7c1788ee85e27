# SPDX-License-Identifier: Apache-2.0
"""Nesting of the flat outputs of a program."""

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
    """Places the tensors that a program returns into outputs as the module nests them.

    Attributes:
        structure: Nesting of the module's outputs.
        leaves: Outputs that are no tensors, which are the same in every call; None for
            a tensor.
        is_tensor: Whether each leaf is a tensor.
        names: Names of the scalars that follow the outputs.
    """

    structure: Structure = NOTHING
    leaves: tuple[Any, ...] = ()
    is_tensor: tuple[bool, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, outputs: Any, scalars: Scalars) -> tuple[tuple[Tensor, ...], Packing]:
        """Flatten outputs and scalars; traceable.

        Args:
            outputs: Everything that the module returned.
            scalars: 0-d tensors that it gives besides.

        Raises:
            UnsupportedError: A tensor is hidden in an object.

        Returns:
            The tensors among the outputs, then the scalars, `[1]` each; and the
            packing that gets from such tensors back to outputs and scalars.

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
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        packing = cls(structure, others, is_tensor, tuple(scalars))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return (*tensors, *(value.reshape(1) for value in scalars.values())), packing

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Any, Scalars]:
        """Nest outputs as the module does, beside scalars of `[micro-batches]` each.

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
