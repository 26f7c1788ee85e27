# SPDX-License-Identifier: Apache-2.0
"""Whatever holds the user's samples becomes a `Source`.

Arrays and map-style datasets are taken by index; loaders, iterables and generators
are streams, whose own samplers, collate functions and workers are kept.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, Sized, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ipufit.errors import DataError

from .cached import CachedDataset
from .datasets import ArrayDataset, FlatDataset, IterableRows, Parts
from .kinds import (
    batch_size_of,
    describe,
    is_array_like,
    is_hugging_face,
    is_indexed,
    is_stream,
    length_of,
)
from .ranges import check_integers
from .source import IndexedSource, Source, StreamSource, same_rows, short_list
from .structure import NOTHING, SampleStructure
from .values import (
    as_tensor,
    column_names,
    frame_values,
    is_frame,
    split_columns,
    without_columns,
)

_STREAM_ROWS = 64
"""Samples that are stacked at a time when a dataset gives them one by one."""

_MOST_PARTS = 8
"""Arrays in a list that is taken for inputs or targets, and not for samples."""


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str = "x",
    num_workers: int = 0,
    inputs_only: bool = False,
    left_out: Sequence[str] = (),
) -> Source:
    """Take samples in any of the forms that users have them.

    Args:
        x: Tensors, NumPy arrays or pandas frames, nested in tuples, lists or dicts,
            with samples in dim 0; a map-style `Dataset` or a Hugging Face dataset of
            samples; an `IterableDataset` of samples; or a `DataLoader`, a
            `poptorch.DataLoader`, a generator or another iterable of batches. Samples
            and batches are an input, `(input, target)` or `(input, target, weight)`.
        y: The targets, if `x` is arrays; or the names of the columns that are targets,
            if `x` has named columns.
        sample_weight: One number per sample, if `x` is arrays.
        name: What messages call the data.
        num_workers: Processes that load an `IterableDataset`.
        inputs_only: Whether the targets and weights in samples are left alone,
            whatever they are.
        left_out: Columns that count as not there, if samples have columns.

    Returns:
        The samples.

    Raises:
        DataError: Of a kind that can't be used, empty, or of unequal lengths.

    Example:
        >>> source = as_source(torch.zeros(5, 2), torch.zeros(5))
        >>> source.num_samples, source.structure.has_targets
        (5, True)
    """
    if isinstance(x, Source):
        return x
    columns = column_names(y)
    is_single = isinstance(y, str)
    parts_of = Parts(
        columns,
        is_single,
        name,
        has_lists=is_hugging_face(x),
        inputs_only=inputs_only,
        left_out=left_out,
    )
    if type(x) is TensorDataset and len(x.tensors) <= 3:  # a subclass may do more
        _refuse_beside(x, y, sample_weight, name)
        return _from_arrays(*parts_of(x.tensors), name=name)
    if type(x) is CachedDataset:
        _refuse_beside(x, None if columns else y, sample_weight, name)
        return _from_cache(x, parts_of, name)
    if is_array_like(x):
        x = without_columns(x, left_out)
        if columns is not None:
            where = f"`{name}`"
            frame, x = x, _columns_of(x)
            x, y = split_columns(x, columns, is_single, where)
            x = frame[list(x)] if is_frame(frame) else x
        return _from_arrays(x, None if inputs_only else y, sample_weight, name=name)
    if is_indexed(x) or is_stream(x):
        _refuse_beside(x, None if columns else y, sample_weight, name)
    if is_indexed(x):
        return _from_dataset(x, parts_of, name)
    is_torchs = isinstance(x, IterableDataset)
    if is_torchs or (is_hugging_face(x) and is_stream(x)):
        loader = DataLoader(
            x if is_torchs else IterableRows(x),
            batch_size=_STREAM_ROWS,
            num_workers=num_workers if is_torchs else 0,
            collate_fn=_Collate(parts_of, name),
        )
        return StreamSource(loader, _identity, name=name)
    if is_stream(x):
        stream = StreamSource(x, parts_of, name=name, num_samples=length_of(x))
        stream.batch_size = batch_size_of(x) or stream.rows_of_first
        if stream.rows_of_first not in (batch_size_of(x), stream.num_samples):
            stream.num_samples = None  # a collate function makes rows of its own
        return stream
    raise DataError(
        f"`{name}` is {describe(x)}. Pass tensors, NumPy arrays, pandas frames, a "
        "torch Dataset (with __getitem__ and __len__), an IterableDataset, a "
        "DataLoader, or a generator of batches."
    )


def as_batch(
    x: Any, y: Any = None, sample_weight: Any = None, *, left_out: Sequence[str] = ()
) -> StreamSource:
    """Take one batch of arrays, as it is.

    Args:
        x: Arrays of inputs, nested.
        y: Arrays of targets.
        sample_weight: Arrays of weights.
        left_out: Columns that count as not there, if `x` has columns.

    Returns:
        A stream of one block.

    Raises:
        DataError: As `as_source` does.

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
    _from_arrays(x, y, sample_weight, name="x")
    parts = [_plain(part, "`x`") for part in (x, y, sample_weight)]
    return StreamSource([parts], _identity, name="x")


def fit_sources(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_split: float,
    validation_data: Any,
    *,
    num_workers: int = 0,
) -> tuple[Source, Source | None]:
    """What `fit` trains on, and what it validates on if anything.

    Args:
        x: As for `as_source`.
        y: As for `as_source`.
        sample_weight: As for `as_source`.
        validation_split: As for `split_validation`; 0 for none.
        validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`;
            they go before the split.
        num_workers: As for `as_source`.

    Returns:
        Both.

    Raises:
        DataError: As `as_source` and `split_validation` do.

    Example:
        >>> x, y = torch.zeros(4, 1), torch.zeros(4)
        >>> train, validation = fit_sources(x, y, None, 0.5, None)
        >>> train.num_samples, validation.num_samples
        (2, 2)
    """
    if validation_data is None:
        if validation_split:
            return split_validation(x, y, validation_split, sample_weight)
        return as_source(x, y, sample_weight, num_workers=num_workers), None
    source = as_source(x, y, sample_weight, num_workers=num_workers)
    if validation_data is x and isinstance(source, StreamSource):
        # A loader may have but one iterator, with processes behind it.
        return source, source
    given = validation_data
    if not isinstance(given, (tuple, list)):
        given = (given, y) if column_names(y) else (given,)
    elif len(given) not in (2, 3):
        raise DataError(
            f"`validation_data` has {len(given)} parts: pass a dataset, a pair (x, y), "
            "or (x, y, sample_weight)."
        )
    validation = as_source(*given, name="validation_data", num_workers=num_workers)
    return source, validation


def split_validation(
    x: Any, y: Any, fraction: float, sample_weight: Any = None
) -> tuple[Source, Source]:
    """Put the last samples aside, before any shuffling, as Keras does.

    Args:
        x: Arrays of inputs.
        y: Arrays of targets.
        fraction: Of the samples that validate; between 0 and 1.
        sample_weight: Arrays of weights.

    Returns:
        Training and validation samples: `floor(n * (1 - fraction))`, and the rest.

    Raises:
        DataError: Not arrays, or one part would be empty.

    Example:
        >>> x, y = torch.zeros(10, 1), torch.zeros(10)
        >>> [part.num_samples for part in split_validation(x, y, 0.3)]
        [7, 3]
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise DataError(f"validation_split={fraction!r} is not a number.")
    whole = as_source(x, y, sample_weight)
    if not isinstance(whole, IndexedSource) or not isinstance(
        whole.dataset, ArrayDataset
    ):
        raise DataError(
            f"validation_split={fraction} needs arrays, and `x` is {describe(x)}. "
            "Split it with torch.utils.data.random_split and pass validation_data, or "
            "hold it in memory as ipufit.CachedDataset."
        )
    at = int(whole.num_samples * (1.0 - fraction)) if 0 < fraction < 1 else 0
    if not at:
        raise DataError(
            f"validation_split={fraction} of {whole.num_samples} samples leaves {at} "
            "for training: use a fraction between 0 and 1 that leaves some to each."
        )
    tensors = whole.dataset.tensors
    parts = ([t[:at] for t in tensors], [t[at:] for t in tensors])
    train, validation = (
        IndexedSource(ArrayDataset(part), whole.structure, len(part[0]))
        for part in parts
    )
    return train, validation


def _from_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, *, name: str
) -> IndexedSource:
    wheres = (f"`{name}`", "`y`", "`sample_weight`")
    values = (x, y, sample_weight)
    given = [_plain(value, where) for value, where in zip(values, wheres)]
    structure = SampleStructure.of(given)
    for value, where, part in zip(given, wheres, structure.parts):
        if part == NOTHING and value is None:
            continue
        if not part.num_leaves:
            raise DataError(f"{where} holds no arrays: it is {str(value)[:80]}.")
        if any(isinstance(n, (bool, int, float)) for n in part.flatten(value)):
            raise DataError(
                f"{where} holds a single number where an array belongs: dim 0 counts "
                "samples. Make a list of numbers an array, as with torch.tensor."
            )
    leaves = structure.flatten(given)
    leaves = [as_tensor(leaf, f"`{name}`") for leaf in leaves]
    _check_lengths(structure, leaves, name)
    tensors = same_rows(leaves, f"`{name}`")
    if not len(tensors[0]):
        raise DataError(f"`{name}` has no samples.")
    return _in_memory(tensors, structure, name)


def _in_memory(
    tensors: list[Tensor], structure: SampleStructure, name: str
) -> IndexedSource:
    check_integers(tensors, structure, name)
    return IndexedSource(ArrayDataset(tensors), structure, len(tensors[0]), name)


def _check_lengths(
    structure: SampleStructure, leaves: Sequence[Tensor], name: str
) -> None:
    lengths = [len(leaf) for leaf in leaves if leaf.dim()]
    if len(set(lengths)) > 1:
        inputs, targets = structure.num_inputs, structure.targets.num_leaves
        parts = {
            "inputs": lengths[:inputs],
            "targets": lengths[inputs : inputs + targets],
            "weights": lengths[inputs + targets :],
        }
        advice = ""
        if any(
            part.kind is list and part.num_leaves > _MOST_PARTS
            for part in structure.parts
        ):
            advice = (
                " A list has one array for each input or target; make rows of samples "
                "one array, as with numpy.stack or torch.stack."
            )
        told = [f"{n} {short_list(some)}" for n, some in parts.items() if some]
        raise DataError(
            f"The arrays of `{name}` have different numbers of samples: "
            f"{', '.join(told)}. Dim 0 must be the same for all.{advice}"
        )


def _from_dataset(dataset: Any, parts_of: Parts, name: str) -> IndexedSource:
    num_samples = len(cast(Sized, dataset))
    if not num_samples:
        raise DataError(f"`{name}` has no samples.")
    structure = SampleStructure.of(parts_of(dataset[0]))
    flat = FlatDataset(dataset, parts_of, structure, name)
    flat[0]  # bad samples are refused here, not in the middle of a run
    return IndexedSource(flat, structure, num_samples, name)


def _from_cache(dataset: CachedDataset, parts_of: Parts, name: str) -> IndexedSource:
    parts = parts_of(dataset.stacked)  # nests as a sample does
    structure = SampleStructure.of(parts)
    leaves = [as_tensor(leaf, "A cached sample") for leaf in structure.flatten(parts)]
    return _in_memory(leaves, structure, name)


class _Collate:
    """Stacks the samples of an iterable dataset into a batch `(inputs, ...)`."""

    def __init__(self, parts_of: Parts, name: str) -> None:
        self._parts_of = parts_of
        self._name = name

    def __call__(self, samples: Sequence[Any]) -> Sequence[Any]:
        structure = SampleStructure.of(self._parts_of(samples[0]))
        rows = FlatDataset(samples, self._parts_of, structure, self._name)
        flat = [rows[index] for index in range(len(rows))]
        try:
            leaves = [torch.stack(leaf) for leaf in zip(*flat)]
        except RuntimeError as error:
            raise unequal_shapes(error) from error
        return _rebuilt(structure, leaves)


def _rebuilt(structure: SampleStructure, leaves: Sequence[Any]) -> Sequence[Any]:
    rest = iter(leaves)
    return [None if s == NOTHING else s.rebuild(rest) for s in structure.parts]


def unequal_shapes(error: RuntimeError) -> DataError:
    """What to say of samples that can't be stacked."""
    return DataError(
        "Samples of different shapes can't share a call, because the shapes of a "
        f"compiled model are fixed: {error}. Pad or crop them to one shape."
    )


def _identity(parts: Any) -> Any:
    return parts


def _plain(value: Any, where: str) -> Any:
    """Nested arrays with every frame among them made an array."""
    if is_frame(value):
        return frame_values(value, where)
    if isinstance(value, Mapping):
        return {key: _plain(element, where) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(element, where) for element in value)
    return value


def _columns_of(x: Any) -> Any:
    return {name: x[name] for name in x.columns} if is_frame(x) else x


def _refuse_beside(x: Any, y: Any, sample_weight: Any, name: str) -> None:
    for what, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise DataError(
                f"`{what}` was given beside {describe(x)}, whose samples contain it "
                "themselves: pass arrays, or samples (input, target, weight)."
            )
