# SPDX-License-Identifier: Apache-2.0
"""Samples, wherever they come from: by index, or as a stream of blocks."""

from __future__ import annotations

import abc
from typing import Any, Callable, Iterable, Iterator, List, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import ConstantChangedError
from ipufit.errors import DataError

from .passes import Pass, Replay, generators_of
from .structure import NOTHING, SampleStructure
from .values import as_tensor

Block = List[Tensor]
"""Samples stacked: the leaves of a structure, with dim 0 counting rows."""


class Source(abc.ABC):
    """Samples, and how their tensors nest.

    Args:
        structure: How a sample nests.
        num_samples: How many there are; None if nobody knows yet.
        name: What messages call the data.

    Attributes:
        structure: As given.
        num_samples: As given.
        name: As given.
        batch_size: What the user's own loader calls a batch; None if there is none.
        generators: Of random numbers, of the user's own loader.
    """

    generators: Sequence[torch.Generator] = ()

    def __init__(
        self, structure: SampleStructure, num_samples: int | None, name: str = "x"
    ) -> None:
        self.structure = structure
        self.num_samples = num_samples
        self.name = name
        self.batch_size: int | None = None

    @abc.abstractmethod
    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""

    def require_targets(self, name: str, purpose: str) -> None:
        """Refuse samples without targets.

        Raises:
            DataError: There are none.
        """
        if not self.structure.has_weights and self.structure.weights != NOTHING:
            raise DataError(
                f"The sample weights of `{name}` are no numbers: the first is "
                f"{self.structure.weights.rebuild([])!r}."
            )
        if not self.structure.has_targets and self.structure.targets != NOTHING:
            raise DataError(
                f"The targets of `{name}` are no numbers: the first is "
                f"{self.structure.targets.rebuild([])!r}. Encode them as numbers."
            )
        if not self.structure.has_targets:
            raise DataError(
                f"`{name}` has no targets to {purpose} with: pass y, or a dataset of "
                "pairs (input, target)."
            )

    def example(self, rows: int, *, inputs_only: bool = False) -> list[Tensor]:
        """The first sample, repeated: what a batch of `rows` looks like.

        The rows share their memory.
        """
        leaves = self.first()
        if inputs_only:
            leaves = leaves[: self.structure.num_inputs]
        return [leaf.expand(rows, *leaf.shape) for leaf in leaves]


class IndexedSource(Source):
    """Samples of a map-style dataset.

    Args:
        dataset: Items are flat tuples: the leaves of `structure`.
        structure: How they nest.
        num_samples: How many there are.
        name: What messages call the data.

    Attributes:
        dataset: As given.
        num_samples: As given.
    """

    num_samples: int

    def __init__(
        self,
        dataset: Any,
        structure: SampleStructure,
        num_samples: int,
        name: str = "x",
    ) -> None:
        super().__init__(structure, num_samples, name)
        self.dataset = dataset

    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""
        return list(self.dataset[0])


class StreamSource(Source):
    """Samples that come in blocks, one after the other.

    The first block is drawn at once, to see what samples look like, and given out
    again as the first: nothing is drawn twice.

    Args:
        blocks: An iterable of batches as the user makes them.
        parts_of: Takes a batch apart: inputs, targets, weights.
        name: What messages call it.
        num_samples: How many there are, if that is known.

    Raises:
        DataError: There is nothing in it, or nothing usable.

    Attributes:
        is_one_shot: Whether it can be gone through once, as a generator.
        rows_of_first: Samples in the first block.
    """

    def __init__(
        self,
        blocks: Iterable[Any],
        parts_of: Callable[[Any], Sequence[Any]],
        *,
        name: str,
        num_samples: int | None = None,
    ) -> None:
        self._iterable = blocks
        self._parts_of = parts_of
        self.name = name
        self.generators = generators_of(blocks)
        begun = Pass(blocks, self._checked, self.generators)
        self._begun: Pass | None = begun
        self._replay: Replay | None = None
        # PopTorch's accessor is its own iterator, but begins anew.
        is_accessor = isinstance(blocks, poptorch.AsynchronousDataAccessor)
        self.is_one_shot = begun.iterator is blocks and not is_accessor
        try:
            parts = parts_of(begun.draw())
        except StopIteration:
            raise DataError(f"`{name}` has no samples.") from None
        super().__init__(SampleStructure.of(parts), num_samples, name)
        block = self._flatten(parts)
        if not len(block[0]):
            raise DataError(f"The first batch of `{name}` has no rows.")
        self._first = [leaf[0].clone() for leaf in block]
        begun.first = block
        self.rows_of_first = len(block[0])

    def first(self) -> list[Tensor]:
        """The leaves of the first sample."""
        return list(self._first)

    @property
    def is_spent(self) -> bool:
        """Whether nothing more can come."""
        return self.is_one_shot and self._begun is None

    def first_pass(self) -> Replay | None:
        """How far the first pass is, if it is still to come."""
        return None if self._begun is None else self._begun.replay()

    def go_on(self, replay: Replay | None, *, is_due: bool) -> None:
        """Have the next pass be that of an interrupted run.

        Nothing happens to a generator: it can't begin anew.

        Args:
            replay: Of its pass; None if none was begun, so that the next begins anew.
            is_due: Whether that was the first pass, of which nothing was given out:
                its block is drawn now.
        """
        if self.is_one_shot:
            return
        self._begun, self._replay = None, replay
        if is_due and replay is not None:
            self._begun = self._new_pass()
            self._begun.first = self._checked(self._begun.draw())

    def blocks(self) -> Pass | Iterator[Block]:
        """All blocks, from the beginning if it can be begun anew."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        if self.is_one_shot:
            return iter(())
        return self._new_pass()

    def _new_pass(self) -> Pass:
        replay, self._replay = self._replay, None
        return Pass(self._iterable, self._checked, self.generators, replay)

    def _flatten(self, parts: Sequence[Any]) -> Block:
        try:
            leaves = self.structure.flatten(parts)
        except ConstantChangedError as error:
            raise DataError(
                f"A batch of `{self.name}` has another constant: {error}. A compiled "
                "model has it baked in. Pass numbers, which become tensors, or leave "
                "it out."
            ) from None
        except TypeError as error:
            raise DataError(
                f"A batch of `{self.name}` nests differently from the first: {error}."
            ) from None
        return same_rows(leaves, f"A batch of `{self.name}`")

    def _checked(self, batch: Any) -> Block:
        block = self._flatten(self._parts_of(batch))
        for leaf, first in zip(block, self._first):
            if leaf.shape[1:] != first.shape or leaf.dtype != first.dtype:
                raise DataError(
                    f"A batch of `{self.name}` has samples of {leaf.dtype} and shape "
                    f"{tuple(leaf.shape[1:])}, and the first had {first.dtype} and "
                    f"{tuple(first.shape)}. The shapes of a compiled model are fixed: "
                    "pad or crop samples to one shape."
                )
        return block


def same_rows(leaves: Sequence[Any], where: str) -> Block:
    """Tensors with one number of rows; a single number stands for every row.

    Args:
        leaves: Tensors, arrays or numbers.
        where: What messages call them.

    Raises:
        DataError: No arrays, none with rows, or rows of different numbers.

    Example:
        >>> same_rows([torch.zeros(2, 3), 0.5], "`x`")[1]
        tensor([0.5000, 0.5000])
    """
    tensors = [as_tensor(leaf, where) for leaf in leaves]
    if not tensors:
        raise DataError(f"{where} holds no arrays.")
    for tensor, leaf in zip(tensors, leaves):
        if not tensor.dim() and not isinstance(leaf, (bool, int, float)):
            raise DataError(
                f"{where} holds an array without axes, {leaf!r}: dim 0 counts samples. "
                "To give samples one by one use an IterableDataset."
            )
    lengths = [len(tensor) for tensor in tensors if tensor.dim()]
    if not lengths:
        raise DataError(f"{where} holds a single number: dim 0 counts samples.")
    if len(set(lengths)) > 1:
        raise DataError(
            f"{where} has arrays of different numbers of samples: "
            f"{short_list(lengths)}. Dim 0 must be the same for all."
        )
    rows = lengths[0]
    return [t if t.dim() else t.expand(rows).clone() for t in tensors]


def short_list(numbers: Sequence[int]) -> str:
    """A list for messages, cut after its first numbers.

    Example:
        >>> short_list([4, 5]), short_list([3] * 32)
        ('[4, 5]', '[3, 3, 3, ... 32 in all]')
    """
    if len(numbers) <= 6:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ... {len(numbers)} in all]"
