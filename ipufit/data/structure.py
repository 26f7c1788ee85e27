# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a sample nest: inputs, then targets, weights and shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Sequence

from torch import Tensor

from ipufit._tree import ConstantChangedError, Structure
from ipufit.errors import DataError

NOTHING = Structure(tuple)
"""The structure of targets or weights that samples don't have."""


class Labels(NamedTuple):
    """The part of a batch that outputs are compared with.

    Attributes:
        targets: Nested tensors; `()` if the samples have no targets.
        weights: Sample weights: one tensor, or nested as the outputs. None if all
            samples weigh the same.
        share: `[rows]`: how much each row counts in the loss of its update. Padding
            counts 0 and the real rows beside it more than 1, so that the loss stays
            the mean over real rows. None if no row is padding.
    """

    targets: Any = ()
    weights: Any = None
    share: Tensor | None = None


@dataclass(frozen=True)
class SampleStructure:
    """How the inputs, targets and weights of a sample or a batch nest.

    Attributes:
        inputs: Structure of the inputs.
        targets: Structure of the targets; without leaves if there are none.
        weights: Structure of the sample weights; without leaves if there are none.
        is_padded: Whether a batch goes on with one more tensor, the share of each row.
        is_mixed: Whether a batch ends with one more tensor, of which
            `ipufit.mixing.Coefficients` are taken.

    Example:
        >>> structure = SampleStructure(Structure.of({"a": 0}), Structure.of(0))
        >>> structure.split([1, 2])
        ({'a': 1}, Labels(targets=2, weights=None, share=None))
    """

    inputs: Structure
    targets: Structure = NOTHING
    weights: Structure = NOTHING
    is_padded: bool = False
    is_mixed: bool = False

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SampleStructure:
        """The structure of a sample `(inputs,)` or `(inputs, targets[, weights])`."""
        given = [NOTHING if part is None else Structure.of(part) for part in parts]
        inputs, targets, weights = [*given, NOTHING, NOTHING][:3]
        return cls(inputs, targets, weights)

    @property
    def num_inputs(self) -> int:
        """Number of tensors that are inputs; they come first in a batch."""
        return self.inputs.num_leaves

    @property
    def has_targets(self) -> bool:
        """Whether samples come with targets."""
        return self.targets.num_leaves > 0

    @property
    def has_weights(self) -> bool:
        """Whether samples come with weights."""
        return self.weights.num_leaves > 0

    @property
    def parts(self) -> tuple[Structure, Structure, Structure]:
        """Structures of the inputs, the targets and the weights."""
        return self.inputs, self.targets, self.weights

    def padded(self) -> SampleStructure:
        """The same structure, with the share of each row."""
        return replace(self, is_padded=True)

    def split(self, tensors: Sequence[Any]) -> tuple[Any, Labels]:
        """Nested inputs and labels, from the tensors of a batch."""
        return self.inputs.rebuild(tensors[: self.num_inputs]), self.labels(tensors)

    @property
    def num_given(self) -> int:
        """Number of tensors that a sample has: inputs, targets and weights."""
        return sum(part.num_leaves for part in self.parts)

    def batch(self, inputs: Any, tensors: Sequence[Any]) -> Any:
        """A batch as the data has it: inputs, or `(inputs, targets[, weights])`.

        Args:
            inputs: Nested inputs.
            tensors: Tensors of the batch; those of the inputs are passed over.

        Example:
            >>> SampleStructure.of((0, (1, 2))).batch("x", [0, 1, 2])
            ('x', (1, 2))
        """
        if not self.has_targets and not self.has_weights:
            return inputs
        labels = self.labels(tensors)
        parts = (inputs, labels.targets)
        return (*parts, labels.weights) if self.has_weights else parts

    def labels(self, tensors: Sequence[Any]) -> Labels:
        """Nested targets, weights and shares, from the tensors of a batch."""
        rest = iter(tensors[self.num_inputs :])
        targets = self.targets.rebuild(rest)
        weights = self.weights.rebuild(rest) if self.has_weights else None
        return Labels(targets, weights, next(rest) if self.is_padded else None)

    def mixing(self, tensors: Sequence[Any]) -> Any:
        """The tensor that says how samples are mixed, of a batch; None without one."""
        return tensors[-1] if self.is_mixed else None

    def flatten(self, parts: Sequence[Any]) -> list[Any]:
        """The leaves of `(inputs, targets, weights)`; missing ones may be left out.

        Raises:
            TypeError: The parts nest differently from this structure.
            ConstantChangedError: A constant, such as a string, has another value.
        """
        names = ("inputs", "targets", "sample weights")
        given = [*parts, None, None]
        leaves: list[Any] = []
        for name, structure, part in zip(names, self.parts, given):
            if part is None and structure == NOTHING:
                continue
            if part is None:
                raise TypeError(f"it has no {name}")
            leaves.extend(structure.flatten(part, name))
        return leaves

    def flatten_like(self, first: str, parts: Sequence[Any], where: str) -> list[Any]:
        """The leaves of a sample or batch that must nest as the first one does.

        Args:
            first: Name of the first in error messages, such as "sample 0".
            parts: `(inputs, targets, weights)`.
            where: Name of these parts in error messages.

        Raises:
            DataError: They nest differently, or have another constant.
        """
        try:
            return self.flatten(parts)
        except ConstantChangedError as error:
            raise DataError(
                f"{where} has another constant than {first}: {error}. A compiled "
                "model has it baked in. Pass numbers, which become tensors, or leave "
                "it out."
            ) from None
        except TypeError as error:
            raise DataError(
                f"{where} nests differently from {first}: {error}."
            ) from None
