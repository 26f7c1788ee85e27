# SPDX-License-Identifier: Apache-2.0
"""`CachedDataset`: samples that are computed once and kept in memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ipufit._tree import ConstantChangedError, Structure
from ipufit.batching import check_count
from ipufit.errors import DataError

from .datasets import is_hugging_face, table_row
from .random_state import HostRandomState, mixed, seed_all
from .structure import dense_tensor

_CHUNK_ROWS = 32
"""Samples that a process computes and sends at a time."""

_NUM_CHECKED = 16
"""Samples that are computed twice before any is stored."""

_NUM_REPEATED = 64
"""Samples that are computed again, at least, if random numbers were drawn."""


class CachedDataset(Dataset):  # type: ignore[type-arg]
    """The samples of a dataset, computed once and kept in memory.

    Decoding and transforms run once instead of in every epoch. `fit`, `evaluate` and
    `predict` gather the samples by index, as they do arrays, and give the same numbers
    as with the dataset itself. The cache is a dataset of torch's, too.

    It is filled when it is made, not in the first epoch. A cache that fills while it is
    used would be filled in each process that loads, and stay empty in this one.

    All samples are stacked, so that the cache takes their number times the bytes of
    one. Tensors and arrays keep their type; numbers become int64, float32 or bool
    tensors without axes. The dataset itself isn't kept. A `TensorDataset` or another
    `CachedDataset` is in memory already, and is taken without a copy.

    Random transforms are refused, because a cache would freeze them. To find them, up
    to 16 samples, spread over the dataset, are computed twice, with the random numbers
    of Python, NumPy and torch seeded differently. If any were drawn, all samples are
    computed twice. Apply such transforms in a dataset around the cache. The caller's
    random states don't change.

    Args:
        dataset: Has `__len__` and `__getitem__`. Samples nest in tuples, lists and
            dicts, and are tensors, arrays or numbers of one shape and type.
        num_workers: Number of processes that compute samples; 0 to use this one.

    Raises:
        ConfigError: `num_workers` is not a whole number of 0 or more.
        DataError: The dataset is a stream or has no samples; or its samples can't be
            stacked, aren't the same each time, or don't fit into memory.

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
        check_count("num_workers", num_workers)
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
        else:
            before = HostRandomState()
            try:
                rows = _Rows(dataset)
                self._structure, self._tensors = rows.structure, rows.all(num_workers)
            finally:
                before.put_back()

    @property
    def stacked(self) -> Any:
        """All samples, nested as one is, with leaves `[num_samples, ...]`.

        The leaves are the cache's own memory, not a copy.
        """
        return self._structure.rebuild(self._tensors)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        """A copy of one sample; a negative index counts from the end.

        Raises:
            IndexError: There is no such sample.
        """
        at = int(operator.index(index))  # a bool is still one on Python 3.8
        if not -len(self) <= at < len(self):
            raise IndexError(f"There is no sample {at}: there are {len(self)}.")
        return self._structure.rebuild(tensor[at].clone() for tensor in self._tensors)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Copies of several samples: torch's loaders use this method if it exists."""
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
    if not is_indexed or isinstance(dataset, (str, bytes, dict)):
        raise DataError(
            f"`dataset` is a {kind}: pass a map-style dataset of samples, with "
            "__len__ and __getitem__; of a loader its `dataset`."
        )


class _Rows:
    """Samples as lists of tensors, which must look like those of the first sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._is_table = is_hugging_face(dataset)
        sample = self._sample(0)
        self.structure = Structure.of(sample)
        self._paths = self.structure.paths("sample")
        if not self._paths:
            raise DataError(f"Sample 0 of `dataset` holds no numbers: {sample!r:.80}.")
        self._first = self._tensors(sample, 0)

    def __len__(self) -> int:
        return len(self._dataset)

    def _sample(self, index: int) -> Any:
        sample = self._dataset[index]
        return table_row(sample) if self._is_table else sample

    def _tensors(self, sample: Any, index: int) -> list[Tensor]:
        leaves = self.structure.flatten(sample, "sample")
        return [dense_tensor(leaf, f"Sample {index} of `dataset`") for leaf in leaves]

    def leaves(self, index: int, *, is_again: bool = False) -> list[Tensor]:
        """Compute the leaves of a sample.

        Args:
            index: Index of the sample.
            is_again: Whether the sample was computed before.

        Raises:
            DataError: The sample differs from the first one in structure, shape or
                type.
        """
        sample = self._sample(index)
        reason = advice = ""
        try:
            tensors = self._tensors(sample, index)
        except ConstantChangedError as error:
            reason = str(error)
            advice = "Only numbers are stored by sample: leave it out."
        except TypeError as error:
            reason = f"it nests differently: {error}"
            advice = "Give all samples one structure."
        else:
            for path, own, first in zip(self._paths, tensors, self._first):
                if own.shape != first.shape:
                    reason = (
                        f"{path} has shape {tuple(own.shape)}, and had "
                        f"{tuple(first.shape)}"
                    )
                    advice = "Pad or crop samples to one shape."
                elif own.dtype != first.dtype:
                    reason = f"{path} is of {own.dtype}, and was of {first.dtype}"
                    advice = "Convert all samples to one type."
        if not reason:
            return tensors
        if is_again or index == 0:
            raise _not_the_same(index, reason)
        raise DataError(
            f"Sample {index} of `dataset` can't be stacked with sample 0: {reason}. "
            f"{advice}"
        )

    def room(self, count: int) -> list[Tensor]:
        """Make empty tensors for `count` samples."""
        try:
            return [leaf.new_empty((count, *leaf.shape)) for leaf in self._first]
        except RuntimeError as error:
            each = sum(leaf.numel() * leaf.element_size() for leaf in self._first)
            raise DataError(
                f"{count} samples of `dataset`, of {each} bytes each, don't fit into "
                f"memory: {error}. Leave it uncached."
            ) from error

    def all(self, num_workers: int) -> list[Tensor]:
        """Compute and stack all samples; refuse those that change."""
        last, spread = len(self) - 1, min(_NUM_CHECKED - 1, len(self) - 1)
        checked = {}
        for index in sorted({last * i // max(spread, 1) for i in range(spread + 1)}):
            seed_all(mixed(1, 0, index))
            leaves = [leaf[None].clone() for leaf in self.leaves(index)]
            seed_all(mixed(1, 1, index))
            again = [leaf[None] for leaf in self.leaves(index, is_again=True)]
            self._require_same(index, leaves, again)
            checked[index] = leaves
        stored = self.room(len(self))

        def store(first: int, chunk: list[Tensor]) -> None:
            for tensor, part in zip(stored, chunk):
                tensor[first : first + len(part)].copy_(part)

        def compare(first: int, chunk: list[Tensor]) -> None:
            self._require_same(first, [tensor[first:] for tensor in stored], chunk)

        has_drawn = self._each_chunk(mixed(0), num_workers, store)
        for index, leaves in checked.items():
            compare(index, leaves)
        if has_drawn:
            for number in range(-(-_NUM_REPEATED // len(self))):
                self._each_chunk(mixed(2, number), num_workers, compare)
        return stored

    def _require_same(
        self, first: int, stored: Sequence[Tensor], again: Sequence[Tensor]
    ) -> None:
        """Refuse samples that change when they are computed again.

        Args:
            first: Index of the first sample.
            stored: Leaves of the samples, `[count or more, ...]`.
            again: Leaves of the same samples, computed again, `[count, ...]`.
        """
        for path, tensor, new in zip(self._paths, stored, again):
            old = tensor[: len(new)]
            differs = (old != new) & ~((old != old) & (new != new))  # NaN is like NaN
            counts = differs.reshape(len(new), -1).sum(dim=1)
            if not counts.any():
                continue
            row = int(counts.nonzero()[0])
            raise _not_the_same(
                first + row,
                f"{path} differs in {int(counts[row])} of {new[row].numel()} numbers"
                if new.dim() > 1
                else f"{path} is {old[row].item()} once and {new[row].item()} the next "
                "time",
            )

    def _each_chunk(
        self, seed: int, num_workers: int, use: Callable[[int, list[Tensor]], None]
    ) -> bool:
        """Compute all samples; returns whether any of them drew random numbers.

        Args:
            seed: Seed of the random numbers that they draw.
            num_workers: Number of processes that compute samples; 0 to use this one.
            use: Takes the index of the first sample of a chunk, and the stacked
                samples.
        """
        loader: Any = DataLoader(
            _Chunks(self, seed),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_identity,
        )
        iterator = iter(loader)
        has_drawn = False
        try:
            for number, chunk in enumerate(iterator):
                if isinstance(chunk, DataError):
                    raise chunk
                use(number * _CHUNK_ROWS, chunk.leaves)
                has_drawn = has_drawn or chunk.has_drawn
        finally:
            if num_workers:
                # The traceback of an error would keep the processes, and torch has no
                # public way to end them.
                iterator._shutdown_workers()
        return has_drawn


def _not_the_same(index: int, reason: str) -> DataError:
    return DataError(
        f"Sample {index} of `dataset` isn't the same when it is computed again: "
        f"{reason}. A cache would freeze one of them for every epoch. Cache the "
        "dataset without its random transforms, and apply those in a dataset around "
        "the cache; or leave it uncached."
    )


class _Chunk(NamedTuple):
    """Consecutive samples, stacked."""

    leaves: list[Tensor]
    has_drawn: bool


@dataclass(frozen=True, eq=False)
class _Chunks(Dataset):  # type: ignore[type-arg]
    """The samples in chunks of `_CHUNK_ROWS`."""

    rows: _Rows
    seed: int

    def __len__(self) -> int:
        return -(-len(self.rows) // _CHUNK_ROWS)

    def __getitem__(self, number: int) -> _Chunk | DataError:
        """A chunk; or its error, which torch would bury in a traceback if raised."""
        seed_all(mixed(self.seed, number))
        begun = HostRandomState()
        first = number * _CHUNK_ROWS
        count = min(_CHUNK_ROWS, len(self.rows) - first)
        try:
            leaves = self.rows.room(count)
            for row in range(count):  # copied at once: a dataset may reuse its memory
                for leaf, part in zip(leaves, self.rows.leaves(first + row)):
                    leaf[row] = part
        except DataError as error:
            return error
        return _Chunk(leaves, begun.has_changed())


def _identity(chunk: Any) -> Any:
    return chunk


def arrays_behind(dataset: Any) -> tuple[Any, Tensor | None] | None:
    """Find the data in memory that a dataset takes its samples of, and their rows.

    A subclass may do more than give tensors, so it counts as any other dataset.

    Args:
        dataset: Any dataset.

    Returns:
        A `TensorDataset` or `CachedDataset`, and `[samples]` indices of 0 or more,
        None for all; or None if `dataset` is neither one nor a `Subset` of one.

    Example:
        >>> whole = TensorDataset(torch.arange(10))
        >>> _, rows = arrays_behind(Subset(Subset(whole, range(4, 10)), [0, -1]))
        >>> rows
        tensor([4, 9])
    """
    if type(dataset) in (TensorDataset, CachedDataset):
        return dataset, None
    found = arrays_behind(dataset.dataset) if type(dataset) is Subset else None
    if found is None:
        return None
    base, rows = found
    indices = dataset.indices
    try:
        given = torch.as_tensor(indices if hasattr(indices, "dtype") else list(indices))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if given.dim() != 1 or given.dtype not in (torch.int64, torch.int32):
        return None
    at, count = given.long(), len(base) if rows is None else len(rows)
    if not len(at) or not bool((at.ge(-count) & at.lt(count)).all()):
        return None
    at = torch.where(at.lt(0), at + count, at)
    return base, at if rows is None else rows[at]
