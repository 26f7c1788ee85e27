# SPDX-License-Identifier: Apache-2.0
"""Convert arrays, frames and sparse matrices to tensors; select columns and rows."""

from __future__ import annotations

import functools
import math
import reprlib
import warnings
from numbers import Real
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ipufit._arguments import LARGEST_FLOAT32, shown
from ipufit.errors import DataError

from .structure import SampleStructure

_LEAST, _MOST = -(2**31), 2**31 - 1
_TYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""Types of tensors that an IPU takes, or that are converted to such."""

FrameColumns = Sequence[Optional[Sequence[Any]]]
"""The column names of each leaf of nested arrays; None for leaves without names."""


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
    """Convert a float64 tensor to float32; return any other tensor unchanged."""
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
        f"{where} has {value}{at}, which is infinite on an IPU: its floats have 32 "
        f"bits and go up to {LARGEST_FLOAT32:.6g}. Scale the values."
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
                f"{where} has a {type(value).__name__}, {value!r}: use "
                "tensors, numbers or NumPy arrays, such as numpy.asarray(image), in "
                "tuples, lists or dicts."
            )
        if isinstance(value, float) and LARGEST_FLOAT32 < abs(value) < math.inf:
            raise _too_large(value, where)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise DataError(
                f"{where} has {shown(value)}: an IPU has integers of 32 bits, from "
                f"{_LEAST} to {_MOST}."
            )
        value = torch.as_tensor(value)
    tensor: Tensor = value
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    if tensor.is_complex() or not is_dense or tensor.is_meta:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, {kind} on {tensor.device}, which "
            "an IPU can't take: pass a dense tensor of real numbers."
        )
    if tensor.dtype not in _TYPES:
        kind = "int64" if str(tensor.dtype).startswith("torch.uint") else "float32"
        way = "Take x.dequantize()" if tensor.is_quantized else f"Convert it to {kind}"
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, a type that PopTorch doesn't "
            f"have. {way}."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _from_numpy(array: Any, where: str) -> Tensor:
    """Return a tensor that shares the array's memory; callers don't write to it."""
    masked: Any = np.ma  # whose functions have no types in old NumPy
    if masked.is_masked(array):
        at = np.argwhere(masked.getmaskarray(array))[0].tolist()
        raise DataError(
            f"{where} has a masked array ({masked.count_masked(array)} of {array.size} "
            f"values, the first at {at}), and a tensor has no mask: what is under it "
            "would be trained on. Fill it with .filled(value), or leave those rows "
            "out; to have them count nothing in the loss give sample_weight 0."
        )
    if array.dtype.kind == "O" and array.size:
        for index, value in np.ndenumerate(array):
            if _is_missing(value):
                raise missing_value(f"{where} has {value!r} at {list(index)}")
        if _are_numbers(array.flat):
            raise _numbers_as_objects(where)
        if isinstance(array.flat[0], (np.ndarray, Tensor, list, tuple)):
            raise DataError(
                f"{where} has an array of object, whose items are arrays themselves. "
                "Make one array of them, as with numpy.stack; pad them to one length "
                "first if theirs differ."
            )
    if array.dtype.kind == "c":
        raise DataError(
            f"{where} has an array of {array.dtype}, and an IPU has real numbers: "
            "numpy.stack([x.real, x.imag], axis=-1) has the parts of x."
        )
    try:
        if array.dtype.kind not in "biuf":
            raise TypeError("it holds no numbers")
        array = np.asarray(array, order="C")
        if not array.flags.writeable:
            _hush_torch()
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has an array of {array.dtype}, which torch can't hold ({error}). "
            "Convert it to float32 or int64; names of classes to their numbers, as "
            "with numpy.unique(names, return_inverse=True)."
        ) from None


@functools.lru_cache(maxsize=None)
def _hush_torch() -> None:
    """Hide torch's warning of an array that can't be written to, which comes once.

    Only once, because Python shows all warnings again after `catch_warnings`.
    """
    array = np.zeros(1)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or pandas' NA or NaT."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def missing_value(what: str) -> DataError:
    """Build the error for a missing value.

    Args:
        what: The beginning of the message: the data and the place of the value in it.
    """
    return DataError(
        f"{what}, a missing value, which no tensor can hold. Fill it, as with pandas' "
        "fillna(value), or leave the row out, as with dropna()."
    )


def same_rows(leaves: Sequence[Any], where: str) -> list[Tensor]:
    """Convert leaves to tensors with the same number of rows; repeat a plain number.

    Args:
        leaves: Tensors, arrays or numbers.
        where: Name of the data in error messages.

    Raises:
        DataError: There are no arrays, no array has rows, or their numbers of rows
            differ.

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
            f"{short_list(lengths)}. Dim 0 must be the same for all. To give samples "
            "one by one use an IterableDataset. If a batch is a whole micro-batch, "
            "such as padded graphs, use ipufit.FixedSizeBatches."
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
        batch: The leaves of the structure, and further tensors, which aren't checked.
        structure: Structure of a sample.
        name: Name of the data in error messages.
        sample_of: Maps the index of a row of the batch to the index of its sample.

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


def check_labels(
    tensors: Sequence[Tensor] | Mapping[int, Tensor],
    losses: Mapping[int, str],
    name: str,
    sample_of: Callable[[int], int] = int,
    kind: str = "row",
) -> None:
    """Refuse targets that are far from the 0s and 1s of a binary loss.

    Shares and noisy labels, such as 1.2, are taken.

    Args:
        tensors: Leaves of samples, by place.
        losses: Place of each target to check, and the name of its loss.
        name: As for `check_integers`.
        sample_of: As for `check_integers`.
        kind: What `sample_of` numbers, in error messages.

    Raises:
        DataError: A target is below -1, or 2 or more.

    Example:
        >>> check_labels([torch.tensor([0, 255])], {0: "bce"}, "x")
        Traceback (most recent call last):
        ipufit.errors.DataError: The loss 'bce' takes targets of 0 and 1 (hinge lo...
    """
    for place, loss in losses.items():
        values = tensors[place].to(torch.float32)  # -1 is 255 for torch beside 8 bits
        is_odd = values.lt(-1).logical_or(values.ge(2))
        if is_odd.any():
            row = sample_of(int(is_odd.nonzero()[0][0]))
            of = "" if name == "x" else f" of `{name}`"
            value = float(values[is_odd][0])
            masks = "For masks of 0 and 255 write (y > 0).float(). "
            raise DataError(
                f"The loss {loss!r} takes targets of 0 and 1 (hinge losses also -1 and "
                f"1), and a target{of} is {value:g}, in {kind} {row}. "
                f"{masks if value == 255 else ''}For classes use 'cross_entropy', with "
                "an output for each; targets that don't count need a sample_weight of "
                "0 each."
            )


def is_array_like(x: Any) -> bool:
    """Return whether `x` may be nested arrays, by its outermost type alone.

    True for an array, a frame, a sparse matrix, and any tuple, list or mapping that
    isn't empty: what it holds isn't looked at.
    """
    return (
        isinstance(x, (Tensor, np.ndarray))
        or is_frame(x)
        or is_sparse(x)
        or (isinstance(x, (tuple, list, Mapping)) and len(x) > 0)
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
    columns: list[tuple[Any, Any]] = [(None, frame)]
    if names is not None:  # some may have the same name
        columns = [(name, frame.iloc[:, i]) for i, name in enumerate(names)]
    for name, column in columns:
        _refuse_missing(
            column, where, "" if name is None else f" in its column {name!r}"
        )
    array = frame.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    others = [(n, c) for n, c in columns if c.to_numpy().dtype.kind not in "biuf"]
    for name, column in others:
        if column.dtype == object and _are_numbers(column.dropna()):
            raise _numbers_as_objects(where + ("" if name is None else f"[{name!r}]"))
    if names is None:
        name = "a series" if frame.name is None else f"the series {frame.name!r}"
        raise DataError(
            f"{where} is {name} of {frame.dtype}, which holds no numbers. Encode it as "
            'numbers: .cat.codes.astype("int64") of a category, '
            '.astype("category").cat.codes.astype("int64") of strings.'
        )
    bad = [str(name) for name, _ in others]
    if bad:
        raise DataError(
            f"{where} has columns that hold no numbers: {', '.join(bad)}. Encode them "
            'as numbers, as pandas.get_dummies(frame, dtype="float32") does, or '
            '.astype("category").cat.codes.astype("int64") for an embedding; or leave '
            "them out."
        )
    return array.astype(np.float64)  # numbers and booleans together


def _refuse_missing(column: Any, where: str, of: str) -> None:
    """Refuse pandas' NA, which an array would turn into NaN or an object."""
    # NumPy's other types have no NA: a missing number is NaN, which is a number.
    may_lack = hasattr(column.dtype, "na_value") or column.dtype == object
    if not may_lack or not column.isna().any():
        return
    if _are_numbers(column.dropna()):
        row = int(column.isna().to_numpy().argmax())
        raise missing_value(f"{where} has NA{of} in row {row}")


def _are_numbers(cells: Iterable[Any]) -> bool:
    return all(isinstance(cell, (Real, np.bool_)) for cell in cells)


def _numbers_as_objects(where: str) -> DataError:
    return DataError(
        f"{where} has numbers as objects of Python (its dtype is object). Make them "
        'numbers of one type: .astype("float32").'
    )


def unframed(value: Any, where: str) -> Any:
    """Replace the frames and sparse matrices in nested arrays by arrays.

    Args:
        value: Nested arrays, frames and sparse matrices.
        where: Name of the value in error messages.
    """

    def array(value: Any) -> Any:
        if is_sparse(value):
            return value.toarray()
        return frame_values(value, where) if is_frame(value) else value

    return mapped(array, value)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each element of nested mappings, tuples and lists."""
    if isinstance(value, Mapping) and not is_sparse(value):  # dok_matrix is a dict
        return {key: mapped(function, element) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(function, element) for element in value)
    return function(value)


def column_names(y: Any) -> Sequence[str] | None:
    """Return the names of target columns in `y`; None if `y` is data.

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
        is_single: Whether the target is a column itself, and not a dict of columns.
        where: Name of the row in error messages.

    Raises:
        DataError: A column is missing, or none is left for the inputs.

    Example:
        >>> split_columns({"a": 1, "b": 2}, ["b"], True, "`x`")
        ({'a': 1}, 2)
    """
    if not hasattr(row, "keys") or not hasattr(row, "__getitem__"):
        raise DataError(
            f"y={reprlib.repr(list(names))} names columns, and {where} has none: it "
            f"is a {type(row).__name__}. If they are columns, pass rows as dicts, in a "
            "dataset or a loader (torch's DataLoader takes a list of them). If they "
            "are the targets, names of classes, pass numbers of classes."
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
        names: Names of columns to leave out; names without a column are ignored.

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


def columns_of(value: Any) -> Sequence[Any] | None:
    """Return a frame's column names; None for other values and for duplicate names."""
    names = list(value.columns) if is_frame(value) and hasattr(value, "columns") else []
    return names if names and len(set(names)) == len(names) else None


def column_chooser(columns: FrameColumns, where: str) -> Callable[[Any], Any]:
    """Return a function that selects the columns that the model was trained on.

    Args:
        columns: Column names of each leaf of the training data, in order; None for a
            leaf without names.
        where: Name of the data in error messages.
    """
    each = iter(columns)

    def chosen(value: Any) -> Any:
        names, own = next(each, None), columns_of(value)
        if names is None or own is None:
            return value
        missing = [name for name in names if name not in own]
        if missing:
            raise DataError(
                f"{where} lacks the columns {', '.join(map(repr, missing))}, which the "
                f"model was trained with. It has: {', '.join(map(repr, own))}."
            )
        return value[list(names)]

    return chosen


class ArrayDataset(Dataset):  # type: ignore[type-arg]
    """Dataset of samples in memory, which gathers the rows of a batch at once.

    float64 tensors aren't copied, so the user may change them in place. Rows become
    float32 when they are gathered.

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
        return [narrow(torch.index_select(leaf, 0, rows)) for leaf in self.tensors]
