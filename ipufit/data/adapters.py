# SPDX-License-Identifier: Apache-2.0
"""Makes a `Source` of whatever holds the user's samples.

Arrays and map-style datasets are taken by index. Loaders, iterables and generators
are streams, which keep their own samplers, collate functions and workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ipufit.distributed import Processes
from ipufit.errors import DataError

from .arrays import from_arrays, in_memory, unframed
from .asking import PartsOfNoted, noting
from .cached import CachedDataset
from .columns import column_names, is_frame, split_columns, without_columns
from .datasets import FlatDataset, IterableRows, Parts
from .host_random import HostRandomState
from .kinds import (
    batch_size_of,
    describe,
    gives_what_it_says,
    is_array_like,
    is_hugging_face,
    is_indexed,
    is_stream,
    length_of,
    num_loaded_ahead,
)
from .own_loading import OwnLoading
from .passes import generators_of
from .source import (
    ALONE,
    IndexedSource,
    RowsAreNoSamplesError,
    Source,
    StreamSource,
)
from .stream_kinds import divided_by_its_rule, has_own_indices, is_own_part_of
from .structure import NOTHING, SampleStructure
from .subsets import arrays_behind
from .values import as_tensor
from .worker_samples import WorkerSamples

_STREAM_ROWS = 64
"""Samples that are stacked at a time when a dataset gives them one by one."""


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str = "x",
    num_workers: int = 0,
    inputs_only: bool = False,
    left_out: Sequence[str] = (),
    processes: Processes = ALONE,
) -> Source:
    """Take samples in any of the forms that users have them.

    Args:
        x: Tensors, NumPy arrays or pandas frames, nested in tuples, lists or dicts,
            with samples in dim 0; a map-style `Dataset` or a Hugging Face dataset of
            samples; an `IterableDataset` of samples; or a `DataLoader`, a
            `poptorch.DataLoader`, a generator or another iterable of batches. Samples
            and batches are an input, `(input, target)` or `(input, target, weight)`.
        y: Targets, if `x` is arrays; or the names of the target columns, if `x` has
            named columns.
        sample_weight: One number per sample, if `x` is arrays.
        name: Name of the data in error messages.
        num_workers: Number of processes that load an `IterableDataset`.
        inputs_only: Whether the targets and weights in samples are ignored, whatever
            they are.
        left_out: Columns to ignore, if samples have columns.
        processes: Processes that divide the samples. They exchange what a stream
            begins with.

    Raises:
        DataError: The data is of a kind that can't be used, empty, or of unequal
            lengths; or a stream that isn't the same in all processes.

    Example:
        >>> source = as_source(torch.zeros(5, 2), torch.zeros(5))
        >>> source.num_samples, source.structure.has_targets
        (5, True)
    """
    if isinstance(x, Source):
        return x
    columns = column_names(y)
    is_single = isinstance(y, str)
    if is_array_like(x):
        x = without_columns(x, left_out)
        if columns is not None:
            x, y = _split_table(x, columns, is_single, f"`{name}`")
        return from_arrays(x, None if inputs_only else y, sample_weight, name=name)
    if not is_indexed(x) and not is_stream(x):
        raise DataError(
            f"`{name}` is {describe(x)}. Pass tensors, NumPy arrays, pandas frames, a "
            "torch Dataset (with __getitem__ and __len__), an IterableDataset, a "
            "DataLoader, or a generator of batches."
        )
    has_lists = is_hugging_face(x)
    parts_of = Parts(columns, is_single, name, has_lists, inputs_only, left_out)
    # A subclass of TensorDataset may do more than give its tensors.
    is_tensors = type(x) is TensorDataset and len(x.tensors) <= 3
    _refuse_beside(x, None if columns and not is_tensors else y, sample_weight)
    if is_tensors:
        return from_arrays(*parts_of(x.tensors), name=name)
    if type(x) is CachedDataset:
        return _from_cache(x, parts_of, name)
    found = arrays_behind(x)
    if found is not None:
        source = _from_subset(*found, parts_of, name)
        if source is not None:
            return source
    if is_indexed(x):
        return _from_dataset(x, parts_of, name)
    if isinstance(x, IterableDataset):
        return _from_samples(x, parts_of, name, num_workers, processes)
    if is_hugging_face(x):
        return _from_samples(x, parts_of, name, 0, processes)
    return _from_batches(x, parts_of, name, processes)


def as_batch(
    x: Any, y: Any = None, sample_weight: Any = None, *, left_out: Sequence[str] = ()
) -> StreamSource:
    """Take one batch of arrays, as a stream of one block.

    Args:
        x: Arrays of inputs, nested.
        y: Arrays of targets.
        sample_weight: Arrays of weights.
        left_out: Columns to ignore, if `x` has columns.

    Raises:
        DataError: These are no arrays, or arrays that can't be used.

    Example:
        >>> as_batch(torch.zeros(5, 2)).rows_of_first
        5
    """
    if not is_array_like(x):
        raise DataError(
            f"`x` is {describe(x)}. Pass the arrays of one batch, or use fit, "
            "evaluate and predict."
        )
    x = without_columns(x, left_out)
    from_arrays(x, y, sample_weight, name="x")  # refuses what can't be used
    parts = [unframed(part, "`x`") for part in (x, y, sample_weight)]
    return StreamSource([parts], _identity, name="x")


def _from_dataset(dataset: Any, parts_of: Parts, name: str) -> IndexedSource:
    num_samples = len(dataset)
    if not num_samples:
        raise DataError(f"`{name}` has no samples.")
    structure = SampleStructure.of(parts_of(dataset[0]))
    flat = FlatDataset(dataset, parts_of, structure, name)
    flat[0]  # bad samples are refused here, not in the middle of a run
    return IndexedSource(flat, structure, num_samples, name)


def _from_cache(dataset: CachedDataset, parts_of: Parts, name: str) -> IndexedSource:
    parts = parts_of(dataset.stacked)  # nests as a sample does
    structure = SampleStructure.of(parts)
    leaves = structure.flatten(parts)
    tensors = [as_tensor(leaf, "A cached sample") for leaf in leaves]
    return in_memory(tensors, structure, name)


def _from_subset(
    base: Any, rows: Tensor, parts_of: Parts, name: str
) -> IndexedSource | None:
    """Samples of a subset of data in memory; None if it has to be converted."""
    is_cache = type(base) is CachedDataset
    parts = parts_of(base.stacked if is_cache else base.tensors)
    structure = SampleStructure.of(parts)
    leaves = structure.flatten(parts)
    if any(leaf.dtype == torch.float64 for leaf in leaves):
        return None  # as float32 only samples of the subset may be too large
    tensors = [as_tensor(leaf, f"A sample of `{name}`") for leaf in leaves]
    return in_memory(tensors, structure, name, rows)


def _from_samples(
    samples: Any, parts_of: Parts, name: str, num_workers: int, processes: Processes
) -> StreamSource:
    samples = divided_by_its_rule(samples, processes)
    is_own_part = processes.are_several and is_own_part_of(samples, processes, name)
    if not isinstance(samples, IterableDataset):
        samples = IterableRows(samples)
    if num_workers > 1:
        samples = WorkerSamples(samples, name)
    collate = _Collate(parts_of, name)
    loader = DataLoader(
        samples, _STREAM_ROWS, num_workers=num_workers, collate_fn=collate
    )
    return _stream(loader, _identity, name, None, processes, is_own_part)


def _from_batches(
    batches: Any, parts_of: Parts, name: str, processes: Processes
) -> StreamSource:
    count, size = length_of(batches), batch_size_of(batches)
    is_own_part = processes.are_several and is_own_part_of(batches, processes, name)
    stream = _stream(batches, parts_of, name, count, processes, is_own_part)
    stream.batch_size = size or stream.rows_of_first
    if stream.rows_of_first not in (size, count):
        stream.num_samples = None  # a collate function makes rows of its own
    elif not stream.is_own_part and gives_what_it_says(batches):
        stream.num_certain = count
    stream.num_ahead = num_loaded_ahead(batches)
    if stream.is_own_part:  # its loader counts those of one process
        stream.batch_size *= processes.count
        if stream.num_samples is not None:
            stream.num_samples *= processes.count
    return stream


def _stream(
    blocks: Any,
    parts_of: Callable[[Any], Sequence[Any]],
    name: str,
    count: int | None,
    processes: Processes,
    is_own_part: bool,
) -> StreamSource:
    """A stream of batches, taken apart where several processes share a loader's."""
    settings: dict[str, Any] = {"name": name, "num_samples": count}
    if not processes.are_several:
        return StreamSource(blocks, parts_of, **settings)
    settings.update(processes=processes, is_own_part=is_own_part or None)
    if not is_own_part and has_own_indices(blocks):
        before = HostRandomState(generators_of(blocks))
        loading = OwnLoading(blocks, processes.index)
        try:
            return StreamSource(blocks, parts_of, own_loading=loading, **settings)
        except RowsAreNoSamplesError:
            before.put_back()
    noted = None if is_own_part else noting(blocks)
    if noted is not None:
        return StreamSource(noted, PartsOfNoted(parts_of), **settings)
    return StreamSource(blocks, parts_of, **settings)


@dataclass(frozen=True)
class _Collate:
    """Stacks the samples of an iterable dataset into a batch `(inputs, ...)`."""

    parts_of: Parts
    name: str

    def __call__(self, samples: Sequence[Any]) -> Sequence[Any]:
        structure = SampleStructure.of(self.parts_of(samples[0]))
        rows = FlatDataset(samples, self.parts_of, structure, self.name)
        flat = [rows[index] for index in range(len(rows))]
        leaves = iter([torch.stack(leaf) for leaf in zip(*flat)])
        return [None if s == NOTHING else s.rebuild(leaves) for s in structure.parts]


def _identity(parts: Any) -> Any:
    return parts


def _split_table(
    table: Any, columns: Sequence[str], is_single: bool, where: str
) -> tuple[Any, Any]:
    """Inputs and targets of a frame or a dict of arrays."""
    if not is_frame(table):
        return split_columns(table, columns, is_single, where)
    series = {name: table[name] for name in getattr(table, "columns", ())}
    inputs, targets = split_columns(series, columns, is_single, where)
    return table[list(inputs)], targets


def _refuse_beside(x: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if isinstance(value, DataLoader):
            raise DataError(
                f"`{name}` is a loader, beside {describe(x)}. Pass one loader: several "
                "are gone through one after the other, each by its own evaluate()."
            )
        if value is not None:
            raise DataError(
                f"`{name}` was given beside {describe(x)}, whose samples contain it "
                "themselves: pass arrays, or samples (input, target, weight)."
            )
