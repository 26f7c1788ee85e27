# SPDX-License-Identifier: Apache-2.0
"""Kinds: checks of values from saved states, made before any value is used.

A kind is a function of a value and its name. It returns a description of what is wrong,
or None. `check_saved` raises an error for it.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np
from torch import Tensor

from ._arguments import LARGEST_FLOAT32, shown
from .errors import DamagedCheckpointError

Kind = Callable[[Any, str], Optional[str]]

_LARGEST = 2**63


def check_saved(kind: Kind, value: Any, where: str = "state") -> None:
    """Refuse a saved value of another kind.

    Args:
        kind: The kind that the value must have.
        value: Value from a checkpoint.
        where: Name of the value in the error message.

    Raises:
        DamagedCheckpointError: The value is of another kind.
    """
    fault = kind(value, where)
    if fault is not None:
        raise damaged(fault)


def damaged(fault: str) -> DamagedCheckpointError:
    """Build the error for a state that no model has written."""
    return DamagedCheckpointError(
        f"No model has written this state: {fault}. Use another checkpoint."
    )


def anything(value: Any, where: str) -> str | None:
    """Accept any value."""
    return None


def count(value: Any, where: str) -> str | None:
    """Accept a whole number from 0 on, of 63 bits."""
    is_count = type(value) is int and 0 <= value < _LARGEST
    return None if is_count else _wrong(value, where, "a count")


def whole(value: Any, where: str) -> str | None:
    """Accept a whole number of 64 bits."""
    is_whole = type(value) is int and -_LARGEST <= value < 2 * _LARGEST
    return None if is_whole else _wrong(value, where, "a whole number")


def number(value: Any, where: str) -> str | None:
    """Accept a number that a float can hold, with NaN and infinity."""
    is_number = type(value) is float or (type(value) is int and abs(value) < 2**1000)
    return None if is_number else _wrong(value, where, "a number")


def text(value: Any, where: str) -> str | None:
    """Accept a str."""
    return None if isinstance(value, str) else _wrong(value, where, "a str")


def flag(value: Any, where: str) -> str | None:
    """Accept a bool."""
    return None if isinstance(value, bool) else _wrong(value, where, "a bool")


def array(value: Any, where: str) -> str | None:
    """Accept a tensor or an array."""
    is_array = isinstance(value, (Tensor, np.ndarray))
    return None if is_array else _wrong(value, where, "a tensor")


def optional(kind: Kind) -> Kind:
    """Return the kind of values that may also be None."""
    return lambda value, where: None if value is None else kind(value, where)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    """Return the kind of lists whose elements are of one kind.

    Args:
        length: Number of elements; None for any.
    """

    def check(value: Any, where: str) -> str | None:
        if not isinstance(value, (list, tuple)):
            return _wrong(value, where, "a list")
        if length is not None and len(value) != length:
            return f"{where} has {len(value)} values, and should have {length}"
        return _first(kind(one, f"{where}[{i}]") for i, one in enumerate(value))

    return check


def dict_of(kind: Kind) -> Kind:
    """Return the check of dicts whose keys are any str and whose values pass `kind`."""

    def check(value: Any, where: str) -> str | None:
        if not _is_object(value):
            return _wrong(value, where, "a dict")
        return _first(kind(one, f"{where}.{name}") for name, one in value.items())

    return check


def metric(value: Any, where: str) -> str | None:
    """Accept a metric's value in logs: a number, or the rows of a matrix."""
    kind = list_of(list_of(number)) if isinstance(value, list) else number
    return kind(value, where)


def fields(kinds: Mapping[str, Any], *, is_closed: bool = False) -> Kind:
    """Return the kind of dicts with these keys, each with a value of its kind.

    Args:
        kinds: Kind of each value, by its key; or a dict of kinds for a nested dict.
        is_closed: If True, other keys are refused; else they are ignored.

    Example:
        >>> kind = fields({"epoch": count, "reason": optional(text)})
        >>> kind({"epoch": 1, "reason": None}, "run")
        >>> kind({"epoch": "1", "reason": None}, "run")
        "run.epoch is '1', where a count belongs"
        >>> kind({"epoch": 1}, "run")
        'run lacks reason'
    """
    parts = {n: fields(k) if isinstance(k, Mapping) else k for n, k in kinds.items()}

    def check(value: Any, where: str) -> str | None:
        if not _is_object(value):
            return _wrong(value, where, "a dict")
        for name in parts:
            if name not in value:
                return f"{where} lacks {name}"
        others = [name for name in value if name not in parts]
        if is_closed and others:
            return f"{where} has {others[0][:40]!r}, which doesn't belong there"
        return _first(
            kind(value[name], f"{where}.{name}") for name, kind in parts.items()
        )

    return check


def like(example: Any) -> Kind:
    """Return the kind of values like an example: equal keys and lengths, similar types.

    Whole numbers and floats are similar. Numbers must fit in float32, and not be NaN. A
    list stands for a tuple, an empty list for any list, and None for numbers too.

    Example:
        >>> like({"rates": (0.5, 1)})({"rates": [1, 0.25]}, "state")
        >>> like({"rates": (0.5, 1)})({"rates": [1, "x"]}, "state")
        "state.rates[1] is 'x', where a number belongs"
    """
    if isinstance(example, Mapping):
        return fields({n: like(v) for n, v in example.items()}, is_closed=True)
    if isinstance(example, (list, tuple)):
        return each_of([like(one) for one in example])
    if isinstance(example, bool):
        return flag
    if example is None or isinstance(example, (int, float)):
        return optional(_no_nan) if example is None else _no_nan
    return text if isinstance(example, str) else anything


def each_of(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of lists with one value of each kind; any list without kinds."""

    def check(value: Any, where: str) -> str | None:
        fault = list_of(anything, len(kinds) or None)(value, where)
        return fault or _first(
            kind(one, f"{where}[{i}]")
            for i, (kind, one) in enumerate(zip(kinds, value))
        )

    return check


def are_numbers(values: Sequence[Any]) -> bool:
    """Return whether the type of each value is int or float, not a subclass.

    History has long lists of numbers, which code that walks through states may skip.
    """
    return {*map(type, values)} <= {int, float}


def _no_nan(value: Any, where: str) -> str | None:
    """Accept float32 numbers and infinity, and refuse NaN."""
    is_float = isinstance(value, float) and not math.isinf(value)
    if is_float and not abs(value) <= LARGEST_FLOAT32:
        return _wrong(value, where, "a number of float32")
    return number(value, where)


def _first(faults: Any) -> str | None:
    return next((fault for fault in faults if fault is not None), None)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _wrong(value: Any, where: str, expected: str) -> str:
    words = shown(value) if not isinstance(value, Tensor) else "a tensor"
    if len(words) > 40 or (isinstance(value, float) and math.isnan(value)):
        words = f"a {type(value).__name__}"
    return f"{where} is {words}, where {expected} belongs"
