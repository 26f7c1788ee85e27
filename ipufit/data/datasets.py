# SPDX-License-Identifier: Apache-2.0
"""Map-style datasets whose items are flat tuples of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from ipufit._poptorch import poptorch
from ipufit.errors import DataError

from .random_state import HostRandomState, mixed, seed_all
from .structure import (
    SampleStructure,
    as_tensor,
    is_frame,
    split_columns,
    stacked_leaves,
    without_columns,
)

_SAMPLERS = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def is_array_like(x: Any) -> bool:
    """Whether `x` is an array, a frame, or arrays and frames nested."""
    return (
        isinstance(x, (Tensor, np.ndarray))
        or is_frame(x)
        or (isinstance(x, (tuple, list, Mapping)) and len(x) > 0)
    )


def is_indexed(x: Any) -> bool:
    """Whether `x` is a dataset whose samples are taken by index."""
    if isinstance(x, (IterableDataset, DataLoader)):
        return False
    is_dataset = isinstance(x, Dataset) or is_hugging_face(x)
    return is_dataset and hasattr(x, "__len__") and hasattr(x, "__getitem__")


def is_hugging_face(x: Any) -> bool:
    """Whether `x` looks like a dataset of Hugging Face, whose samples are dicts.

    Example:
        >>> is_hugging_face([{"a": 1}])
        False
    """
    return hasattr(x, "column_names") and hasattr(x, "features")


def is_stream(x: Any) -> bool:
    """Whether `x` is an iterable, but no collection of arrays."""
    return isinstance(x, Iterable) and not isinstance(
        x, (str, bytes, set, frozenset, tuple, list, Mapping)
    )


def batch_size_of(x: Any) -> int | None:
    """The batch size of the user's loader: the samples of one update."""
    if isinstance(x, poptorch.DataLoader):
        combined = x.combinedBatchSize
        return None if combined is None else combined // x.options.device_iterations
    size = getattr(x, "batch_size", None)
    return size if isinstance(size, int) else None


def length_of(x: Any) -> int | None:
    """The number of samples that a torch loader will give; None if unknown."""
    if not isinstance(x, DataLoader) or isinstance(x.dataset, IterableDataset):
        return None
    kind = type(x.batch_sampler)
    is_known = kind is BatchSampler or kind.__module__.startswith("torchdata.")
    if x.batch_size is None or not is_known:
        return None  # a sampler of batches needn't give all of one size
    if isinstance(x, poptorch.DataLoader) or not hasattr(x.sampler, "__len__"):
        return None
    sampler: Any = x.sampler
    count = len(sampler)
    return count - count % x.batch_size if x.drop_last else count


def gives_what_it_says(x: Any) -> bool:
    """Whether the number that `length_of` gives of a loader is certain.

    It isn't where code of the user's may give more or fewer samples: a collate function
    that leaves some out, a sampler, or a loader of another class.

    Example:
        >>> loader = DataLoader(range(8), batch_size=4)
        >>> gives_what_it_says(loader)
        True
        >>> loader.collate_fn = list
        >>> gives_what_it_says(loader)
        False
    """
    return (
        type(x) is DataLoader
        and type(x.sampler) in _SAMPLERS
        and x.collate_fn is default_collate
    )


def num_loaded_ahead(x: Any) -> int | None:
    """The number of samples that a loader's workers load ahead; None without workers.

    Example:
        >>> loader = DataLoader([1], batch_size=4, num_workers=1, prefetch_factor=5)
        >>> num_loaded_ahead(loader)
        20
        >>> num_loaded_ahead(DataLoader(range(8), batch_size=4))
    """
    if not isinstance(x, DataLoader) or not x.num_workers:
        return None
    return (x.prefetch_factor or 2) * x.num_workers * (x.batch_size or 1)


def describe(x: Any) -> str:
    """The type of `x`, for error messages.

    Example:
        >>> describe(3), describe(np.zeros(1))
        ('a int', 'a numpy.ndarray')
    """
    return f"a {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", "")


_Items = List[Any]

_MOST_COMPARED = 32
"""Samples of a batch that are read both ways: a call may have thousands of them."""


class TogetherReader:
    """Reads samples by `__getitems__` if that gives what `__getitem__` gives.

    Of the first batch, and of each that is larger than those before, up to 32 samples
    are read both ways. Both must give the same. `__getitems__` must draw no random
    numbers, because it would draw them in another order, or with other seeds. A dataset
    that fails in either is read sample by sample from then on.

    Args:
        dataset: The user's map-style dataset.

    Example:
        >>> class Numbers(list):
        ...     def __getitems__(self, indices):
        ...         print("together")
        ...         return [self[index] for index in indices]
        >>> numbers = Numbers([5, 6, 7])
        >>> reader = TogetherReader(numbers)
        >>> def read(indices):
        ...     singly = lambda places: [numbers[indices[at]] for at in places]
        ...     return reader.items(indices, singly, lambda places, a, b: a == b)
        >>> read([0, 1])
        together
        [5, 6]
        >>> read([2, 1])
        together
        [7, 6]
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._num_tried = 1  # a batch of one sample says nothing
        self._is_used = together_of(dataset) is not None

    def items(
        self,
        indices: Sequence[int],
        singly: Callable[[Sequence[int]], _Items],
        are_same: Callable[[Sequence[int], _Items, _Items], bool],
    ) -> _Items:
        """The samples of some indices.

        Args:
            indices: Indices of the samples.
            singly: Reads samples one by one, those at some places among the indices.
            are_same: Tells whether two lists of samples are the same, both of those at
                some places.
        """
        places = range(len(indices))
        together = together_of(self._dataset) if self._is_used else None
        if together is None or len(indices) == 1:
            return singly(places)
        before = HostRandomState()
        if len(indices) > self._num_tried:
            self._num_tried = len(indices)
            compared = _compared(len(indices))
            some = singly(compared)
            items = _others(together, indices, compared, some, are_same)
            self._is_used = items is not None
            if len(some) == len(indices):
                return some
        else:
            items = together(indices)
            self._is_used = len(items) == len(indices) and not before.has_changed()
        if items is not None and self._is_used:
            return items
        before.put_back()
        return singly(places)


def _compared(count: int) -> Sequence[int]:
    """Places of samples to compare, from the first to the last of a batch."""
    if count <= _MOST_COMPARED:
        return range(count)
    return [at * (count - 1) // (_MOST_COMPARED - 1) for at in range(_MOST_COMPARED)]


def _others(
    together: Callable[[Sequence[int]], _Items],
    indices: Sequence[int],
    places: Sequence[int],
    some: _Items,
    are_same: Callable[[Sequence[int], _Items, _Items], bool],
) -> _Items | None:
    """Samples that are read together; None unless they are those read singly.

    Args:
        together: The `__getitems__` of the dataset.
        indices: Indices of the samples.
        places: Places among the indices whose samples are compared.
        some: Samples at these places that were read singly.
        are_same: As for `TogetherReader.items`.
    """
    now = HostRandomState()
    seed_all(0)  # other than what the last sample was read with
    before = HostRandomState()
    try:
        items = together(indices)
        if len(items) != len(indices) or before.has_changed():
            return None
        return items if are_same(places, some, [items[at] for at in places]) else None
    except Exception:  # noqa: BLE001 - a method of the user's may raise anything
        return None
    finally:
        now.put_back()


def together_of(dataset: Any) -> Callable[[Sequence[int]], _Items] | None:
    """The method that reads several samples at once; None if there is none to trust.

    A `Subset` reads those of its dataset. A class that has its own `__getitem__` and
    inherits `__getitems__` would be passed over by the latter.
    """
    if type(dataset) is Subset:
        inner, chosen = together_of(dataset.dataset), dataset.indices
        if inner is None:
            return None
        read = inner
        return lambda indices: read([chosen[index] for index in indices])
    together = getattr(dataset, "__getitems__", None)
    if not callable(together) or isinstance(dataset, Subset):
        return None
    mro = type(dataset).__mro__
    definers = [
        next((at for at, kind in enumerate(mro) if name in vars(kind)), len(mro))
        for name in ("__getitems__", "__getitem__")
    ]
    return together if definers[0] <= definers[1] else None


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


@dataclass(frozen=True, eq=False)
class SeededRows(Dataset):  # type: ignore[type-arg]
    """A map-style dataset that seeds all random numbers before it loads a sample.

    Args:
        seed: Seed of the run.

    Example:
        >>> import torch
        >>> from torch.utils.data import Dataset
        >>> class Noise(Dataset):
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return torch.rand(())
        >>> rows = SeededRows(Noise(), seed=1)
        >>> rows[2] == rows[2], rows[2] == rows[2 + 3]  # of the next pass
        (tensor(True), tensor(False))
    """

    dataset: Any
    seed: int

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def __getitem__(self, key: int) -> Any:
        """One sample. Its key is its index + number of the pass * number of samples."""
        return self.dataset[self._begun(key)]

    def __getitems__(self, keys: Sequence[int]) -> Any:
        """A batch of samples: torch's loaders use this method if it exists."""
        indices = [int(key) % len(self) for key in keys]
        if isinstance(self.dataset, ArrayDataset):
            return self.dataset.__getitems__(indices)
        if not isinstance(self.dataset, FlatDataset):
            return [self[key] for key in keys]
        users = self.dataset.dataset
        return self.dataset.batch(
            indices, lambda places: [users[self._begun(keys[at])] for at in places]
        )

    def _begun(self, key: int) -> int:
        """The index of a sample, whose random numbers are seeded now."""
        number, index = divmod(int(key), len(self))
        seed_all(mixed(self.seed, number, index))
        return index
