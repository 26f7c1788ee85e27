# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a batch nest: inputs, then targets, weights and shares."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Sequence

from torch import Tensor

from ipufit._tree import Structure

NOTHING = Structure(tuple)
"""The structure of what isn't there."""


class Labels(NamedTuple):
    """What a batch brings besides inputs.

    Attributes:
        targets: As they nest; `()` if there are none.
        weights: Of samples: one tensor, or nested as the outputs; None for all alike.
        share: `[rows]`: what each row counts in the loss of its update, 1 in a whole
            one; rows of padding have 0, and the real rows next to them more, so that
            the loss stays the mean over real rows. None if all rows are real.
    """

    targets: Any = ()
    weights: Any = None
    share: Tensor | None = None


@dataclass(frozen=True)
class SampleStructure:
    """How the tensors of a batch nest.

    Attributes:
        inputs: How the inputs nest.
        targets: How the targets nest; no leaves if there are none.
        weights: How sample weights nest; no leaves if there are none.
        is_padded: Whether the last tensor tells the share of each row.

    Example:
        >>> structure = SampleStructure(Structure.of({"a": 0}), Structure.of(0))
        >>> structure.split([1, 2])
        ({'a': 1}, Labels(targets=2, weights=None, share=None))
    """

    inputs: Structure
    targets: Structure = NOTHING
    weights: Structure = NOTHING
    is_padded: bool = False

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SampleStructure:
        """That of a sample or batch `(inputs,)`, `(inputs, targets[, weights])`."""
        given = [NOTHING if p is None else Structure.of(p) for p in parts]
        given += [NOTHING] * (3 - len(given))
        return cls(given[0], given[1], given[2])

    @property
    def num_inputs(self) -> int:
        """How many tensors are inputs; they come first."""
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
        """Inputs, targets, weights."""
        return self.inputs, self.targets, self.weights

    def padded(self) -> SampleStructure:
        """The same, with the share of each row."""
        return replace(self, is_padded=True)

    def split(self, tensors: Sequence[Any]) -> tuple[Any, Labels]:
        """Inputs, and the rest, from the tensors of a batch."""
        return self.inputs.rebuild(tensors[: self.num_inputs]), self.labels(tensors)

    def labels(self, tensors: Sequence[Any]) -> Labels:
        """What comes besides inputs, from the tensors of a batch."""
        rest = iter(tensors[self.num_inputs :])
        targets = self.targets.rebuild(rest)
        weights = self.weights.rebuild(rest) if self.has_weights else None
        return Labels(targets, weights, next(rest) if self.is_padded else None)

    def flatten(self, parts: Sequence[Any]) -> list[Any]:
        """The leaves of `(inputs, targets, weights)`; missing ones may be left out.

        Raises:
            TypeError: They nest differently.
            ConstantChangedError: A value that is baked in is another.
        """
        names = ("inputs", "targets", "sample weights")
        leaves: list[Any] = []
        for i, (name, structure) in enumerate(zip(names, self.parts)):
            part = parts[i] if i < len(parts) else None
            if part is None and structure == NOTHING:
                continue
            if part is None:
                raise TypeError(f"it has no {name}")
            leaves.extend(structure.flatten(part, name))
        return leaves
