# SPDX-License-Identifier: Apache-2.0
"""Frames and named columns: their numbers, and which columns are targets."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from ipufit.errors import DataError

from .values import missing_value

Columns = Sequence[str]


def is_frame(value: Any) -> bool:
    """Whether a value is a frame or series of pandas, or something like them.

    Example:
        >>> is_frame(np.zeros(3))
        False
    """
    return hasattr(value, "to_numpy") and hasattr(value, "iloc")


def frame_values(frame: Any, where: str) -> Any:
    """The numbers of a frame, `[rows, columns]`, or of a series, `[rows]`.

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
        raise DataError(
            f"{where} is a series of {array.dtype}, which holds no numbers. Encode it "
            "as numbers."
        )
    kinds = {
        str(name): column.to_numpy().dtype.kind for name, column in columns.items()
    }
    bad = [name for name, kind in kinds.items() if kind not in "biuf"]
    if bad:
        raise DataError(
            f"{where} has columns that hold no numbers: {', '.join(bad)}. Encode them "
            "as numbers, or leave them out."
        )
    return array.astype(np.float64)  # numbers and booleans together


def _refuse_missing(column: Any, where: str, of: str) -> None:
    """Refuse pandas' NA: an array has NaN for it, or becomes one of objects."""
    # NumPy's other types have no NA: a missing number is NaN, which is a number.
    may_lack = hasattr(column.dtype, "na_value") or column.dtype == object
    if not may_lack or not column.isna().any():
        return
    if np.asarray(column.dropna().tolist()).dtype.kind in "biuf":
        row = int(column.isna().to_numpy().argmax())
        raise missing_value(f"{where} has NA{of} in row {row}")


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
    """A dict or a frame without some of its columns; anything else unchanged.

    Args:
        value: A sample, or something that holds many samples.
        names: Columns to leave out, if they exist.

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
