# SPDX-License-Identifier: Apache-2.0
"""Make a `Source` of data in any form that users pass."""

from __future__ import annotations

import copy
import reprlib
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ipufit._poptorch import poptorch
from ipufit.distributed import Processes, warn_in_first_process
from ipufit.errors import DataError, IpufitWarning

from . import arrays, loaders
from .arrays import ArrayDataset, FrameColumns, is_array_like
from .datasets import (
    ALONE,
    CachedDataset,
    FlatDataset,
    Parts,
    Source,
    arrays_behind,
    is_hugging_face,
    is_indexed,
    unchanged,
)
from .loaders import (
    DividedLoader,
    FixedSizeBatches,
    IterableRows,
    KerasBatches,
    WholeParts,
    describe,
)
from .random_state import HostRandomState
from .streams import RowsAreNoSamplesError, StreamSource, WholeSource
from .structure import NOTHING, SampleStructure

_OF_SAMPLES = " A list of samples goes into a torch DataLoader."
_MOST_ARRAYS = 8
"""A list of more arrays than this is probably a list of samples."""

_STREAM_ROWS = 64
"""Number of samples of an `IterableDataset` that are stacked to a batch."""


def as_source(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str = "x",
    num_workers: int = 0,
    inputs_only: bool = False,
    left_out: Sequence[str] = (),
    columns: FrameColumns = (),
    processes: Processes = ALONE,
    shuffle: bool = False,
) -> Source:
    """Convert data in any form that users may pass to a source.

    Args:
        x: Tensors, NumPy arrays, pandas frames or sparse matrices, nested in tuples,
            lists or dicts, with samples in dim 0; a map-style `Dataset` or a Hugging
            Face dataset of samples; an `IterableDataset` of samples; or a `DataLoader`,
            a `poptorch.DataLoader`, a generator or another iterable of batches; or
            `FixedSizeBatches`. Samples and batches are an input, `(input, target)` or
            `(input, target, weight)`.
        y: Targets, if `x` is arrays; or the names of the target columns, if `x` has
            named columns.
        sample_weight: One number per sample, if `x` is arrays.
        name: Name of the data in error messages.
        num_workers: Number of processes that load an `IterableDataset`.
        inputs_only: Whether targets and weights in samples are ignored, whatever their
            type.
        left_out: Columns to ignore, if samples have columns.
        columns: `Source.columns` of the data that the model was trained on: these
            columns are taken from frames, in this order.
        processes: Processes that divide the samples. They exchange the beginning of a
            stream.
        shuffle: Whether the batches of a `PyDataset` come in a new order in each pass.

    Raises:
        DataError: The data is of an unusable kind, empty, or of unequal lengths; or a
            stream that isn't the same in all processes.

    Example:
        >>> source = as_source(torch.zeros(5, 2), torch.zeros(5))
        >>> source.num_samples, source.structure.has_targets
        (5, True)
    """
    if isinstance(x, Source):
        return x
    if loaders.is_keras_dataset(x):
        x = KerasBatches(x, shuffle)
    elif isinstance(x, FixedSizeBatches) and loaders.is_keras_dataset(x.batches):
        x = FixedSizeBatches(KerasBatches(x.batches, shuffle), x.mask)
    targets = arrays.column_names(y)
    is_single = isinstance(y, str)
    if is_array_like(x):
        x = arrays.without_columns(x, left_out)
        if targets is not None:
            x, y = arrays.split_columns(x, targets, is_single, f"`{name}`")
        y = None if inputs_only else y
        return from_arrays(x, y, sample_weight, name=name, columns=columns)
    if not is_indexed(x) and not is_stream(x):
        raise DataError(
            f"`{name}` is {describe(x)}. Pass tensors, NumPy arrays, pandas frames, a "
            "torch Dataset (with __getitem__ and __len__), an IterableDataset, a "
            "DataLoader, or a generator of batches. An object whose items are batches "
            "needs DataLoader(x, batch_size=None)."
        )
    has_lists = is_hugging_face(x)
    parts_of = Parts(targets, is_single, name, has_lists, inputs_only, left_out)
    _refuse_beside(x, None if targets else y, sample_weight)
    source: Source
    if isinstance(x, FixedSizeBatches):
        source = _from_whole(x, parts_of, name, processes)
    elif is_indexed(x):
        source = _from_dataset(x, parts_of, name)
    elif isinstance(x, IterableDataset) or is_hugging_face(x):
        workers = num_workers if isinstance(x, IterableDataset) else 0
        source = _from_samples(x, parts_of, name, workers, processes)
    else:
        source = _from_batches(x, parts_of, name, processes)
    _warn_of_weights(source)
    return source


def _warn_of_weights(source: Source) -> None:
    """Warn of a third part that looks like targets, and counts as weights.

    Warns:
        IpufitWarning: The first sample has whole numbers other than 0 and 1 there.
    """
    structure = source.structure
    if structure.weights.num_leaves != 1 or structure.rows is not None:
        return
    for weights in source.first()[-1:]:
        values = weights.reshape(-1)
        odd = values[(values != 0).logical_and(values != 1)].tolist()
        if weights.dim() and not weights.is_floating_point() and odd:
            warn_in_first_process(
                f"The third part of `{source.name}` counts as the weights of positions,"
                f" and has whole numbers, such as {odd[0]}. If it holds the targets, "
                "the first two parts are inputs: return ((a, b), targets). If it holds "
                "weights, make them floats.",
                IpufitWarning,
            )


def as_batch(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    left_out: Sequence[str] = (),
    columns: FrameColumns = (),
) -> Source:
    """Convert one batch of arrays to a source.

    Args:
        x: Arrays of inputs, nested.
        y: Arrays of targets.
        sample_weight: Arrays of weights.
        left_out: Columns to ignore, if `x` has columns.
        columns: As for `as_source`.

    Raises:
        DataError: The arguments must be arrays that a device can take.

    Example:
        >>> as_batch(torch.zeros(5, 2)).num_samples
        5
    """
    if not is_array_like(x):
        raise DataError(
            f"`x` is {describe(x)}. Pass the arrays of one batch, or use fit, "
            "evaluate and predict."
        )
    x = arrays.without_columns(x, left_out)
    return from_arrays(x, y, sample_weight, name="x", columns=columns)


def is_stream(x: Any) -> bool:
    """Return whether `x` is an iterable, but not a collection of arrays."""
    return isinstance(x, Iterable) and not isinstance(
        x, (str, bytes, set, frozenset, tuple, list, Mapping)
    )


def from_arrays(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    name: str,
    columns: FrameColumns = (),
) -> Source:
    """Make a source of nested arrays, whose dim 0 counts samples.

    Args:
        x: Inputs.
        y: Targets; None for no targets.
        sample_weight: Weights; None if all samples weigh the same.
        name: Name of the inputs in error messages.
        columns: As for `as_source`.

    Raises:
        DataError: The arrays are empty, hold no numbers or too large ones, or their
            lengths differ.
    """
    of_set = "" if name == "x" else f" of `{name}`"
    wheres = (f"`{name}`", f"`y`{of_set}", f"`sample_weight`{of_set}")
    x = arrays.mapped(arrays.column_chooser(columns, wheres[0]), x)
    own_columns: list[Any] = []
    arrays.mapped(lambda v: own_columns.append(arrays.columns_of(v)), x)
    values = (x, y, sample_weight)
    parts = [arrays.unframed(value, where) for value, where in zip(values, wheres)]
    structure = SampleStructure.of(parts)
    leaves = []
    for value, where, part in zip(parts, wheres, structure.parts):
        if part == NOTHING and value is None:
            continue
        if not part.num_leaves:
            raise DataError(f"{where} holds no arrays: it is {reprlib.repr(value)}.")
        for leaf in part.flatten(value):
            leaves.append(arrays.checked_tensor(leaf, where))
            if not leaves[-1].dim():
                raise DataError(
                    f"{where} holds a single number where an array belongs: dim 0 "
                    "counts samples. Pass an array with a row for each sample; make a "
                    "list of numbers an array, as with torch.tensor."
                    f"{_OF_SAMPLES if isinstance(value, list) else ''}"
                )
    _check_lengths(structure, leaves, name)
    tensors = arrays.same_rows(leaves, f"`{name}`")
    tensors = [
        leaf if leaf.dtype == torch.float64 else tensor
        for leaf, tensor in zip(leaves, tensors)
    ]
    if not len(tensors[0]):
        raise DataError(f"`{name}` has no samples.")
    source = in_memory(tensors, structure, name)
    source.columns = own_columns
    return source


def in_memory(
    tensors: list[Tensor],
    structure: SampleStructure,
    name: str,
    rows: Tensor | None = None,
) -> Source:
    """Make a source of the leaves of a structure, `[num_samples, ...]`.

    Args:
        tensors: The leaves.
        structure: How samples nest.
        name: Name of the data in error messages.
        rows: Rows of the tensors that are samples; None if all are.

    Raises:
        DataError: An integer needs more than 32 bits.
    """
    checked = tensors
    if rows is not None:  # only integers are looked at
        checked = [t[rows if t.dtype == torch.int64 else rows[:0]] for t in tensors]
    arrays.check_integers(checked, structure, name)
    dataset = ArrayDataset(tensors, rows)
    return Source(structure, len(dataset), name, dataset)


def _check_lengths(
    structure: SampleStructure, leaves: Sequence[Tensor], name: str
) -> None:
    lengths = [len(leaf) for leaf in leaves if leaf.dim()]
    if len(set(lengths)) <= 1:
        return
    num_inputs, num_targets = structure.num_inputs, structure.targets.num_leaves
    parts = {
        "inputs": lengths[:num_inputs],
        "targets": lengths[num_inputs : num_inputs + num_targets],
        "weights": lengths[num_inputs + num_targets :],
    }
    advice = ""
    if any(p.kind is list and p.num_leaves > _MOST_ARRAYS for p in structure.parts):
        advice = (
            " A list has one array for each input or target; make rows of samples "
            "one array, as with torch.stack, or with "
            "torch.nn.utils.rnn.pad_sequence if they have different lengths."
            f"{_OF_SAMPLES}"
        )
    for path, leaf in zip(structure.paths(), leaves):
        is_second = leaf.dim() > 1 and len(leaf) != leaf.shape[1] in lengths
        if (
            is_second
            and not advice
            and all(leaf.shape[1] in o.shape[:2] for o in leaves)
        ):
            advice = (
                f" Dim 1 of the {path} has {leaf.shape[1]}: if it counts samples, as "
                "in [time, samples, ...], pass it with .swapaxes(0, 1)."
            )
    counts = [f"{n} {arrays.short_list(some)}" for n, some in parts.items() if some]
    raise DataError(
        f"The arrays of `{name}` have different numbers of samples: "
        f"{', '.join(counts)}. Dim 0 must be the same for all.{advice}"
    )


def _from_dataset(dataset: Any, parts_of: Parts, name: str) -> Source:
    """Make the source of a dataset whose samples have an index."""
    num_samples = len(dataset)
    if not num_samples:
        raise DataError(f"`{name}` has no samples.")
    base, rows = arrays_behind(dataset) or (None, None)
    if base is not None:
        stacked = base.stacked if isinstance(base, CachedDataset) else base.tensors
        parts = parts_of(stacked)  # nests as a sample does
        structure = SampleStructure.of(parts)
        leaves = structure.flatten(parts)
        # Only samples outside of the subset may be too large for float32.
        if rows is None or all(leaf.dtype != torch.float64 for leaf in leaves):
            where = f"A sample of `{name}`"
            tensors = [arrays.checked_tensor(leaf, where) for leaf in leaves]
            source = in_memory(tensors, structure, name, rows)
            source.take_from(dataset, base, rows)
            return source
    structure = SampleStructure.of(parts_of(dataset[0]))
    flat = FlatDataset(dataset, parts_of, structure, name)
    flat[0]  # bad samples are refused here, not in the middle of a run
    source = Source(structure, num_samples, name, flat)
    source.take_from(dataset, base, rows)
    return source


def _from_samples(
    samples: Any, parts_of: Parts, name: str, num_workers: int, processes: Processes
) -> StreamSource:
    """Make the source of an iterable of samples, which are stacked to batches."""
    is_part = loaders.is_divided(samples, processes, name)
    is_whole_table = getattr(samples, "_distributed", True) is None
    if processes.are_several and is_hugging_face(samples) and is_whole_table:
        # The package is installed, since it has made this dataset.
        from datasets.distributed import (  # type: ignore[import-not-found,unused-ignore]
            split_dataset_by_node,
        )

        samples = split_dataset_by_node(samples, processes.index, processes.count)
        is_part = True
    if not isinstance(samples, IterableDataset) or num_workers > 1:
        samples = IterableRows(samples, name)
    collate = _Collate(parts_of, name)
    loader = DataLoader(
        samples, _STREAM_ROWS, num_workers=num_workers, collate_fn=collate
    )
    return StreamSource(
        loader, unchanged, name=name, processes=processes, is_part=is_part
    )


def _from_batches(
    batches: Any, parts_of: Parts, name: str, processes: Processes
) -> StreamSource:
    """Make the source of a loader or another iterable of batches.

    If several processes read the same torch loader by index, each loads only its own
    samples.
    """
    count, size = loaders.length_of(batches), loaders.batch_size_of(batches)
    settings: dict[str, Any] = {
        "name": name,
        "num_samples": count,
        "processes": processes,
        "is_part": loaders.is_divided(batches, processes, name),
    }
    stream = None
    if processes.are_several and not settings["is_part"]:
        before = HostRandomState(loaders.generators_of(batches))
        if loaders.loads_by_index(batches):
            loader = DividedLoader(batches, processes.index)
            try:
                stream = StreamSource(
                    batches, parts_of, divided_loader=loader, **settings
                )
            except RowsAreNoSamplesError:
                before.put_back()
    if stream is None:
        stream = StreamSource(batches, parts_of, **settings)
    stream.batch_size = size or stream.rows_of_first
    if stream.rows_of_first not in (size, count):
        stream.num_samples = None  # a collate function changes the number of rows
    elif not stream.is_part and loaders.gives_what_it_says(batches):
        stream.num_certain = count
    stream.num_ahead = loaders.num_loaded_ahead(batches)
    if stream.is_part:  # its loader counts the samples of one process
        stream.batch_size *= processes.count
        if stream.num_samples is not None:
            stream.num_samples *= processes.count
    return stream


def _from_whole(
    x: FixedSizeBatches, parts_of: Parts, name: str, processes: Processes
) -> WholeSource:
    """Make the source of batches that are whole micro-batches."""
    batches: Any = x.batches
    options = getattr(batches, "options", None)  # None without a batch size
    if isinstance(batches, poptorch.DataLoader) and options is not None:
        layout = {
            "device iterations": options.device_iterations,
            "gradient accumulation": options.Training.gradient_accumulation,
            "replicas": options.replication_factor,
        }
        joined = [f"{n} {what}" for what, n in layout.items() if n != 1]
        if joined:
            raise DataError(
                f"The loader of `{name}` joins several micro-batches in a batch: its "
                f"options have {', '.join(joined)}. Make it without options: ipufit "
                "takes the layout from IPUConfig, and joins them itself."
            )
    try:
        count = len(batches)
    except (TypeError, NotImplementedError):  # of stream packing in random order
        count = None
    is_part = loaders.is_divided(batches, processes, name)
    stream = WholeSource(
        batches,
        WholeParts(parts_of, x.mask),
        name=name,
        num_samples=count,
        processes=processes,
        is_part=is_part,
    )
    if isinstance(batches, (list, tuple)):
        stream.num_certain = count
    elif is_part and count is not None:  # its loader counts the samples of one process
        stream.num_samples = count * processes.count
    return stream


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


def _refuse_beside(x: Any, y: Any, sample_weight: Any) -> None:
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if isinstance(value, (DataLoader, Dataset)):
            raise DataError(
                f"`{name}` is {describe(value)}, beside {describe(x)}. Pass one "
                "dataset. For validation use fit(train, validation_data=other), and "
                "call evaluate() for each further dataset."
            )
        if value is not None:
            raise DataError(
                f"`{name}` was given beside {describe(x)}, whose samples contain it "
                "themselves: pass arrays, or samples (input, target, weight)."
            )


def example_of(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    inputs_only: bool = False,
    is_whole: bool = False,
    is_spare: bool = False,
    **loading: Any,
) -> Source:
    """Make a source to compile for, and read as little data as possible.

    The first sample of a dataset is read, or the first batch of a loader. Random states
    are restored, so that a later run draws the same numbers as without this call.

    Args:
        x: As for `as_source`. Tensors on the device "meta", which have no values, will
            do too.
        y: As for `as_source`.
        sample_weight: As for `as_source`.
        inputs_only: As for `as_source`.
        is_whole: Whether the source needs the number of samples, too.
        is_spare: Whether `x` isn't used afterwards, so that a generator may lose its
            first batch.
        **loading: Other arguments of `as_source`.

    Raises:
        DataError: The data can't be used, or is a generator that isn't spare.

    Example:
        >>> source = example_of(torch.empty(8, 3, device="meta"))
        >>> source.first()
        [tensor([0., 0., 0.])]
    """
    is_accessor = isinstance(x, poptorch.AsynchronousDataAccessor)
    if hasattr(x, "__next__") and not (is_accessor or is_spare):
        raise DataError(
            f"`x` is {describe(x)}, which can be gone through once: an example would "
            "take its first batch away. Pass one batch, or tensors of its shapes on "
            'the device "meta".'
        )
    if is_array_like(x):
        x, y, sample_weight = arrays.mapped(_filled, (x, y, sample_weight))
    with HostRandomState(loaders.generators_of(x)):
        source = as_source(x, y, sample_weight, inputs_only=inputs_only, **loading)
    if not is_whole and not isinstance(source, StreamSource):
        source = copy.copy(source)
        source.num_samples = None
    return source


def _filled(value: Any) -> Any:
    """Replace a tensor without values by zeros in the memory of one sample."""
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if not value.dim():
        return torch.zeros((), dtype=value.dtype)
    return torch.zeros(value.shape[1:], dtype=value.dtype).expand(value.shape)


def fit_sources(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_split: float,
    validation_data: Any,
    *,
    shuffle: bool = False,
    **loading: Any,
) -> tuple[Source, dict[str, Source]]:
    """Make the source that `fit` trains on, and the sources that it validates on.

    Args:
        x: Training samples in any form that `as_source` takes.
        y: Targets, or names of target columns.
        sample_weight: One number per sample, if `x` is arrays.
        validation_split: Fraction of the samples to validate on; 0 for none. Ignored
            if there is `validation_data`.
        validation_data: Samples of any form, `(x, y)` or `(x, y, sample_weight)`; or
            several such sets by name.
        shuffle: As for `as_source`, in training.
        **loading: Other arguments of `as_source`.

    Returns:
        The training samples; and the validation sets by name. A single set has the
        name `""`. The dict is empty without validation data.

    Raises:
        DataError: The data can't be used, or can't be split.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(4, 1), torch.zeros(4)
        >>> train, validated = fit_sources(x, y, None, 0.5, None)
        >>> train.num_samples, validated[""].num_samples
        (2, 2)
    """
    if validation_data is None and validation_split:
        train, validation = split_validation(x, y, validation_split, sample_weight)
        return train, {"": validation}
    source = as_source(x, y, sample_weight, shuffle=shuffle, **loading)
    if validation_data is None:
        return source, {}
    loading["columns"] = source.columns
    # A loader may allow only one iterator at a time, with processes behind it.
    again = source if isinstance(source, StreamSource) else None
    return source, validation_sources(validation_data, y, x, again, **loading)


def validation_sources(
    validation_data: Any,
    y: Any = None,
    x: Any = None,
    source_of_x: Source | None = None,
    **loading: Any,
) -> dict[str, Source]:
    """Make the sources to validate on.

    Args:
        validation_data: As for `fit_sources`.
        y: Names of target columns, if `validation_data` has columns.
        x: The training data.
        source_of_x: Source of the training data, used if a set is `x` itself; None to
            make a new source.
        **loading: Arguments for `as_source`.

    Returns:
        The sources by the names of the sets; a single set has the name `""`.

    Raises:
        DataError: The data can't be used, or it isn't clear whether it is named sets.
    """
    sources = {}
    for key, data in _named_sets(validation_data, x).items():
        name = f"validation_data[{key!r}]" if key else "validation_data"
        if data is x and source_of_x is not None:
            sources[key] = source_of_x
            continue
        if not isinstance(data, (tuple, list)):
            data = (data, y) if arrays.column_names(y) else (data,)
        elif len(data) not in (2, 3):
            raise DataError(
                f"`{name}` has {len(data)} parts: pass a dataset, a pair (x, y), or "
                "(x, y, sample_weight)."
            )
        sources[key] = as_source(*data, name=name, **loading)
    return sources


def _named_sets(data: Any, x: Any) -> Mapping[str, Any]:
    """Return the validation sets by name; a single set has the name `""`.

    A mapping has named sets if its values are datasets, loaders or tuples (x, y). If
    its values are arrays, or it has the keys of a training input, it is an input.

    Args:
        data: The validation data.
        x: The training data.

    Raises:
        DataError: Some values could be sets and others couldn't, or a name must be a
            string that isn't empty.
    """
    if not isinstance(data, Mapping):
        return {"": data}
    keys = set(x) if isinstance(x, Mapping) else set()

    def is_set(value: Any) -> bool:
        if isinstance(value, Mapping):
            return bool(keys) and set(value) == keys
        is_pair = isinstance(value, (tuple, list)) and len(value) in (2, 3)
        return is_array_like(value[0]) if is_pair else not is_array_like(value)

    unlike = [key for key, value in data.items() if not is_set(value)]
    are_arrays = all(is_array_like(value) for value in data.values())
    if len(unlike) == len(data) or (are_arrays and set(data) == keys):
        return {"": data}
    if unlike:
        one = unlike[0]
        raise DataError(
            f"`validation_data` has sets of samples, and under {one!r} "
            f"{describe(data[one])}: give each set as a dataset, a loader or a tuple "
            "(x, y). If the keys are those of an input, pass (inputs, targets), or a "
            "dataset."
        )
    for name in data:
        if not isinstance(name, str) or not name:
            raise DataError(
                f"`validation_data` has a set with the name {name!r}: use a string "
                "that isn't empty, such as 'test', for metrics called val_test_loss."
            )
    return data


def split_validation(
    x: Any, y: Any, fraction: float, sample_weight: Any = None
) -> tuple[Source, Source]:
    """Split arrays in order: the last samples validate, as in Keras.

    Args:
        x: Arrays of inputs.
        y: Arrays of targets.
        fraction: Fraction of the samples to validate on; between 0 and 1.
        sample_weight: Arrays of weights.

    Returns:
        Training samples, the first `floor(n * (1 - fraction))`, and the rest.

    Raises:
        DataError: The samples aren't in memory, or one part would be empty.

    Example:
        >>> import torch
        >>> x, y = torch.zeros(10, 1), torch.zeros(10)
        >>> [part.num_samples for part in split_validation(x, y, 0.3)]
        [7, 3]
    """
    whole = as_source(x, y, sample_weight)
    if not isinstance(whole.dataset, ArrayDataset) or whole.dataset.rows is not None:
        raise DataError(
            f"validation_split={fraction!r} needs arrays, and `x` is {describe(x)}. "
            "Split it with torch.utils.data.random_split and pass validation_data, or "
            "hold it in memory as ipufit.CachedDataset."
        )
    count = len(whole.dataset)
    at = num_trained_on(count, fraction)
    if not at:
        raise DataError(
            f"validation_split={fraction} of {count} samples leaves {at} "
            "for training: use a fraction between 0 and 1 that leaves some to each."
        )
    tensors = whole.dataset.tensors
    parts = ([t[:at] for t in tensors], [t[at:] for t in tensors])
    train, validation = (
        Source(whole.structure, len(part[0]), name, ArrayDataset(part))
        for name, part in zip(("x", "validation_split"), parts)
    )
    train.columns, validation.first_row = whole.columns, at
    return train, validation


def num_trained_on(count: int, fraction: float) -> int:
    """Count the samples that `validation_split` leaves for training.

    Example:
        >>> num_trained_on(10, 0.25)
        7
    """
    return int(count * (1.0 - fraction)) if 0 < fraction < 1 else 0


_DISTINCT = 64

_RANGES = {torch.uint8: (0, 256), torch.bool: (0, 2)}


def generated_like(source: Source, n: int) -> Source:
    """Make a source of random inputs with the shapes and types of another source.

    Whole numbers are drawn from the range of the first sample's numbers. Targets and
    weights are copies of the first sample's, because random values may be out of the
    range of a class, a probability or a weight.

    Args:
        source: The source to imitate.
        n: Number of samples. 64 samples are drawn and repeated.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for place, leaf in enumerate(source.first()):
        example = arrays.as_tensor(leaf, source.name)
        if place >= source.structure.num_inputs:
            tensors.append(torch.stack([example] * n))
            continue
        shape, dtype = (min(n, _DISTINCT), *example.shape), example.dtype
        if dtype.is_floating_point:
            drawn = torch.randn(shape, generator=generator)
        else:
            values = [0, *example.reshape(-1).tolist()]
            least, bound = _RANGES.get(dtype, (min(values), max(values) + 1))
            drawn = torch.randint(least, bound, shape, generator=generator)
        tensors.append(drawn.to(dtype)[torch.arange(n) % len(drawn)])
    return in_memory(tensors, source.structure, source.name)
