# SPDX-License-Identifier: Apache-2.0
"""`batch_idx`, of which a step gets no number."""

from __future__ import annotations

from typing import Any, NoReturn

from ipufit.errors import UnsupportedError

_USES = (
    *("__index__", "__int__", "__float__", "__bool__", "__hash__", "__eq__", "__ne__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__format__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__"),
    *("__rmod__", "__floordiv__", "__rfloordiv__", "__truediv__", "__rtruediv__"),
    *("__divmod__", "__rdivmod__", "__pow__", "__rpow__", "__and__", "__str__"),
)


class BatchIndex:
    """Stands in the place of `batch_idx`: a step may pass it on, and not use it.

    Example:
        >>> BatchIndex() % 100
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: batch_idx was used in a step...
    """

    def __repr__(self) -> str:
        """A name for messages."""
        return "batch_idx (without a number: a step is compiled once)"


def _refuse(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "batch_idx was used in a step. A step runs once in Python, when its program is "
        "compiled, so that every batch would have the same number. Do what belongs to "
        "every 100th batch in a callback, on_train_batch_end(batch, logs)."
    )


for _name in _USES:
    setattr(BatchIndex, _name, _refuse)
