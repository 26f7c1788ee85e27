# SPDX-License-Identifier: Apache-2.0
"""Map-style datasets whose items are flat tuples of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ipufit.errors import DataError

from .columns import split_columns, without_columns
from .stacking import stacked_leaves
from .structure import SampleStructure
from .together import TogetherReader
from .values import as_tensor


class StackedRows(tuple):  # type: ignore[type-arg]
    """Rows that were gathered by index already, so that `collate` leaves them alone."""

    __slots__ = ()


class ArrayDataset(Dataset):  # type: ignore[type-arg]
    """Samples in memory, gathered by index instead of one by one.

    Args:
        tensors: Tensors of equal lengths.
        rows: Rows of the tensors that are samples; None if all are.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor | None = None) -> None:
        self.tensors = list(tensors)
        self.rows = rows

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0] if self.rows is None else self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample."""
        row = index if self.rows is None else int(self.rows[index])
        return tuple(tensor[row] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> StackedRows:
        """A batch of samples at once: torch's loaders use this method if it exists."""
        return StackedRows(self.gathered(torch.as_tensor(indices)))

    def gathered(self, indices: Tensor) -> list[Tensor]:
        """Copies of the rows of some samples."""
        rows = indices if self.rows is None else self.rows[indices]
        return [torch.index_select(tensor, 0, rows) for tensor in self.tensors]


@dataclass(eq=False)
class FlatDataset(Dataset):  # type: ignore[type-arg]
    """The user's dataset with its samples flattened.

    Args:
        dataset: The user's dataset.
        parts_of: Takes a sample apart: inputs, targets, weights.
        structure: How a sample nests.
        name: Name of the dataset in error messages.
    """

    dataset: Any
    parts_of: Callable[[Any], Sequence[Any]]
    structure: SampleStructure
    name: str
    _first: list[tuple[torch.Size, torch.dtype]] | None = field(
        default=None, init=False
    )
    _reader: TogetherReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = TogetherReader(self.dataset)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample; numbers become tensors."""
        return self._flat(self.dataset[int(index)], index)

    def __getitems__(self, indices: Sequence[int]) -> StackedRows | list[Any]:
        """A batch of samples: torch's loaders use this method if it exists."""
        users = self.dataset
        return self.batch(
            indices, lambda places: [users[int(indices[at])] for at in places]
        )

    def batch(
        self, indices: Sequence[int], singly: Callable[[Sequence[int]], list[Any]]
    ) -> StackedRows | list[Any]:
        """A batch of samples.

        Args:
            indices: Indices of the samples.
            singly: Gets samples of the user's dataset one by one, those at some places
                among the indices.

        Returns:
            The tensors of the batch; or flat samples, if these have leaves other than
            tensors, arrays and numbers.

        Raises:
            DataError: A sample can't be used, or is unlike the first.
        """
        rows = [int(index) for index in indices]

        def are_same(
            places: Sequence[int], items: list[Any], others: list[Any]
        ) -> bool:
            return all(
                _are_equal(self._flat(one, rows[at]), self._flat(other, rows[at]))
                for at, one, other in zip(places, items, others)
            )

        items = self._reader.items(rows, singly, are_same)
        if self._first is not None:
            parts = [self.parts_of(item) for item in items]
            leaves = stacked_leaves(parts, self.structure, self._first)
            if leaves is not None:
                return StackedRows(leaves)
        return [self._flat(item, index) for item, index in zip(items, rows)]

    def _flat(self, item: Any, index: int) -> tuple[Tensor, ...]:
        where = f"Sample {int(index)} of `{self.name}`"
        leaves = self.structure.flatten_like("sample 0", self.parts_of(item), where)
        tensors = tuple(as_tensor(leaf, where) for leaf in leaves)
        self._check(tensors, where)
        return tensors

    def _check(self, tensors: Sequence[Tensor], where: str) -> None:
        """Refuse samples unlike the first: an asynchronous loader would cast them."""
        own = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._first is None:
            self._first = own
        for (shape, dtype), (first_shape, first_dtype) in zip(own, self._first):
            if shape != first_shape:
                raise DataError(
                    f"{where} has shape {tuple(shape)} and sample 0 has "
                    f"{tuple(first_shape)}: samples of different shapes can't share a "
                    "call, because the shapes of a compiled model are fixed. Pad or "
                    "crop them to one shape."
                )
            if dtype != first_dtype:
                raise DataError(
                    f"{where} is of {dtype} and sample 0 of {first_dtype}: the types "
                    "of a compiled model are fixed. Convert all samples to one."
                )


def _are_equal(leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(leaves) == len(others) and all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(leaves, others)
    )


@dataclass(frozen=True)
class Parts:
    """Takes a sample or a batch apart: inputs, targets, sample weights.

    As in Keras, a tuple or list of one to three elements holds these parts, and
    anything else is inputs. Columns that are named as targets are taken out of a dict.

    Args:
        columns: Names of the target columns; None if targets have no names.
        is_single: Whether the target is the one column itself, not a dict of it.
        name: Name of the data in error messages.
        has_lists: Whether lists of numbers are arrays, as in rows of Hugging Face's
            datasets.
        inputs_only: Whether targets and weights are ignored, whatever they are.
        left_out: Columns to ignore.

    Example:
        >>> Parts()((1, 2)), Parts(["b"], True)({"a": 1, "b": 2})
        ((1, 2), ({'a': 1}, 2))
    """

    columns: Sequence[str] | None = None
    is_single: bool = False
    name: str = "x"
    has_lists: bool = False
    inputs_only: bool = False
    left_out: Sequence[str] = ()

    @property
    def _has_columns(self) -> bool:
        return bool(self.columns is not None or self.has_lists or self.left_out)

    def __call__(self, sample: Any) -> Sequence[Any]:
        """The parts of a sample or batch.

        Raises:
            DataError: There are more than three parts, or a column is missing.
        """
        parts = self._parts(sample)
        return parts[:1] if self.inputs_only else parts

    def _parts(self, sample: Any) -> Sequence[Any]:
        if type(sample) is tuple and 0 < len(sample) <= 3 and not self._has_columns:
            return sample
        if isinstance(sample, Mapping) and not isinstance(sample, dict):
            sample = dict(sample)  # transformers' tokenizers give such mappings
        sample = without_columns(sample, self.left_out)
        if self.has_lists:
            sample = table_row(sample)
        if self.columns is not None:
            where = f"A sample of `{self.name}`"
            return split_columns(sample, self.columns, self.is_single, where)
        if not isinstance(sample, (tuple, list)):
            return (sample,)
        if len(sample) not in (1, 2, 3):
            raise DataError(
                f"Samples of `{self.name}` have {len(sample)} parts; they must be an "
                "input, a pair (input, target), or a triple with a sample weight. "
                "Their parts may nest."
            )
        return sample


@dataclass(frozen=True, eq=False)
class IterableRows(IterableDataset):  # type: ignore[type-arg]
    """An iterable of samples as a dataset, which torch's loaders need.

    Args:
        rows: Samples; can be gone through several times.
    """

    rows: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        """The samples."""
        return iter(self.rows)


def table_row(row: Any) -> Any:
    """A row of a Hugging Face dataset, with arrays for lists of numbers.

    Example:
        >>> table_row({"a": [1, 2], "b": "text"})
        {'a': array([1, 2]), 'b': 'text'}
    """
    if not isinstance(row, dict):
        return row
    return {key: _array_of(value) for key, value in row.items()}


def _array_of(value: Any) -> Any:
    """Lists of numbers as an array; anything else unchanged."""
    if not isinstance(value, (list, tuple)):
        return value
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" else value
