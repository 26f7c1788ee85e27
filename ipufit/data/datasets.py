# SPDX-License-Identifier: Apache-2.0
"""Datasets whose samples have an index, `Source`, and `CachedDataset`."""

from __future__ import annotations

import operator
import os
import reprlib
import traceback
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from ipufit._arguments import check_integer
from ipufit._tree import Structure
from ipufit.distributed import Processes
from ipufit.errors import DataError, IpufitWarning, suggesting_constructor, warn

from .arrays import (
    ArrayDataset,
    as_tensor,
    check_integers,
    check_labels,
    dense_tensor,
    split_columns,
    without_columns,
)
from .random_state import HostRandomState, hash_seed, seed_all
from .structure import NOTHING, SampleStructure

ALONE = Processes()


class Source:
    """Samples of one structure.

    Args:
        structure: Structure of a sample.
        num_samples: Number of samples; None if unknown.
        name: Name of the data in error messages.
        dataset: Map-style dataset, whose items are the leaves of `structure`; None for
            a stream.

    Attributes:
        batch_size: Batch size of the user's own loader; None without a loader.
        is_in_memory: Whether the samples are arrays in memory.
        generators: Random generators that the user's own loader draws from.
        is_one_shot: Whether the samples can be iterated over only once.
        num_certain: Number of samples of a pass if it is certain, else None.
        columns: Column names of each array of the inputs; None for arrays that weren't
            frames.
        first_row: Row of the user's arrays that is the first sample.
        num_ahead: Number of samples that workers of the user's own loader load ahead;
            None without workers.
    """

    def __init__(
        self,
        structure: SampleStructure,
        num_samples: int | None,
        name: str = "x",
        dataset: ArrayDataset | FlatDataset | None = None,
    ) -> None:
        self.structure = structure
        self.num_samples = num_samples
        self.name = name
        self.batch_size: int | None = None
        self.dataset = dataset
        self.is_in_memory = isinstance(dataset, ArrayDataset)
        self._first: list[Tensor] = []
        self.generators: Sequence[torch.Generator] = ()
        self.is_one_shot = False
        self.num_certain = None if dataset is None else num_samples
        self.num_ahead: int | None = None
        self.columns: Sequence[Sequence[Any] | None] = ()
        self.first_row = 0
        self._loss_of_labels: Mapping[int, str] = {}
        self._taken_from: tuple[Any, Any, Tensor | None] | None = None
        self._may_be_indices = False

    def first(self) -> list[Tensor]:
        """Return the leaves of the first sample, which is read only once."""
        if not self._first and self.dataset is not None:
            self._first = list(self.dataset[0])
        return list(self._first)

    def take_from(self, dataset: Any, base: Any, rows: Tensor | None) -> None:
        """Remember the user's map-style dataset, which has to keep its samples.

        Args:
            dataset: What the user passed.
            base: The `TensorDataset` or `CachedDataset` behind it; None if none is.
            rows: `[samples]` indices of the rows of `base`; None for all.
        """
        self._taken_from = dataset, getattr(base, "tensors", None) or (), rows

    def begin_epoch(self) -> None:
        """Called before the first call of an epoch or an evaluation.

        Raises:
            DataError: The user's dataset has other samples than when the run began.
        """
        if self._taken_from is None:
            return
        dataset, tensors, rows = self._taken_from
        news = ""
        if len(dataset) != self.num_samples:
            news = f"{self.num_samples} samples when the run began, and {len(dataset)}"
        elif self.is_in_memory:
            base, now = arrays_behind(dataset) or (None, None)
            if [*map(id, getattr(base, "tensors", None) or ())] != [*map(id, tensors)]:
                news = "other tensors when the run began than"
            elif rows is not None and (now is None or not torch.equal(now, rows)):
                news = "other indices when the run began than"
        if news:
            raise DataError(
                f"`{self.name}` had {news} now, which this run can't go on with. Pass "
                "a DataLoader of it, which asks it anew in each epoch; or change it "
                "between two runs."
            )

    def end_epoch(self) -> None:
        """Called after the last call of an epoch or an evaluation."""

    def checksum(self) -> int | None:
        """Return a checksum of some rows of arrays in memory; None for other samples.

        Two sources with the same rows have the same checksum.
        """
        if not isinstance(self.dataset, ArrayDataset) or not len(self.dataset):
            return None
        some = torch.linspace(0, len(self.dataset) - 1, _NUM_CHECKED).round().long()
        checksum = 0
        for rows in self.dataset.gathered(some):
            plain = rows.contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(f"{rows.shape} {rows.dtype}".encode(), checksum)
            checksum = zlib.crc32(plain.numpy().tobytes(), checksum)
        return checksum

    def first_not_finite(self) -> str:
        """Describe the place of the first NaN or infinite value of arrays in memory.

        Returns:
            A sentence; empty if all values are finite, or if the samples aren't in
            memory.
        """
        if not isinstance(self.dataset, ArrayDataset):
            return ""
        rows = slice(None) if self.dataset.rows is None else self.dataset.rows
        for number, tensor in enumerate(self.dataset.tensors):
            bad = tensor.isfinite().logical_not()[rows].numpy()
            if not bad.any():
                continue
            row, *place = map(int, np.unravel_index(bad.argmax(), bad.shape))
            names = dict(enumerate(self.columns)).get(number) or ()
            where = f" at {place}" if place else ""
            if bad.shape[1:] == (len(names),):
                where = f" in column {names[place[0]]!r}"
            return (
                f"`{self.name}` has {bad.sum()} NaN or infinite values in its "
                f"{self.structure.paths()[number]}, the first in row "
                f"{self.first_row + row}{where}: "
                "fill them, or leave their rows out. "
            )
        return ""

    def row_of_target(self, value: float) -> int | None:
        """Return the first row of arrays in memory that has a target.

        Returns:
            A row whose sample weight isn't 0; None if there is none, or if targets of
            several outputs have the value.
        """
        if not isinstance(self.dataset, ArrayDataset):
            return None
        rows, first = self.dataset.rows, self.structure.num_inputs
        flat = [
            (tensor if rows is None else tensor[rows]).reshape(len(self.dataset), -1)
            for tensor in self.dataset.tensors[first:]
        ]
        count = self.structure.targets.num_leaves
        found = [target.eq(value).any(1) for target in flat[:count]]
        found = [has_value for has_value in found if has_value.any()]
        if len(found) != 1:
            return None
        places = torch.stack(found + [w.ne(0).any(1) for w in flat[count:]]).all(0)
        return self.first_row + int(places.nonzero()[0]) if places.any() else None

    def require_targets(self, purpose: str) -> None:
        """Refuse samples without targets, and targets or weights that aren't numbers.

        Raises:
            DataError: Samples have no targets, or targets or weights aren't numbers.
        """
        targets, weights = self.structure.targets, self.structure.weights
        if not weights.num_leaves and weights != NOTHING:
            raise DataError(
                f"The sample weights of `{self.name}` must be numbers: the first is "
                f"{weights.rebuild([])!r}."
            )
        if not targets.num_leaves and targets != NOTHING:
            raise DataError(
                f"The targets of `{self.name}` must be numbers: the first is "
                f"{targets.rebuild([])!r}. Encode them as numbers."
            )
        if not targets.num_leaves:
            raise DataError(
                f"`{self.name}` has no targets to {purpose} with: pass y, or a dataset "
                "of pairs (input, target)."
            )
        is_given = self.is_in_memory and self._taken_from is None  # as sample_weight
        self._may_be_indices = weights.num_leaves == 1 and not is_given

    def require_labels(self, losses: Mapping[int, str]) -> None:
        """Refuse targets that are far from 0 and 1: now in memory, else in `check`.

        Args:
            losses: Place of each such target among the leaves of a sample, and the name
                of its loss.

        Raises:
            DataError: Data in memory has such a target.
        """
        if not isinstance(self.dataset, ArrayDataset):
            self._loss_of_labels = losses
            return
        tensors, rows = self.dataset.tensors, self.dataset.rows
        if rows is None:
            check_labels(tensors, losses, self.name, self.first_row.__add__)
            return
        taken = {place: tensors[place][rows] for place in losses}
        check_labels(taken, losses, self.name, lambda index: int(rows[index]))

    def example(self, rows: int, *, inputs_only: bool = False) -> list[Tensor]:
        """Return a batch of the first sample, repeated `rows` times without copies."""
        leaves = self.first()
        if inputs_only:
            leaves = leaves[: self.structure.num_inputs]
        return [leaf.expand(rows, *leaf.shape) for leaf in leaves]

    def check(self, batch: Sequence[Tensor], sample_of: Callable[[int], int]) -> None:
        """Refuse values that can't be used, except in arrays, checked before.

        Args:
            batch: Tensors of a call.
            sample_of: Maps the index of a row of the batch to the index of its sample.

        Raises:
            DataError: An integer needs more than 32 bits, or a target is far from the
                0s and 1s of its loss.

        Warns:
            IpufitWarning: Sample weights seem to be indices of samples.
        """
        if self._may_be_indices:
            self._may_be_indices = False  # looked at once
            values = batch[self.structure.num_given - 1].reshape(-1).tolist()
            is_whole = all(isinstance(value, int) for value in values)
            if is_whole and len({*values}) == len(batch[0]) == len(values) >= 8:
                warn(
                    f"Samples of `{self.name}` have a third part, which counts as "
                    "their weight in the loss, as in Keras: whole numbers, another one "
                    f"for each, such as {values[0]} and {values[1]}. If these are "
                    "indices or ids, leave them out: return (input, target). If they "
                    "are weights, make them floats.",
                    IpufitWarning,
                )
        if not self.is_in_memory:
            check_integers(batch, self.structure, self.name, sample_of)
            check_labels(batch, self._loss_of_labels, self.name, sample_of, "sample")


@dataclass(frozen=True)
class Parts:
    """Splits a sample or a batch into inputs, targets and sample weights.

    As in Keras, a tuple or list of one to three elements holds these parts, and
    anything else is inputs. Target columns are taken out of a dict by their names.

    Args:
        columns: Names of the target columns; None if targets have no names.
        is_single: Whether the target is a column itself, and not a dict of columns.
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
    numbers = {
        key: array for key, array in arrays.items() if array.dtype.kind in "biuf"
    }
    return {**row, **numbers}


def collate(samples: Any) -> list[Tensor]:
    """Stack flat samples; return results of `__getitems__`, already stacked, as is."""
    is_stacked = isinstance(samples[0], Tensor)
    return list(samples if is_stacked else default_collate(samples))


@dataclass(eq=False)
class FlatDataset(Dataset):  # type: ignore[type-arg]
    """The user's dataset with its samples flattened.

    Args:
        dataset: The user's dataset.
        parts_of: Splits a sample into inputs, targets and weights.
        structure: How a sample nests.
        name: Name of the dataset in error messages.
        convert: Function of a leaf and its name for messages that returns a tensor.
        seed: Seed of the random numbers that samples draw, hashed with the index of the
            pass and the index of the sample; None to leave random numbers alone. A run
            that is resumed in mid-epoch, or with another number of processes, then
            draws the same numbers, although the random states of loading processes
            can't be saved. With a seed, samples are read by keys in place of indices:
            index + index of the pass * number of samples.
        likes: Shape and type of each leaf; empty for those of the first sample.
        error_file: File for the traceback of an error in `__getitems__`; None to write
            no file.
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
        return self.flat(self.dataset[self._seed_sample(index)], index)

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return a batch of samples, for torch's loaders."""
        try:
            together = _find_getitems(self.dataset)
            if together is None:
                items = [self.dataset[self._seed_sample(index)] for index in indices]
            else:
                self._seed_sample(indices[0])
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

    def _seed_sample(self, key: int) -> int:
        """Split a key into pass and sample index, seed from both, return the index."""
        number, index = divmod(int(key), len(self))
        if self.seed is not None:
            seed_all(hash_seed(self.seed, number, index))
        return index

    def flat(self, item: Any, index: int) -> tuple[Tensor, ...]:
        """Return the tensors of a sample, in the order of the first sample's.

        Raises:
            DataError: The sample's structure, shapes or types differ from the first
                sample's, or a leaf isn't a number.
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
        if not all(v.flags.c_contiguous and v.flags.writeable for v in values):
            return None
        values = [torch.from_numpy(value) for value in values]
    dtype = values[0].dtype
    if any(value.dtype is not dtype for value in values):
        return None  # torch would promote them
    stacked = torch.stack(tuple(values))
    # Processes that load stack into shared memory, which has torch's own strides.
    return stacked if get_worker_info() is None else stacked.contiguous()


def _find_getitems(dataset: Any) -> Callable[[Sequence[int]], list[Any]] | None:
    """Return the method that reads several samples at once, or None.

    A `Subset` uses its dataset's method. A class with its own `__getitem__` and an
    inherited `__getitems__` gets None: the latter would bypass the former.
    """
    if type(dataset) is Subset:
        read, chosen = _find_getitems(dataset.dataset), dataset.indices
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
    return together


def is_hugging_face(x: Any) -> bool:
    """Return whether `x` is a dataset of Hugging Face, whose samples are dicts.

    Example:
        >>> is_hugging_face([{"a": 1}])
        False
    """
    return hasattr(x, "column_names") and hasattr(x, "features")


def is_indexed(x: Any) -> bool:
    """Check whether `x` is a dataset whose samples are taken by index."""
    if isinstance(x, (IterableDataset, DataLoader)):
        return False
    is_dataset = isinstance(x, Dataset) or is_hugging_face(x)
    return is_dataset and hasattr(x, "__len__") and hasattr(x, "__getitem__")


_CHUNK_ROWS = 32
"""Number of samples that a process computes and sends at a time for a cache."""

_NUM_CHECKED = 16
"""Number of samples of a dataset in memory that are checked before a run."""


@suggesting_constructor
class CachedDataset(Dataset):  # type: ignore[type-arg]
    """A dataset whose samples are computed once and stored in memory.

    Decoding and transforms run once instead of in every epoch. `fit`, `evaluate` and
    `predict` gather the samples by index, as they do arrays, and return the same
    numbers as with the dataset itself. The cache is a dataset of torch's, too.

    It is filled when it is created, not in the first epoch. A cache that fills while it
    is used would be filled in each data worker, and stay empty in this process.

    All samples are stacked, so that the cache takes the number of samples times the
    bytes of a sample. Tensors and arrays keep their type; numbers become int64, float32
    or bool tensors without axes. No reference to the dataset is kept. A `TensorDataset`
    or another `CachedDataset` is in memory already, and isn't copied.

    Random transforms are frozen, too: every epoch sees the same random numbers. Apply
    them in a dataset around the cache. The caller's random states don't change.

    Args:
        dataset: Has `__len__` and `__getitem__`. Samples nest in tuples, lists and
            dicts, and are tensors, arrays or numbers of one shape and type.
        num_workers: Number of processes that compute samples; 0 to use this one.

    Raises:
        ConfigError: `num_workers` is not a whole number of 0 or more.
        DataError: The dataset is a stream or has no samples; or its samples can't be
            stacked.

    Warns:
        IpufitWarning: Random numbers were drawn in this process.

    Example:
        >>> from torch.utils.data import Dataset
        >>> class Squares(Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, index):  # imagine it were slow
        ...         return torch.full((2,), float(index)), index**2
        >>> cached = CachedDataset(Squares())
        >>> len(cached), cached[3]
        (4, (tensor([3., 3.]), tensor(9)))
        >>> x, y = cached.stacked
        >>> x.shape, y
        (torch.Size([4, 2]), tensor([0, 1, 4, 9]))
    """

    def __init__(self, dataset: Any, num_workers: int = 0) -> None:
        check_integer("num_workers", num_workers)
        self._structure: Structure
        self._tensors: list[Tensor]
        if type(dataset) is CachedDataset:
            self._structure, self._tensors = dataset._structure, dataset._tensors
            return
        _require_map_style(dataset)
        if not len(dataset):
            raise DataError("`dataset` has no samples.")
        if type(dataset) is TensorDataset:  # a subclass may do more
            self._structure = Structure.of(dataset.tensors)
            self._tensors = [dense_tensor(t, "`dataset`") for t in dataset.tensors]
            return
        parts_of = _row_as_inputs if is_hugging_face(dataset) else _as_inputs
        with HostRandomState() as before:
            sample = dataset[0]
            structure = SampleStructure.of(parts_of(sample))
            if not structure.num_inputs:
                raise DataError(
                    f"Sample 0 of `dataset` holds no numbers: {reprlib.repr(sample)}."
                )
            samples = FlatDataset(dataset, parts_of, structure, "dataset", dense_tensor)
            samples.flat(sample, 0)
            likes = samples.likes
            self._structure = structure.inputs
            self._tensors = [torch.empty((len(samples), *s), dtype=t) for s, t in likes]
            first = 0
            for chunk in DataLoader(
                samples,
                batch_size=_CHUNK_ROWS,
                num_workers=num_workers,
                collate_fn=unchanged,
                generator=torch.Generator(),
            ):
                for tensor, part in zip(self._tensors, chunk):
                    tensor[first : first + len(part)] = part
                first += len(chunk[0])
            if before.has_changed():
                warn(
                    "Samples of `dataset` draw random numbers, and the cache freezes "
                    "them for every epoch. Cache the dataset without its random "
                    "transforms, and apply those in a dataset around the cache.",
                    IpufitWarning,
                )

    @property
    def stacked(self) -> Any:
        """All samples, nested like one sample, with leaves `[num_samples, ...]`.

        The leaves are the cache's own memory, not a copy.
        """
        return self._structure.rebuild(self._tensors)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        """Return a copy of one sample; a negative index counts from the end.

        Raises:
            IndexError: There is no such sample.
        """
        at = int(operator.index(index))  # a bool is still one on Python 3.8
        if not -len(self) <= at < len(self):
            raise IndexError(f"There is no sample {at}: there are {len(self)}.")
        return self._structure.rebuild(tensor[at].clone() for tensor in self._tensors)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return copies of several samples, for torch's loaders."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        leaves = [tensor[rows].unbind() for tensor in self._tensors]
        return [self._structure.rebuild(sample) for sample in zip(*leaves)]


def _require_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"`dataset` is a stream ({kind}), whose samples have no index. Make a "
            "map-style dataset of it: list(dataset) is one, if it ends."
        )
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    is_scalar = getattr(dataset, "ndim", 1) == 0
    if not is_indexed or is_scalar or isinstance(dataset, (str, bytes, dict, type)):
        raise DataError(
            f"`dataset` is a {kind}: pass a map-style dataset of samples, with "
            "__len__ and __getitem__; of a loader its `dataset`."
        )


def unchanged(value: Any) -> Any:
    """Return the value, where torch's loader would convert or stack it."""
    return value


def _as_inputs(sample: Any) -> Sequence[Any]:
    return (sample,)


def _row_as_inputs(row: Any) -> Sequence[Any]:
    return (table_row(row),)


def arrays_behind(dataset: Any) -> tuple[Any, Tensor | None] | None:
    """Find the arrays behind a dataset or a subset, and the rows of its samples.

    A subclass may do more than return tensors, so None is returned for it.

    Args:
        dataset: Any dataset.

    Returns:
        A `TensorDataset` or `CachedDataset`, and `[samples]` indices of 0 or more,
        None for all rows; or None if `dataset` isn't such a dataset or a `Subset` of
        such a dataset.

    Example:
        >>> whole = TensorDataset(torch.arange(10))
        >>> _, rows = arrays_behind(Subset(Subset(whole, range(4, 10)), [0, -1]))
        >>> rows
        tensor([4, 9])
    """
    if type(dataset) in (TensorDataset, CachedDataset):
        return dataset, None
    whole = arrays_behind(dataset.dataset) if type(dataset) is Subset else None
    if whole is None:
        return None
    base, rows = whole
    indices = dataset.indices
    try:
        chosen = torch.as_tensor(
            indices if hasattr(indices, "dtype") else list(indices)
        )
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if chosen.dim() != 1 or chosen.dtype not in (torch.int64, torch.int32):
        return None
    at, count = chosen.long(), len(base) if rows is None else len(rows)
    if not len(at) or not bool((at.ge(-count) & at.lt(count)).all()):
        return None
    at = torch.where(at.lt(0), at + count, at)
    return base, at if rows is None else rows[at]
