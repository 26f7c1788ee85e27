# SPDX-License-Identifier: Apache-2.0
"""Structures of samples, and the named parts of a batch.

`Batch` names the tensors of a batch, those included that `columns.py` adds in training.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Iterable, NamedTuple, Sequence

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ipufit._tree import ConstantChangedError, Structure
from ipufit.batching import BatchPlan
from ipufit.errors import DataError

NOTHING = Structure(tuple)
"""The structure of targets or weights that samples don't have."""


class Batch(NamedTuple):
    """The tensors of a batch, in the order in which programs take them.

    Attributes:
        inputs: Leaves of the inputs.
        targets: Leaves of the targets; empty without targets.
        weights: Leaves of the sample weights; empty without weights.
        share: One tensor, the weight of each row in the loss of its update. In batches
            that are whole micro-batches, the mask until `columns.py` replaces it. Empty
            without padding.
        divisors: One tensor, `[rows, indices * targets]`: the number of targets of the
            update that aren't ignored, divided by the number of its micro-batches.
            Empty if no targets are counted.
        mixing: One tensor, the columns of `ipufit.mixing.Coefficients`; empty without
            mixing.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any] = ()
    weights: Sequence[Any] = ()
    share: Sequence[Any] = ()
    divisors: Sequence[Any] = ()
    mixing: Sequence[Any] = ()

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return [*itertools.chain.from_iterable(self)]


class Labels(NamedTuple):
    """Targets of a batch, their weights, and the numbers of targets that count.

    Attributes:
        targets: Nested tensors; `()` if the samples have no targets.
        weights: Sample weights: one tensor, or nested as the outputs. None without
            weights.
        share: Weight of each row in the loss of its update, `[rows]`. Padding has 0 and
            the other rows more than 1, so that the loss is the mean over unpadded rows.
            None without padding.
        counted: By ignored class index, nested as the targets: `[rows]`, the number of
            the update's targets that aren't ignored, divided by the number of its
            micro-batches. None if each micro-batch is an update.
    """

    targets: Any = ()
    weights: Any = None
    share: Tensor | None = None
    counted: Any = None


def _has_packed(part: Structure) -> bool:
    return part.kind is PackedSequence or any(map(_has_packed, part.children))


@dataclass(frozen=True)
class SampleStructure:
    """The structure of the inputs, targets and weights of a sample or a batch.

    Attributes:
        inputs: Structure of the inputs.
        targets: Structure of the targets; without leaves for no targets.
        weights: Structure of the sample weights; without leaves for no weights.
        is_padded: Whether a batch has `Batch.share`.
        ignored: Indices of ignored targets that are counted for each update: a batch
            then has `Batch.divisors`. None if nothing must be counted, because each
            micro-batch is an update.
        is_mixed: Whether a batch has `Batch.mixing`.
        rows: Samples and padding of an item that is a whole micro-batch; None if an
            item is a sample. The tensors of such items are `[items, ...]`, and the
            last, `[items, rows]`, is above 0 for samples: a mask or the shares.

    Example:
        >>> structure = SampleStructure(Structure.of({"a": 0}), Structure.of(0))
        >>> structure.nested([1, 2]), structure.labels([1, 2])
        ({'a': 1}, Labels(targets=2, weights=None, share=None, counted=None))
    """

    inputs: Structure
    targets: Structure = NOTHING
    weights: Structure = NOTHING
    is_padded: bool = False
    ignored: tuple[int, ...] | None = None
    is_mixed: bool = False
    rows: int | None = None

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SampleStructure:
        """Return the structure of `(inputs,)` or `(inputs, targets[, weights])`."""
        structures = [NOTHING if p is None else Structure.of(p) for p in parts]
        if any(map(_has_packed, structures)):
            raise DataError(
                "The data has a torch.nn.utils.rnn.PackedSequence, and a compiled "
                "model has fixed shapes. Pass padded sequences and their lengths: "
                "`x, lengths = pad_packed_sequence(packed, batch_first=True)`, and "
                "have `forward` take the last valid step with `gather`."
            )
        inputs, targets, weights = [*structures, NOTHING, NOTHING][:3]
        return cls(inputs, targets, weights)

    @cached_property
    def num_inputs(self) -> int:
        """Number of tensors of the inputs, which come first in a batch."""
        return self.inputs.num_leaves

    def named(self, tensors: Iterable[Any]) -> Batch:
        """Name the tensors of a batch, which may have inputs only."""
        rest = iter(tensors)
        return Batch(*([*itertools.islice(rest, n)] for n in self._num_of_each_part))

    @cached_property
    def _num_of_each_part(self) -> tuple[int, ...]:
        return (
            *(part.num_leaves for part in self.parts),
            *(int(self.is_padded), int(bool(self.ignored)), int(self.is_mixed)),
        )

    @property
    def has_targets(self) -> bool:
        """Whether samples have targets."""
        return self.targets.num_leaves > 0

    @property
    def has_weights(self) -> bool:
        """Whether samples have weights."""
        return self.weights.num_leaves > 0

    @property
    def parts(self) -> tuple[Structure, Structure, Structure]:
        """Structures of the inputs, the targets and the weights."""
        return self.inputs, self.targets, self.weights

    def nested(self, tensors: Sequence[Any]) -> Any:
        """Nest the inputs of a batch as the data does."""
        return self.inputs.rebuild(map(self._joined, tensors[: self.num_inputs]))

    def _joined(self, tensor: Any) -> Any:
        """Join items that are whole micro-batches along their own first dimension."""
        if self.rows is None:
            return tensor
        return tensor.flatten(0, 1) if tensor.dim() > 1 else tensor.reshape(())

    def num_rows(self, tensors: Sequence[Tensor]) -> int:
        """Count the rows of a micro-batch, padding included."""
        return len(tensors[0]) if self.rows is None else self.rows

    def plan_in_rows(self, plan: BatchPlan) -> BatchPlan:
        """Return a plan that counts rows (samples and padding) in place of items."""
        if self.rows is None:
            return plan
        return replace(plan, micro_batch_size=self.rows)

    def paths(self) -> list[str]:
        """Return the path of each tensor of a sample, such as `inputs['x']`."""
        names = zip(self.parts, ("inputs", "targets", "sample weights"))
        return [path for part, name in names for path in part.paths(name)]

    @cached_property
    def num_given(self) -> int:
        """Number of tensors of a sample: inputs, targets and weights."""
        return sum(part.num_leaves for part in self.parts)

    def batch(self, inputs: Any, tensors: Sequence[Any]) -> Any:
        """Nest a batch as the data does: inputs, or `(inputs, targets[, weights])`.

        Args:
            inputs: Nested inputs.
            tensors: Tensors of the batch; the tensors of inputs are ignored.

        Example:
            >>> SampleStructure.of((0, (1, 2))).batch("x", [0, 1, 2])
            ('x', (1, 2))
        """
        if not self.has_targets and not self.has_weights:
            return inputs
        labels = self.labels(tensors)
        parts = (inputs, labels.targets)
        return (*parts, labels.weights) if self.has_weights else parts

    def tensors_of_labels(self, tensors: Sequence[Any]) -> list[Any]:
        """Take targets and weights from the tensors of a batch, without nesting."""
        return [*map(self._joined, tensors[self.num_inputs : self.num_given])]

    def labels(self, tensors: Sequence[Any]) -> Labels:
        """Take targets, weights, shares and counts from the tensors of a batch."""
        _, *parts, _ = (map(self._joined, column) for column in self.named(tensors))
        targets, weights, share, divisors = parts
        counted: dict[int, Any] | None = None
        if self.ignored is not None:
            columns = itertools.chain.from_iterable(t.unbind(dim=1) for t in divisors)
            counted = {index: self.targets.rebuild(columns) for index in self.ignored}
        return Labels(
            self.targets.rebuild(targets),
            self.weights.rebuild(weights) if self.has_weights else None,
            next(share, None),
            counted,
        )

    def mixing(self, tensors: Sequence[Any]) -> Any:
        """Return the mixing coefficients of a batch; None without mixing."""
        return next(iter(self.named(tensors).mixing), None)

    def flatten(self, parts: Sequence[Any]) -> list[Any]:
        """Flatten `(inputs, targets, weights)`; missing parts may be left out.

        Raises:
            TypeError: The parts nest differently from this structure.
            ConstantChangedError: A constant, such as a string, has another value.
        """
        names = ("inputs", "targets", "sample weights")
        all_parts = [*parts, None, None]
        leaves: list[Any] = []
        for name, structure, part in zip(names, self.parts, all_parts):
            if part is None and structure == NOTHING:
                continue
            if part is None:
                raise TypeError(f"it has no {name}")
            leaves.extend(structure.flatten(part, name))
        return leaves

    def flatten_like(self, first: str, parts: Sequence[Any], where: str) -> list[Any]:
        """Flatten a sample or batch that must nest as the first sample or batch.

        Args:
            first: Name of the first sample in error messages, such as "sample 0".
            parts: `(inputs, targets, weights)`.
            where: Name of the sample or batch in error messages.

        Raises:
            DataError: The parts nest differently, or have another constant.
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
