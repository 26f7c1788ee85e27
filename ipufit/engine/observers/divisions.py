# SPDX-License-Identifier: Apache-2.0
"""Divisions of whole numbers, which an IPU truncates."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

from .observing import Observer, Observing, Operation

_DIVISIONS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("div", "divide", "true_divide", "floor_divide")
    for prefix, suffix in (("", ""), ("", "_"))
) | {
    f"__{letter}{name}__"
    for letter in ("", "i", "r")
    for name in ("div", "truediv", "floordiv")
}


class DivisionObserver(Observer):
    """Refuses to divide whole numbers (PopTorch's `AtenHandlers` truncate).

    Args:
        divider: Subject of the message: the code that divides.

    Example:
        >>> import torch
        >>> with Observing(DivisionObserver("The metric 'share'")):
        ...     torch.tensor([True, False]).sum() / 2
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The metric 'share' divides whole numbers ...
    """

    def __init__(self, divider: str) -> None:
        self._divider = divider

    def before(self, operation: Operation) -> None:
        """Refuse the division of whole numbers by whole numbers."""
        given = (*operation.args, *operation.kwargs.values())
        if operation.name in _DIVISIONS and all(map(_is_whole, given)):
            # No TypeError: Python would take it for a type that can't be divided.
            kinds = " / ".join(_kind_of(value) for value in operation.args[:2])
            raise ConfigError(
                f"{self._divider} divides whole numbers ({kinds}), and an IPU cuts the "
                "result off: 3 / 4 is 0 there. Divide numbers with a fraction, such as "
                "(outputs.argmax(-1) == targets).float().mean()."
            )


def divisions_refused(divider: str) -> ContextManager[Any]:
    """Refuse to divide whole numbers in a program; on the host torch divides exactly.

    Args:
        divider: Subject of the message: the code that divides.
    """
    if poptorch.isRunningOnIpu():
        return Observing(DivisionObserver(divider))
    return contextlib.nullcontext()


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return not isinstance(value, float)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).replace("torch.", "")
    return type(value).__name__
