# SPDX-License-Identifier: Apache-2.0
"""`CachedDataset`: samples that are computed once and stored in memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ipufit._tree import Structure
from ipufit.batching import check_count
from ipufit.errors import DataError

from .datasets import FlatDataset, is_hugging_face, table_row
from .random_state import HostRandomState, mixed, seed_all
from .structure import SampleStructure, dense_tensor

_CHUNK_ROWS = 32
"""Samples that a process computes and sends at a time."""

_NUM_CHECKED = 16
"""Samples that are computed twice before any is stored."""

_NUM_REPEATED = 64
"""Samples that are computed again, at least, if random numbers were drawn."""


class CachedDataset(Dataset):  # type: ignore[type-arg]
    """A dataset whose samples are computed once and stored in memory.

    Decoding and transforms run once instead of in every epoch. `fit`, `evaluate` and
    `predict` gather the samples by index, as they do arrays, and return the same
    numbers as with the dataset itself. The cache is a dataset of torch's, too.

    It is filled when it is created, not in the first epoch. A cache that fills while it
    is used would be filled in each data worker, and stay empty in this process.

    All samples are stacked, so that the cache takes their number times the bytes of
    one. Tensors and arrays keep their type; numbers become int64, float32 or bool
    tensors without axes. No reference to the dataset is kept. A `TensorDataset` or
    another `CachedDataset` is in memory already, and isn't copied.

    Random transforms are refused, because a cache would freeze them. To find them, up
    to 16 samples, spread over the dataset, are computed twice, with different seeds of
    Python, NumPy and torch. If random numbers were drawn, all samples are computed
    twice. Apply such transforms in a dataset around the cache. The caller's random
    states don't change.

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
            return
        parts_of = _row_as_inputs if is_hugging_face(dataset) else _as_inputs
        before = HostRandomState()
        try:
            sample = dataset[0]
            structure = SampleStructure.of(parts_of(sample))
            if not structure.num_inputs:
                raise DataError(
                    f"Sample 0 of `dataset` holds no numbers: {sample!r:.80}."
                )
            samples = FlatDataset(dataset, parts_of, structure, "dataset", dense_tensor)
            samples.flat(sample, 0)
            self._structure = structure.inputs
            self._tensors = _filled(samples, num_workers)
        finally:
            before.put_back()

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
    if not is_indexed or isinstance(dataset, (str, bytes, dict)):
        raise DataError(
            f"`dataset` is a {kind}: pass a map-style dataset of samples, with "
            "__len__ and __getitem__; of a loader its `dataset`."
        )


def _filled(samples: FlatDataset, num_workers: int) -> list[Tensor]:
    """Compute and stack all samples; refuse samples that change.

    Args:
        samples: The dataset; its first sample was read.
        num_workers: Number of processes that compute samples; 0 to use this one.

    Raises:
        DataError: A sample can't be stacked, changes, or there is no memory for all.
    """
    count = len(samples)
    last, spread = count - 1, min(_NUM_CHECKED - 1, count - 1)
    checked = {}
    for index in sorted({last * i // max(spread, 1) for i in range(spread + 1)}):
        chunk = []
        for time in range(2):
            seed_all(mixed(1, time, index))
            try:
                chunk.append([leaf[None].clone() for leaf in samples[index]])
            except DataError as error:
                if time or not index:  # it was computed before
                    raise _not_the_same(index, str(error)) from None
                raise
        _require_same(samples, index, *chunk)
        checked[index] = chunk[0]
    try:
        stored = [torch.empty((count, *s), dtype=t) for s, t in samples.likes]
    except RuntimeError as error:
        sizes = [leaf.numel() * leaf.element_size() for leaf in checked[0]]
        raise DataError(
            f"{count} samples of `dataset`, of {sum(sizes)} bytes each, don't fit into "
            f"memory: {error}. Leave it uncached."
        ) from error

    def store(first: int, chunk: list[Tensor]) -> None:
        for tensor, part in zip(stored, chunk):
            tensor[first : first + len(part)].copy_(part)

    def compare(first: int, chunk: list[Tensor]) -> None:
        _require_same(samples, first, [tensor[first:] for tensor in stored], chunk)

    has_drawn = _each_chunk(samples, mixed(0), num_workers, store)
    for index, leaves in checked.items():
        compare(index, leaves)
    if has_drawn:
        for number in range(-(-_NUM_REPEATED // count)):
            _each_chunk(samples, mixed(2, number), num_workers, compare)
    return stored


def _require_same(
    samples: FlatDataset, first: int, stored: Sequence[Tensor], again: Sequence[Tensor]
) -> None:
    """Refuse samples that change when they are computed again.

    Args:
        samples: The dataset.
        first: Index of the first sample.
        stored: Leaves of the samples, `[count or more, ...]`.
        again: Leaves of the same samples, computed again, `[count, ...]`.
    """
    paths = samples.structure.inputs.paths("sample")
    for path, tensor, new in zip(paths, stored, again):
        old = tensor[: len(new)]
        differs = (old != new) & ~((old != old) & (new != new))  # NaN is like NaN
        counts = differs.reshape(len(new), -1).sum(dim=1)
        if not counts.any():
            continue
        row = int(counts.nonzero()[0])
        raise _not_the_same(
            first + row,
            f"{path} differs in {int(counts[row])} of {new[row].numel()} numbers."
            if new.dim() > 1
            else f"{path} is {old[row].item()} once and {new[row].item()} the next "
            "time.",
        )


def _not_the_same(index: int, reason: str) -> DataError:
    return DataError(
        f"Sample {index} of `dataset` isn't the same when it is computed again: "
        f"{reason} A cache would freeze one of them for every epoch. Cache the "
        "dataset without its random transforms, and apply those in a dataset around "
        "the cache; or leave it uncached."
    )


def _each_chunk(
    samples: FlatDataset,
    seed: int,
    num_workers: int,
    use: Callable[[int, list[Tensor]], None],
) -> bool:
    """Compute all samples; return whether any of them drew random numbers.

    Args:
        samples: The dataset.
        seed: Seed of the random numbers that they draw.
        num_workers: Number of processes that compute samples; 0 to use this one.
        use: Called with the index of a chunk's first sample, and the stacked samples.
    """
    iterator: Any = iter(
        DataLoader(
            _Chunks(samples, seed),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_unchanged,
        )
    )
    has_drawn = False
    try:
        for number, chunk in enumerate(iterator):
            if isinstance(chunk, DataError):
                raise chunk
            leaves, has_chunk_drawn = chunk
            use(number * _CHUNK_ROWS, leaves)
            has_drawn = has_drawn or has_chunk_drawn
    finally:
        if num_workers:
            # The traceback of an error would keep the processes, and torch has no
            # public way to end them.
            iterator._shutdown_workers()
    return has_drawn


@dataclass(frozen=True, eq=False)
class _Chunks(Dataset):  # type: ignore[type-arg]
    """The samples in chunks of `_CHUNK_ROWS`."""

    samples: FlatDataset
    seed: int

    def __len__(self) -> int:
        return -(-len(self.samples) // _CHUNK_ROWS)

    def __getitem__(self, number: int) -> tuple[list[Tensor], bool] | DataError:
        """Return a chunk, and whether random numbers were drawn.

        A DataError is returned and not raised, because torch would bury it in a
        traceback.
        """
        seed_all(mixed(self.seed, number))
        begun = HostRandomState()
        first = number * _CHUNK_ROWS
        rows = []
        try:
            for index in range(first, min(first + _CHUNK_ROWS, len(self.samples))):
                # Copied at once: a dataset may use its memory again.
                rows.append([leaf.clone() for leaf in self.samples[index]])
        except DataError as error:
            return error
        return [torch.stack(leaf) for leaf in zip(*rows)], begun.has_changed()


def _unchanged(value: Any) -> Any:
    return value


def _as_inputs(sample: Any) -> Sequence[Any]:
    return (sample,)


def _row_as_inputs(row: Any) -> Sequence[Any]:
    return (table_row(row),)


def arrays_behind(dataset: Any) -> tuple[Any, Tensor | None] | None:
    """Find the arrays behind a dataset or a subset, and the rows of its samples.

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
