# SPDX-License-Identifier: Apache-2.0
"""Map-style datasets whose items are flat tuples of tensors."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, Sized, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ipufit._tree import ConstantChangedError
from ipufit.errors import DataError

from .structure import SampleStructure
from .values import as_tensor, split_columns, without_columns


class StackedRows(tuple):  # type: ignore[type-arg]
    """Rows gathered by index already, which needn't be collated."""

    __slots__ = ()


class ArrayDataset(Dataset):  # type: ignore[type-arg]
    """Samples in memory, gathered by index instead of one by one.

    Args:
        tensors: Of equal lengths.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample."""
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> StackedRows:
        """A batch of samples at once: torch's loaders ask for it if it's there."""
        rows = torch.as_tensor(indices)
        return StackedRows(tensor[rows] for tensor in self.tensors)


class FlatDataset(Dataset):  # type: ignore[type-arg]
    """The user's dataset with its samples flattened.

    Args:
        dataset: The user's.
        parts_of: Takes a sample apart: inputs, targets, weights.
        structure: How a sample nests.
        name: What messages call the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        parts_of: Callable[[Any], Sequence[Any]],
        structure: SampleStructure,
        name: str,
    ) -> None:
        self._dataset = dataset
        self._parts_of = parts_of
        self._structure = structure
        self._name = name
        self._first: list[tuple[torch.Size, torch.dtype]] | None = None

    def __len__(self) -> int:
        """The number of samples."""
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample; numbers become tensors."""
        where = f"Sample {int(index)} of `{self._name}`"
        parts = self._parts_of(self._dataset[int(index)])
        try:
            leaves = self._structure.flatten(parts)
        except ConstantChangedError as error:
            raise DataError(
                f"{where} has another constant than sample 0: {error}. A compiled "
                "model has it baked in. Pass numbers, which become tensors, or leave "
                "it out."
            ) from None
        except TypeError as error:
            raise DataError(
                f"{where} nests differently from sample 0: {error}."
            ) from None
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


class Parts:
    """Takes a sample or a batch apart: inputs, targets, sample weights.

    As Keras does, a tuple or list of one to three parts is those; anything else is
    inputs. Columns that are named as targets are taken out of a dict.

    Args:
        columns: The target columns; None if there are none by name.
        is_single: Whether the target is the one column itself, not a dict of it.
        name: What messages call the data.
        has_lists: Whether lists of numbers are arrays, as in rows of Hugging Face's
            datasets.
        inputs_only: Whether targets and weights are left alone, whatever they are.
        left_out: Columns that count as not there.

    Example:
        >>> Parts()((1, 2)), Parts(["b"], True)({"a": 1, "b": 2})
        ((1, 2), ({'a': 1}, 2))
    """

    def __init__(
        self,
        columns: Sequence[str] | None = None,
        is_single: bool = False,
        name: str = "x",
        *,
        has_lists: bool = False,
        inputs_only: bool = False,
        left_out: Sequence[str] = (),
    ) -> None:
        self._left_out = left_out
        self._columns = columns
        self._is_single = is_single
        self._name = name
        self._has_lists = has_lists
        self._inputs_only = inputs_only

    def __call__(self, sample: Any) -> Sequence[Any]:
        """The parts of a sample or batch.

        Raises:
            DataError: More than three, or the columns aren't there.
        """
        parts = self._parts(sample)
        return parts[:1] if self._inputs_only else parts

    def _parts(self, sample: Any) -> Sequence[Any]:
        if isinstance(sample, Mapping) and not isinstance(sample, dict):
            sample = dict(sample)  # as transformers' tokenizers give
        sample = without_columns(sample, self._left_out)
        if self._has_lists:
            sample = table_row(sample)
        if self._columns is not None:
            where = f"A sample of `{self._name}`"
            return split_columns(sample, self._columns, self._is_single, where)
        if not isinstance(sample, (tuple, list)):
            return (sample,)
        if len(sample) not in (1, 2, 3):
            raise DataError(
                f"Samples of `{self._name}` have {len(sample)} parts; they must be an "
                "input, a pair (input, target), or a triple with a sample weight. "
                "Their parts may nest."
            )
        return sample


class IterableRows(IterableDataset):  # type: ignore[type-arg]
    """An iterable of samples, as torch's loaders want it.

    Args:
        rows: Gives samples whenever it is gone through.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        """The samples."""
        return iter(self._rows)


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
    """Numbers in lists as an array; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" else value
