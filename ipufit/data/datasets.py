# SPDX-License-Identifier: Apache-2.0
"""Structure of samples, datasets whose items are flat tuples of tensors, and caches."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import os
import traceback
import warnings
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    _utils,
    default_collate,
    get_worker_info,
)

from ipufit._arguments import check_whole, shown
from ipufit._tree import ConstantChangedError, Structure
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.errors import DataError, IpufitWarning, warn

from .random_state import HostRandomState, seed_all

NOTHING = Structure(tuple)
"""The structure of targets or weights that samples don't have."""


def mixed(*numbers: int) -> int:
    """Hash several numbers to a seed of 63 bits.

    Example:
        >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
        (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Batch(NamedTuple):
    """The tensors of a batch, in the order in which programs take them.

    Attributes:
        inputs: Leaves of the inputs.
        targets: Leaves of the targets; empty without targets.
        weights: Leaves of the sample weights; empty without weights.
        share: One tensor, the weight of each row in the loss of its update; of batches
            that are whole micro-batches at first a mask. Empty without padding.
        divisors: One tensor, `[rows, indices * targets]`: the number of targets of the
            update that aren't ignored, divided by its micro-batches. Empty if nothing
            is counted.
        mixing: One tensor, that of `ipufit.mixing.Coefficients`; empty without mixing.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any] = ()
    weights: Sequence[Any] = ()
    share: Sequence[Any] = ()
    divisors: Sequence[Any] = ()
    mixing: Sequence[Any] = ()

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return [*itertools.chain.from_iterable(self)]


class Labels(NamedTuple):
    """The part of a batch that outputs are compared with.

    Attributes:
        targets: Nested tensors; `()` if the samples have no targets.
        weights: Sample weights: one tensor, or nested as the outputs. None without
            weights.
        share: Weight of each row in the loss of its update, `[rows]`. Padding has 0 and
            the other rows more than 1, so that the loss is the mean over unpadded rows.
            None without padding.
        counted: For each index that is counted, nested as the targets: `[rows]`, the
            number of the update's targets that aren't ignored, divided by its
            micro-batches. None if each micro-batch is an update.
    """

    targets: Any = ()
    weights: Any = None
    share: Tensor | None = None
    counted: Any = None


def _has_packed(part: Structure) -> bool:
    return part.kind is PackedSequence or any(map(_has_packed, part.children))


@dataclass(frozen=True)
class SampleStructure:
    """The structure of the inputs, targets and weights of a sample or a batch.

    Attributes:
        inputs: Structure of the inputs.
        targets: Structure of the targets; without leaves if there are none.
        weights: Structure of the sample weights; without leaves if there are none.
        is_padded: Whether a batch has `Batch.share`.
        ignored: Indices of ignored targets that are counted for each update: a batch
            then has `Batch.divisors`. None if nothing must be counted, because each
            micro-batch is an update.
        is_mixed: Whether a batch has `Batch.mixing`.
        rows: Samples and padding of an item that is a whole micro-batch; None if an
            item is a sample. The tensors of such items are `[items, ...]`, and their
            last one, `[items, rows]`, is above 0 for samples: a mask or the shares.

    Example:
        >>> structure = SampleStructure(Structure.of({"a": 0}), Structure.of(0))
        >>> structure.split([1, 2])
        ({'a': 1}, Labels(targets=2, weights=None, share=None, counted=None))
    """

    inputs: Structure
    targets: Structure = NOTHING
    weights: Structure = NOTHING
    is_padded: bool = False
    ignored: tuple[int, ...] | None = None
    is_mixed: bool = False
    rows: int | None = None

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SampleStructure:
        """Return the structure of `(inputs,)` or `(inputs, targets[, weights])`."""
        given = [NOTHING if part is None else Structure.of(part) for part in parts]
        if any(map(_has_packed, given)):
            raise DataError(
                "The data has a torch.nn.utils.rnn.PackedSequence, and a compiled "
                "model has fixed shapes. Pass padded sequences and their lengths: "
                "`x, lengths = pad_packed_sequence(packed, batch_first=True)`, and "
                "have `forward` take the last valid step with `gather`."
            )
        inputs, targets, weights = [*given, NOTHING, NOTHING][:3]
        return cls(inputs, targets, weights)

    @cached_property
    def num_inputs(self) -> int:
        """Number of tensors that are inputs; they come first in a batch."""
        return self.inputs.num_leaves

    def named(self, tensors: Iterable[Any]) -> Batch:
        """Name the tensors of a batch, which may lack those from the targets on."""
        counts = (
            *(part.num_leaves for part in self.parts),
            *(int(self.is_padded), int(bool(self.ignored)), int(self.is_mixed)),
        )
        rest = iter(tensors)
        return Batch(*([*itertools.islice(rest, count)] for count in counts))

    @property
    def has_targets(self) -> bool:
        """Whether samples have targets."""
        return self.targets.num_leaves > 0

    @property
    def has_weights(self) -> bool:
        """Whether samples have weights."""
        return self.weights.num_leaves > 0

    @property
    def parts(self) -> tuple[Structure, Structure, Structure]:
        """Structures of the inputs, the targets and the weights."""
        return self.inputs, self.targets, self.weights

    def split(self, tensors: Sequence[Any]) -> tuple[Any, Labels]:
        """Split the tensors of a batch into nested inputs and labels."""
        return self.nested(tensors), self.labels(tensors)

    def nested(self, tensors: Sequence[Any]) -> Any:
        """Nest the inputs of a batch as the data does."""
        return self.inputs.rebuild(map(self._joined, tensors[: self.num_inputs]))

    def _joined(self, tensor: Any) -> Any:
        """Join items that are whole micro-batches along their own first dimension."""
        if self.rows is None:
            return tensor
        return tensor.flatten(0, 1) if tensor.dim() > 1 else tensor.reshape(())

    def num_rows(self, tensors: Sequence[Tensor]) -> int:
        """Count the rows of a micro-batch, padding included."""
        return len(tensors[0]) if self.rows is None else self.rows

    def of_samples(self, plan: BatchPlan) -> BatchPlan:
        """Return a plan that counts samples and padding in the place of items."""
        if self.rows is None:
            return plan
        return replace(plan, micro_batch_size=self.rows)

    def paths(self) -> list[str]:
        """Return the path of each tensor of a sample, such as `inputs['x']`."""
        names = zip(self.parts, ("inputs", "targets", "sample weights"))
        return [path for part, name in names for path in part.paths(name)]

    @cached_property
    def num_given(self) -> int:
        """Number of tensors of a sample: inputs, targets and weights."""
        return sum(part.num_leaves for part in self.parts)

    def batch(self, inputs: Any, tensors: Sequence[Any]) -> Any:
        """Nest a batch as the data does: inputs, or `(inputs, targets[, weights])`.

        Args:
            inputs: Nested inputs.
            tensors: Tensors of the batch; those of the inputs are passed over.

        Example:
            >>> SampleStructure.of((0, (1, 2))).batch("x", [0, 1, 2])
            ('x', (1, 2))
        """
        if not self.has_targets and not self.has_weights:
            return inputs
        labels = self.labels(tensors)
        parts = (inputs, labels.targets)
        return (*parts, labels.weights) if self.has_weights else parts

    def tensors_of_labels(self, tensors: Sequence[Any]) -> list[Any]:
        """Take targets and weights from the tensors of a batch, without nesting."""
        batch = self.named(tensors)
        return [*map(self._joined, (*batch.targets, *batch.weights))]

    def labels(self, tensors: Sequence[Any]) -> Labels:
        """Take targets, weights, shares and counts from the tensors of a batch."""
        _, *parts, _ = (map(self._joined, column) for column in self.named(tensors))
        targets, weights, share, divisors = parts
        counted: dict[int, Any] | None = None
        if self.ignored is not None:
            columns = itertools.chain.from_iterable(t.unbind(dim=1) for t in divisors)
            counted = {index: self.targets.rebuild(columns) for index in self.ignored}
        return Labels(
            self.targets.rebuild(targets),
            self.weights.rebuild(weights) if self.has_weights else None,
            next(share, None),
            counted,
        )

    def mixing(self, tensors: Sequence[Any]) -> Any:
        """Return the mixing coefficients of a batch; None without any."""
        return next(iter(self.named(tensors).mixing), None)

    def flatten(self, parts: Sequence[Any]) -> list[Any]:
        """Flatten `(inputs, targets, weights)`; missing ones may be left out.

        Raises:
            TypeError: The parts nest differently from this structure.
            ConstantChangedError: A constant, such as a string, has another value.
        """
        names = ("inputs", "targets", "sample weights")
        given = [*parts, None, None]
        leaves: list[Any] = []
        for name, structure, part in zip(names, self.parts, given):
            if part is None and structure == NOTHING:
                continue
            if part is None:
                raise TypeError(f"it has no {name}")
            leaves.extend(structure.flatten(part, name))
        return leaves

    def flatten_like(self, first: str, parts: Sequence[Any], where: str) -> list[Any]:
        """Flatten a sample or batch that must nest as the first one does.

        Args:
            first: Name of the first in error messages, such as "sample 0".
            parts: `(inputs, targets, weights)`.
            where: Name of these parts in error messages.

        Raises:
            DataError: They nest differently, or have another constant.
        """
        try:
            return self.flatten(parts)
        except ConstantChangedError as error:
            raise DataError(
                f"{where} has another constant than {first}: {error}. A compiled "
                "model has it baked in. Pass numbers, which become tensors, or leave "
                "it out."
            ) from None
        except TypeError as error:
            raise DataError(
                f"{where} nests differently from {first}: {error}."
            ) from None


_LEAST, _MOST = -(2**31), 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max


def as_tensor(value: Any, where: str) -> Tensor:
    """Convert a tensor, an array or a number to a tensor of an IPU's type.

    Args:
        value: A tensor, an array or a number.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is something else, or has a number that is too large.

    Example:
        >>> as_tensor(0.5, "`x`")
        tensor(0.5000)
    """
    return narrow(checked_tensor(value, where))


def narrow(tensor: Tensor) -> Tensor:
    """Convert float64 to float32; other tensors are returned themselves."""
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def checked_tensor(value: Any, where: str) -> Tensor:
    """Convert a value as `as_tensor` does, but leave float64 as it is.

    Raises:
        DataError: As in `as_tensor`.
    """
    tensor = dense_tensor(value, where)
    if tensor.dtype != torch.float64:
        return tensor
    in_32_bits = torch.as_tensor(tensor, dtype=torch.float32)
    is_infinite = torch.isinf(in_32_bits)
    if is_infinite.any():
        at = is_infinite.logical_and(torch.isfinite(tensor)).nonzero()
        if len(at):
            index = at[0].tolist()
            raise _too_large(float(tensor[tuple(index)]), where, f" at {index}")
    return tensor


def _too_large(value: float, where: str, at: str = "") -> DataError:
    return DataError(
        f"{where} has {value}{at}: an IPU has floats of 32 bits, up to {_LARGEST:.6g}, "
        "and that is infinite in them. Scale the values."
    )


def dense_tensor(value: Any, where: str) -> Tensor:
    """Convert a tensor, an array or a number to a tensor of its own type.

    Args:
        value: A tensor, an array or a number.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is something else.

    Example:
        >>> dense_tensor(np.float64(0.5), "`x`")
        tensor(0.5000, dtype=torch.float64)
    """
    if is_sparse(value):
        value = value.toarray()
    if isinstance(value, (np.ndarray, np.generic)):
        value = _from_numpy(np.asanyarray(value), where)
    elif not isinstance(value, Tensor):
        if value is not None and _is_missing(value):
            raise missing_value(f"{where} has {value!r}")
        if not isinstance(value, (bool, int, float)):
            raise DataError(
                f"{where} has a {type(value).__name__}, {value!r}: use tensors, NumPy "
                "arrays or numbers."
            )
        if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
            raise _too_large(value, where)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise DataError(
                f"{where} has {shown(value)}: an IPU has integers of 32 bits, from "
                f"{_LEAST} to {_MOST}."
            )
        value = torch.as_tensor(value)
    tensor: Tensor = value
    if str(tensor.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64"):
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, a type that PopTorch doesn't "
            "have. Convert it to int64."
        )
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, {tensor.layout} on "
            f"{tensor.device}, which an IPU can't take: pass a dense tensor of real "
            "numbers."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _from_numpy(array: Any, where: str) -> Tensor:
    """Return a tensor in the array's memory, which is only read."""
    masked: Any = np.ma  # whose functions have no types in old NumPy
    if masked.is_masked(array):
        at = np.argwhere(masked.getmaskarray(array))[0].tolist()
        raise DataError(
            f"{where} has a masked array ({masked.count_masked(array)} of {array.size} "
            f"values, the first at {at}), and a tensor has no mask: what is under it "
            "would be trained on. Fill it with .filled(value), or leave those rows "
            "out; to have them count nothing in the loss give sample_weight 0."
        )
    if array.dtype.kind == "O":
        for index, value in np.ndenumerate(array):
            if _is_missing(value):
                raise missing_value(f"{where} has {value!r} at {list(index)}")
    try:
        if array.dtype.kind not in "biuf":
            raise TypeError("it holds no numbers")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            return torch.from_numpy(np.asarray(array, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has an array of {array.dtype}, which torch can't hold ({error}). "
            "Convert it to float32 or int64; names of classes to their numbers, as "
            "with numpy.unique(names, return_inverse=True)."
        ) from None


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or pandas' NA or NaT."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def missing_value(what: str) -> DataError:
    """Build the error for a missing value.

    Args:
        what: The holder of the value, and where it is, to begin a sentence.
    """
    return DataError(
        f"{what}, a missing value, which no tensor can hold. Fill it, as with pandas' "
        "fillna(value), or leave the row out, as with dropna()."
    )


def same_rows(leaves: Sequence[Any], where: str) -> list[Tensor]:
    """Convert leaves to tensors of one number of rows; a number stands for every row.

    Args:
        leaves: Tensors, arrays or numbers.
        where: Name of the data in error messages.

    Raises:
        DataError: There are no arrays, none has rows, or their numbers of rows differ.

    Example:
        >>> same_rows([torch.zeros(2, 3), 0.5], "`x`")[1]
        tensor([0.5000, 0.5000])
    """
    tensors = [as_tensor(leaf, where) for leaf in leaves]
    if not tensors:
        raise DataError(f"{where} holds no arrays.")
    for tensor, leaf in zip(tensors, leaves):
        if not tensor.dim() and not isinstance(leaf, (bool, int, float)):
            raise DataError(
                f"{where} holds an array without axes, {leaf!r}: dim 0 counts samples. "
                "To give samples one by one use an IterableDataset."
            )
    lengths = [len(tensor) for tensor in tensors if tensor.dim()]
    if not lengths:
        raise DataError(f"{where} holds a single number: dim 0 counts samples.")
    if len(set(lengths)) > 1:
        raise DataError(
            f"{where} has arrays of different numbers of samples: "
            f"{short_list(lengths)}. Dim 0 must be the same for all. If a batch is a "
            "whole micro-batch, such as padded graphs, use ipufit.FixedSizeBatches."
        )
    return [t if t.dim() else t.expand(lengths[0]).clone() for t in tensors]


def short_list(numbers: Sequence[int]) -> str:
    """Format a list for error messages, cut after its first numbers.

    Example:
        >>> short_list([4, 5]), short_list([3] * 32)
        ('[4, 5]', '[3, 3, 3, ... 32 in all]')
    """
    if len(numbers) <= 6:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ... {len(numbers)} in all]"


def check_integers(
    batch: Sequence[Tensor],
    structure: SampleStructure,
    name: str,
    sample_of: Callable[[int], int] = int,
) -> None:
    """Refuse rows with an integer that 32 bits can't hold.

    Args:
        batch: The leaves of the structure; tensors that follow them have no integers.
        structure: Structure of a sample.
        name: Name of the data in error messages.
        sample_of: Returns the index of the sample in a row of the batch.

    Raises:
        DataError: An integer is too large or too small.

    Example:
        >>> check_integers([torch.tensor([3, 2**32])], SampleStructure.of([0]), "x")
        Traceback (most recent call last):
        ipufit.errors.DataError: Sample 1 of `x` has 4294967296 in its inputs: an IPU...
    """
    for number, tensor in enumerate(batch):
        if tensor.dtype != torch.int64 or not tensor.numel():
            continue
        least, most = torch.aminmax(tensor)
        if least.item() >= _LEAST and most.item() <= _MOST:
            continue
        is_wrong = tensor.lt(_LEAST).logical_or(tensor.gt(_MOST))
        at = tuple(is_wrong.nonzero()[0].tolist())
        as_cut = int(tensor[at].to(torch.int32))
        raise DataError(
            f"Sample {sample_of(at[0])} of `{name}` has {int(tensor[at])} in its "
            f"{structure.paths()[number]}: an IPU has integers of 32 bits, from "
            f"{_LEAST} to {_MOST}, and would take {as_cut} for it. Subtract an offset, "
            "number the values from 0, or pass them as float32 if they are quantities."
        )


def is_frame(value: Any) -> bool:
    """Check whether a value is a frame or series of pandas, or alike.

    Example:
        >>> is_frame(np.zeros(3))
        False
    """
    return hasattr(value, "to_numpy") and hasattr(value, "iloc")


def is_sparse(value: Any) -> bool:
    """Check whether a value is a sparse matrix or array of SciPy.

    Example:
        >>> is_sparse(np.zeros(3))
        False
    """
    return hasattr(value, "toarray") and hasattr(value, "tocsr")


def frame_values(frame: Any, where: str) -> Any:
    """Convert a frame to an array `[rows, columns]`, or a series to `[rows]`.

    Raises:
        DataError: A column holds no numbers, or has missing values.
    """
    names = getattr(frame, "columns", None)
    columns = {None: frame} if names is None else {name: frame[name] for name in names}
    for name, column in columns.items():
        _refuse_missing(
            column, where, "" if name is None else f" in its column {name!r}"
        )
    array = frame.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    if names is None:
        name = "a series" if frame.name is None else f"the series {frame.name!r}"
        raise DataError(
            f"{where} is {name} of {frame.dtype}, which holds no numbers. Encode it as "
            "numbers: .cat.codes of a category, "
            '.astype("category").cat.codes of strings.'
        )
    kinds = {
        str(name): column.to_numpy().dtype.kind for name, column in columns.items()
    }
    bad = [name for name, kind in kinds.items() if kind not in "biuf"]
    if bad:
        raise DataError(
            f"{where} has columns that hold no numbers: {', '.join(bad)}. Encode them "
            'as numbers, as pandas.get_dummies(frame, dtype="float32") does, or '
            ".cat.codes of a category; or leave them out."
        )
    return array.astype(np.float64)  # numbers and booleans together


def _refuse_missing(column: Any, where: str, of: str) -> None:
    """Refuse pandas' NA, which an array would hold as NaN or an object."""
    # NumPy's other types have no NA: a missing number is NaN, which is a number.
    may_lack = hasattr(column.dtype, "na_value") or column.dtype == object
    if not may_lack or not column.isna().any():
        return
    if np.asarray(column.dropna().tolist()).dtype.kind in "biuf":
        row = int(column.isna().to_numpy().argmax())
        raise missing_value(f"{where} has NA{of} in row {row}")


def column_names(y: Any) -> Sequence[str] | None:
    """Return the columns that `y` names as targets; None if it is data.

    Example:
        >>> column_names("price"), column_names(["a", "b"]), column_names([1.0])
        (['price'], ['a', 'b'], None)
    """
    if isinstance(y, str):
        return [y]
    if isinstance(y, (list, tuple)) and y and all(isinstance(n, str) for n in y):
        return list(y)
    return None


def split_columns(
    row: Any, names: Sequence[str], is_single: bool, where: str
) -> tuple[Any, Any]:
    """Split a value with named columns into inputs and targets.

    Args:
        row: A mapping, or a frame.
        names: Names of the target columns.
        is_single: Whether the target is the one column itself, not a dict of it.
        where: Name of the row in error messages.

    Raises:
        DataError: A column is missing, or none is left for the inputs.

    Example:
        >>> split_columns({"a": 1, "b": 2}, ["b"], True, "`x`")
        ({'a': 1}, 2)
    """
    if not hasattr(row, "keys") or not hasattr(row, "__getitem__"):
        raise DataError(
            f"y={list(names)!r:.60} names columns, and {where} has none: it is a "
            f"{type(row).__name__}. Pass rows as dicts, or the targets themselves: "
            "numbers of classes, if these are names of classes."
        )
    missing = [name for name in names if name not in row]
    if missing:
        known = ", ".join(map(str, row.keys()))
        raise DataError(f"{where} has no column {missing[0]!r}. It has: {known}.")
    if is_frame(row):
        inputs = without_columns(row, names)
    else:
        inputs = {key: row[key] for key in row if key not in names}
    if not len(inputs.keys()):
        raise DataError(
            f"y={list(names)} names all columns of {where}: none is left for inputs."
        )
    return inputs, row[names[0]] if is_single else {name: row[name] for name in names}


def without_columns(value: Any, names: Sequence[str]) -> Any:
    """Leave columns out of a dict or a frame; return anything else unchanged.

    Args:
        value: A sample, or something that holds many samples.
        names: Sequence[str] to leave out, if they exist.

    Example:
        >>> without_columns({"a": 1, "label": 2}, ["label", "weight"])
        {'a': 1}
    """
    if not names:
        return value
    if isinstance(value, Mapping):
        return {key: value[key] for key in value if key not in names}
    if is_frame(value) and hasattr(value, "columns"):
        return value[[name for name in value.columns if name not in names]]
    return value


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


def collate(samples: Any) -> list[Tensor]:
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

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
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

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
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
    return together


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
        batch_size: list[Tensor] size of the user's own loader; None if there is none.
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

    def begin_epoch(self) -> None:
        """Called before the first call of an epoch or an evaluation."""

    def end_epoch(self) -> None:
        """Called after the last call of an epoch or an evaluation."""

    def checksum(self) -> int | None:
        """Return a checksum of some rows of arrays in memory; None for other samples.

        Two sources with the same rows have the same one.
        """
        if not isinstance(self.dataset, ArrayDataset) or not len(self.dataset):
            return None
        some = torch.linspace(0, len(self.dataset) - 1, _NUM_CHECKED).round().long()
        found = 0
        for rows in self.dataset.gathered(some):
            plain = rows.contiguous().reshape(-1).view(torch.uint8)
            found = zlib.crc32(f"{rows.shape} {rows.dtype}".encode(), found)
            found = zlib.crc32(plain.numpy().tobytes(), found)
        return found

    def first_not_finite(self) -> str:
        """Say where arrays in memory have their first NaN or infinite value.

        Returns:
            A sentence; empty if there is none, or if the samples aren't in memory.
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
                f"{self.structure.paths()[number]}, the first in row {row}{where}: "
                "fill them, or leave their rows out. "
            )
        return ""

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


_CHUNK_ROWS = 32
"""Samples of a cache that a process computes and sends at a time."""

_NUM_CHECKED = 16
"""Samples of a dataset in memory that are looked at before a run."""


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
        check_whole("num_workers", num_workers)
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
                    f"Sample 0 of `dataset` holds no numbers: {sample!r:.80}."
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
