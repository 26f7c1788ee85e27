# SPDX-License-Identifier: Apache-2.0
"""One value of the user's becomes a tensor, and frames and columns become arrays."""

from __future__ import annotations

import warnings
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError

from .ranges import as_number, narrowed

Columns = Sequence[str]

_UNSIGNED = [
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64")
    if hasattr(torch, name)
]
"""Types of newer torch that PopTorch doesn't have."""


def as_tensor(value: Any, where: str) -> Tensor:
    """A tensor of a tensor, an array or a number, in a type that IPUs have.

    Args:
        value: Any of them.
        where: What messages call it.

    Raises:
        DataError: It is something else, or has a number that is too large.

    Example:
        >>> as_tensor(0.5, "`x`")
        tensor(0.5000)
    """
    tensor = dense_tensor(value, where)
    # PopTorch would convert 64-bit floats at every call.
    return narrowed(tensor, where) if tensor.dtype == torch.float64 else tensor


def dense_tensor(value: Any, where: str) -> Tensor:
    """A tensor of a tensor, an array or a number, in its own type.

    Args:
        value: Any of them.
        where: What messages call it.

    Raises:
        DataError: It is something else.

    Example:
        >>> dense_tensor(np.float64(0.5), "`x`")
        tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = _from_numpy(np.asarray(_unmasked(value, where), order="C"), where)
    elif not isinstance(value, Tensor):
        if value is not None and _is_missing(value):
            raise _missing(f"{where} has {value!r}")
        if not isinstance(value, (bool, int, float)):
            raise DataError(
                f"{where} has a {type(value).__name__}, {value!r}: use tensors, NumPy "
                "arrays or numbers."
            )
        value = as_number(value, where)
    tensor: Tensor = value
    if tensor.dtype in _UNSIGNED:
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
    """The same memory as a tensor; read-only memory too, because we only read it."""
    if array.dtype.kind == "O":
        for at, value in np.ndenumerate(array):
            if _is_missing(value):
                raise _missing(f"{where} has {value!r} at {list(at)}")
    try:
        if array.dtype.kind not in "biuf":
            raise TypeError("it holds no numbers")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has an array of {array.dtype}, which torch can't hold ({error}). "
            "Convert it to float32 or int64."
        ) from None


def _unmasked(array: Any, where: str) -> Any:
    """The array, unless it is a masked one of NumPy's: torch sees no masks."""
    masked: Any = np.ma  # whose functions have no types in old NumPy
    if masked.is_masked(array):
        at = np.argwhere(masked.getmaskarray(array))[0].tolist()
        raise DataError(
            f"{where} has a masked array ({masked.count_masked(array)} of {array.size} "
            f"values, the first at {at}), and a tensor has no mask: what is under it "
            "would be trained on. Fill it with .filled(value), or leave those rows "
            "out; to have them count nothing in the loss give sample_weight 0."
        )
    return array


def _is_missing(value: Any) -> bool:
    """Whether it stands for a missing value: None, or pandas' NA or NaT."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _missing(what: str) -> DataError:
    return DataError(
        f"{what}, a missing value, which no tensor can hold. Fill it, as with pandas' "
        "fillna(value), or leave the row out, as with dropna()."
    )


def is_frame(value: Any) -> bool:
    """Whether it is a frame or series of pandas, or something like them.

    Example:
        >>> is_frame(np.zeros(3))
        False
    """
    return hasattr(value, "to_numpy") and hasattr(value, "iloc")


def frame_values(frame: Any, where: str) -> Any:
    """The numbers of a frame, `[rows, columns]`, or of a series, `[rows]`.

    Raises:
        DataError: Some columns hold no numbers, or lack some.
    """
    _refuse_missing(frame, where)
    array = frame.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    dtypes: Any = getattr(frame, "dtypes", None)
    if hasattr(dtypes, "items"):
        bad = [
            str(name)
            for name, _ in dtypes.items()
            if frame[name].to_numpy().dtype.kind not in "biuf"
        ]
        if not bad:  # numbers and booleans together
            return array.astype(np.float64)
        raise DataError(
            f"{where} has columns that hold no numbers: {', '.join(bad)}. Encode them "
            "as numbers, or leave them out."
        )
    raise DataError(
        f"{where} is a series of {array.dtype}, which holds no numbers. Encode it as "
        "numbers."
    )


def _refuse_missing(frame: Any, where: str) -> None:
    """Refuse pandas' NA, which becomes NaN in some types, and nothing in others."""
    columns = getattr(frame, "columns", None)
    whole = {"": frame} if columns is None else {f" {n!r}": frame[n] for n in columns}
    for name, column in whole.items():
        # In the other types of NumPy's a missing number is NaN, which is a number.
        may_lack = hasattr(column.dtype, "na_value") or column.dtype == object
        if not may_lack or not column.isna().any():
            continue
        if np.asarray(column.dropna().tolist()).dtype.kind in "biuf":
            row = int(column.isna().to_numpy().argmax())
            of = f" in its column{name}" if name else ""
            raise _missing(f"{where} has NA{of} in row {row}")


def column_names(y: Any) -> Columns | None:
    """The columns that `y` names as targets; None if it is data.

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
    row: Any, names: Columns, is_single: bool, where: str
) -> tuple[Any, Any]:
    """Inputs and targets of something with named columns, such as a dict.

    Args:
        row: A mapping.
        names: The columns that are targets.
        is_single: Whether the target is the one column itself, not a dict of one.
        where: What messages call it.

    Raises:
        DataError: It has no such columns, or no columns at all.

    Example:
        >>> split_columns({"a": 1, "b": 2}, ["b"], True, "`x`")
        ({'a': 1}, 2)
    """
    if not hasattr(row, "keys") or not hasattr(row, "__getitem__"):
        raise DataError(
            f"y={list(names)} names columns, and {where} has none: it is a "
            f"{type(row).__name__}. Pass rows as dicts, or the targets themselves."
        )
    missing = [name for name in names if name not in row]
    if missing:
        known = ", ".join(map(str, row.keys()))
        raise DataError(f"{where} has no column {missing[0]!r}. It has: {known}.")
    inputs = {key: row[key] for key in row if key not in names}
    if not inputs:
        raise DataError(
            f"y={list(names)} names all columns of {where}: none is left for inputs."
        )
    return inputs, row[names[0]] if is_single else {name: row[name] for name in names}


def without_columns(value: Any, names: Columns) -> Any:
    """A dict or a frame without some of its columns; anything else as it is.

    Args:
        value: A sample, or something that holds many.
        names: Columns, which needn't be there.

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
