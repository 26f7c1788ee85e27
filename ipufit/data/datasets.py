# SPDX-License-Identifier: Apache-2.0
"""Map-style datasets whose items are flat tuples of tensors."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    IterableDataset,
    Subset,
    _utils,
    default_collate,
    get_worker_info,
)

from ipufit.distributed import Processes
from ipufit.errors import DataError
from ipufit.types import Batch

from .random_state import mixed, seed_all
from .structure import (
    NOTHING,
    SampleStructure,
    as_tensor,
    check_integers,
    narrow,
    split_columns,
    without_columns,
)

ALONE = Processes()


@dataclass(frozen=True)
class Parts:
    """Splits a sample or a batch into inputs, targets and sample weights.

    As in Keras, a tuple or list of one to three elements holds these parts, and
    anything else is inputs. Columns that are named as targets are taken out of a dict.

    Args:
        columns: Names of the target columns; None if targets have no names.
        is_single: Whether the target is the one column itself, not a dict of it.
        name: Name of the data in error messages.
        has_lists: Whether lists of numbers are arrays, as in rows of Hugging Face's
            datasets.
        inputs_only: Whether targets and weights are left out.
        left_out: Columns to leave out.
    """

    columns: Sequence[str] | None = None
    is_single: bool = False
    name: str = "x"
    has_lists: bool = False
    inputs_only: bool = False
    left_out: Sequence[str] = ()

    def __call__(self, sample: Any) -> Sequence[Any]:
        """Split a sample or a batch.

        Raises:
            DataError: There are more than three parts, or a column is missing.
        """
        if isinstance(sample, (tuple, list)) and self.columns is None:
            if len(sample) not in (1, 2, 3):
                raise DataError(
                    f"Samples of `{self.name}` have {len(sample)} parts; they must be "
                    "an input, a pair (input, target), or a triple with a sample "
                    "weight. Their parts may nest."
                )
            return sample[:1] if self.inputs_only else sample
        if isinstance(sample, Mapping) and not isinstance(sample, dict):
            sample = dict(sample)  # transformers' tokenizers give such mappings
        sample = without_columns(sample, self.left_out)
        if self.has_lists:
            sample = table_row(sample)
        if self.columns is None:
            return (sample,)
        where = f"A sample of `{self.name}`"
        parts = split_columns(sample, self.columns, self.is_single, where)
        return parts[:1] if self.inputs_only else parts


def table_row(row: Any) -> Any:
    """Convert lists of numbers in a row of a Hugging Face dataset to arrays.

    Example:
        >>> table_row({"a": [1, 2], "b": "text"})
        {'a': array([1, 2]), 'b': 'text'}
    """
    if not isinstance(row, dict):
        return row
    arrays = {
        key: np.asarray(value)
        for key, value in row.items()
        if isinstance(value, (list, tuple))
    }
    numbers = {key: one for key, one in arrays.items() if one.dtype.kind in "biuf"}
    return {**row, **numbers}


def collate(samples: Any) -> Batch:
    """Stack flat samples; results of `__getitems__` are stacked already."""
    is_stacked = isinstance(samples[0], Tensor)
    return list(samples if is_stacked else default_collate(samples))


class ArrayDataset(Dataset):  # type: ignore[type-arg]
    """Dataset of samples in memory, gathered by index and not one by one.

    float64 tensors stay the user's own, who may change them, and become float32 when
    rows are taken.

    Args:
        tensors: Tensors of equal lengths.
        rows: Rows of the tensors that are samples; None if all are.
    """

    def __init__(self, tensors: Sequence[Tensor], rows: Tensor | None = None) -> None:
        self.tensors = list(tensors)
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.tensors[0] if self.rows is None else self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one sample."""
        row = index if self.rows is None else int(self.rows[index])
        return tuple(narrow(tensor[row]) for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch of samples at once, for torch's loaders."""
        return self.gathered(torch.as_tensor(indices))

    def gathered(self, indices: Tensor) -> list[Tensor]:
        """Copy the rows of some samples."""
        rows = indices if self.rows is None else self.rows[indices]
        return [narrow(torch.index_select(one, 0, rows)) for one in self.tensors]


@dataclass(eq=False)
class FlatDataset(Dataset):  # type: ignore[type-arg]
    """The user's dataset with its samples flattened.

    Args:
        dataset: The user's dataset.
        parts_of: Splits a sample into inputs, targets and weights.
        structure: How a sample nests.
        name: Name of the dataset in error messages.
        convert: Makes a tensor of a leaf, given a name for messages.
        seed: Seed of the random numbers that samples draw, mixed with the number of the
            pass and the index of the sample; None to leave random numbers alone. The
            random state of another process can't be saved. With such seeds a run that
            is resumed in mid-epoch, or with another number of processes, draws the
            same. Indices are keys then: index + number of the pass * number of samples.
        likes: Shape and type of each leaf; those of the first sample if empty.
        error_file: Gets the traceback of an error in `__getitems__`; None for none.
    """

    dataset: Any
    parts_of: Callable[[Any], Sequence[Any]]
    structure: SampleStructure
    name: str
    convert: Callable[[Any, str], Tensor] = as_tensor
    seed: int | None = None
    likes: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    error_file: Path | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one sample; numbers become tensors."""
        return self.flat(self.dataset[self._begin(index)], index)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a batch of samples, for torch's loaders."""
        try:
            together = _getitems_of(self.dataset)
            if together is None:
                items = [self.dataset[self._begin(index)] for index in indices]
            else:
                self._begin(indices[0])
                items = together([int(index) % len(self) for index in indices])
                if len(items) != len(indices):
                    raise DataError(
                        f"__getitems__ of `{self.name}` gave {len(items)} samples for "
                        f"{len(indices)} indices."
                    )
            leaves = self._stacked(items) if self.likes else None
            if leaves is None:
                rows = [self.flat(item, at) for item, at in zip(items, indices)]
                leaves = default_collate(rows)
        except Exception:
            if self.error_file is not None:
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
                with os.fdopen(os.open(self.error_file, flags, 0o600), "wb") as file:
                    file.write(traceback.format_exc().encode())
            raise
        return leaves

    def _begin(self, key: int) -> int:
        """Seed the random numbers of a sample, and return its index."""
        number, index = divmod(int(key), len(self))
        if self.seed is not None:
            seed_all(mixed(self.seed, number, index))
        return index

    def flat(self, item: Any, index: int) -> tuple[Tensor, ...]:
        """Flatten a sample, which must look like the first.

        Raises:
            DataError: Its structure or shapes differ; or it contains something that is
                no number.
        """
        where = f"Sample {int(index) % len(self)} of `{self.name}`"
        leaves = self.structure.flatten_like("sample 0", self.parts_of(item), where)
        tensors = tuple(self.convert(leaf, where) for leaf in leaves)
        if not self.likes:
            self.likes += [(tensor.shape, tensor.dtype) for tensor in tensors]
        for tensor, (shape, dtype) in zip(tensors, self.likes):
            if tensor.shape != shape:
                raise DataError(
                    f"{where} has shape {tuple(tensor.shape)} and sample 0 has "
                    f"{tuple(shape)}: samples of different shapes can't share a "
                    "call, because the shapes of a compiled model are fixed. Pad or "
                    "crop them to one shape."
                )
            if tensor.dtype != dtype:
                raise DataError(
                    f"{where} is of {tensor.dtype} and sample 0 of {dtype}: the types "
                    "of a compiled model are fixed. Convert all samples to one."
                )
        return tensors

    def _stacked(self, items: Sequence[Any]) -> list[Tensor] | None:
        """Stack plain tensors, arrays and numbers; None if there are other values."""
        try:
            rows = [self.structure.flatten(self.parts_of(item)) for item in items]
            leaves = [_stacked_leaf(column) for column in zip(*rows)]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return None
        for leaf, (shape, dtype) in zip(leaves, self.likes):
            if leaf is None or leaf.shape[1:] != shape or leaf.dtype != dtype:
                return None
            if leaf.requires_grad or leaf.layout != torch.strided or not leaf.is_cpu:
                return None
        return leaves  # type: ignore[return-value]


def _stacked_leaf(values: Sequence[Any]) -> Tensor | None:
    kind = type(values[0])
    if any(type(value) is not kind for value in values):
        return None
    if kind in (bool, int, float):
        numbers = torch.tensor(values)
        return None if kind is float and torch.isinf(numbers).any() else numbers
    if kind is np.ndarray:
        if not all(one.flags.c_contiguous and one.flags.writeable for one in values):
            return None
        values = [torch.from_numpy(value) for value in values]
    dtype = values[0].dtype
    if any(value.dtype is not dtype for value in values):
        return None  # torch would promote them
    stacked = torch.stack(tuple(values))
    # Processes that load stack into shared memory, which has torch's own strides.
    return stacked if get_worker_info() is None else stacked.contiguous()


def _getitems_of(dataset: Any) -> Callable[[Sequence[int]], list[Any]] | None:
    """Return the method that reads several samples at once; None without one.

    A `Subset` uses its dataset's. A class with its own `__getitem__` and an inherited
    `__getitems__` has none: the latter would bypass the former.
    """
    if type(dataset) is Subset:
        read, chosen = _getitems_of(dataset.dataset), dataset.indices
        if read is None:
            return None
        inner = read
        return lambda indices: inner([chosen[index] for index in indices])
    together: Any = getattr(dataset, "__getitems__", None)
    if isinstance(dataset, Subset) or not callable(together):
        return None
    for kind in type(dataset).__mro__:
        if "__getitem__" in vars(kind) and "__getitems__" not in vars(kind):
            return None
        if "__getitems__" in vars(kind):
            break
    reading: Callable[[Sequence[int]], list[Any]] = together
    return reading


def is_hugging_face(x: Any) -> bool:
    """Return whether it is a dataset of Hugging Face, whose samples are dicts.

    Example:
        >>> is_hugging_face([{"a": 1}])
        False
    """
    return hasattr(x, "column_names") and hasattr(x, "features")


@dataclass(frozen=True, eq=False)
class IterableRows(IterableDataset):  # type: ignore[type-arg]
    """A dataset of an iterable of samples that several processes may load.

    Each of them has a copy of the dataset. A dataset that calls
    `torch.utils.data.get_worker_info()` for the number of its process before its first
    sample divides itself. From any other, a process takes every n-th sample.

    Args:
        rows: Samples; can be iterated over several times.
        name: Name of the data in error messages.
    """

    rows: Iterable[Any]
    name: str = "x"

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this worker."""
        info: Any = get_worker_info()
        if info is None or info.num_workers == 1:
            yield from self.rows
            return
        worker: Any = _utils.worker
        noting = _NotingInfo(info, self.rows)
        worker._worker_info = noting
        try:
            is_divided = None
            for number, sample in enumerate(self.rows):
                has_asked = noting.has_asked
                if is_divided is None:
                    is_divided = has_asked
                elif is_divided != has_asked:
                    raise DataError(
                        f"`{self.name}` asks get_worker_info() which process loads it "
                        "only after its first sample, when samples are divided "
                        "already. Ask at the beginning of __iter__."
                    )
                if is_divided or number % info.num_workers == info.id:
                    yield sample
        finally:
            worker._worker_info = info


class _NotingInfo:
    """Notes whether a dataset reads the numbers of its `WorkerInfo`."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info = info
        self.dataset = dataset
        self.has_asked = False

    def __getattr__(self, name: str) -> Any:
        self.has_asked = self.has_asked or name in ("id", "num_workers")
        return getattr(self._info, name)


class Source:
    """Samples of one structure.

    Args:
        structure: Structure of a sample.
        num_samples: Number of samples; None if unknown.
        name: Name of the data in error messages.
        dataset: Map-style dataset, whose items are the leaves of `structure`; None for
            a stream, or an example.
        first: The leaves of the first sample; read from the dataset if empty.

    Attributes:
        batch_size: Batch size of the user's own loader; None if there is none.
        is_in_memory: Whether the samples are arrays, of which any number is available
            at once.
        generators: Random generators that the user's own loader draws from.
        is_one_shot: Whether the samples can be iterated over only once.
        num_certain: Number of samples of a pass if it is certain, else None. For an
            example it is that of its data.
        columns: For each array of the inputs the names of its columns, if it was a
            frame.
        num_ahead: Number of samples that workers of the user's own loader load ahead;
            None without workers.
    """

    def __init__(
        self,
        structure: SampleStructure,
        num_samples: int | None,
        name: str = "x",
        dataset: ArrayDataset | FlatDataset | None = None,
        first: Sequence[Tensor] = (),
    ) -> None:
        self.structure = structure
        self.num_samples = num_samples
        self.name = name
        self.batch_size: int | None = None
        self.dataset = dataset
        self.is_in_memory = isinstance(dataset, ArrayDataset)
        self._first = list(first)
        self.generators: Sequence[torch.Generator] = ()
        self.is_one_shot = False
        self.num_certain = None if dataset is None else num_samples
        self.num_ahead: int | None = None
        self.columns: Sequence[Sequence[Any] | None] = ()

    def first(self) -> list[Tensor]:
        """Return the leaves of the first sample, which is read once."""
        if not self._first and self.dataset is not None:
            self._first = list(self.dataset[0])
        return list(self._first)

    def require_targets(self, name: str, purpose: str) -> None:
        """Refuse samples without targets.

        Raises:
            DataError: Samples have no targets, or targets or weights are no numbers.
        """
        targets, weights = self.structure.targets, self.structure.weights
        if not weights.num_leaves and weights != NOTHING:
            raise DataError(
                f"The sample weights of `{name}` are no numbers: the first is "
                f"{weights.rebuild([])!r}."
            )
        if not targets.num_leaves and targets != NOTHING:
            raise DataError(
                f"The targets of `{name}` are no numbers: the first is "
                f"{targets.rebuild([])!r}. Encode them as numbers."
            )
        if not targets.num_leaves:
            raise DataError(
                f"`{name}` has no targets to {purpose} with: pass y, or a dataset of "
                "pairs (input, target)."
            )

    def example(self, rows: int, *, inputs_only: bool = False) -> list[Tensor]:
        """Return a batch that holds the first sample `rows` times, in shared memory."""
        leaves = self.first()
        if inputs_only:
            leaves = leaves[: self.structure.num_inputs]
        return [leaf.expand(rows, *leaf.shape) for leaf in leaves]

    def check(self, batch: Sequence[Tensor], sample_of: Callable[[int], int]) -> None:
        """Refuse integers that an IPU can't hold. Arrays were checked before.

        Args:
            batch: Tensors of a call.
            sample_of: Gives the index of the sample in a row of the batch.

        Raises:
            DataError: An integer needs more than 32 bits.
        """
        if not self.is_in_memory:
            check_integers(batch, self.structure, self.name, sample_of)
