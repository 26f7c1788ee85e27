# SPDX-License-Identifier: Apache-2.0
"""Amounts of bytes, FLOPs and the like as short texts."""

from __future__ import annotations

BYTES = "B"
"""Unit whose prefixes are powers of 1024; those of all other units are of 1000."""

_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def amount_in_words(amount: float, unit: str, is_estimate: bool = False) -> str:
    """An amount with three digits or so, and the prefix that makes it short.

    Args:
        amount: The amount in units, 0 or more.
        unit: The unit, such as "B" for bytes or "FLOP".
        is_estimate: If True, the text of an amount above 0 begins with "~".

    Example:
        >>> amount_in_words(940_572_672, "B"), amount_in_words(1_640_000, "FLOP")
        ('897 MiB', '1.64 MFLOP')
        >>> amount_in_words(260, "B"), amount_in_words(1536, "B", is_estimate=True)
        ('260 B', '~1.50 KiB')
    """
    step, prefixes = (1024, _BINARY) if unit == BYTES else (1000, _DECIMAL)
    power = 0
    # What would be rounded to a whole step has the next prefix.
    while power + 1 < len(prefixes) and amount >= (step - 0.5) * step**power:
        power += 1
    value = amount / step**power
    digits = 0 if not power and float(amount).is_integer() else _digits_after(value)
    about = "~" if is_estimate and amount else ""
    return f"{about}{value:.{digits}f} {prefixes[power]}{unit}"


def share_in_words(share: float) -> str:
    """A share as a percentage.

    Args:
        share: The share; 1 for the whole.

    Example:
        >>> share_in_words(0.4567), share_in_words(0.0001), share_in_words(1.2)
        ('45.7%', '<0.1%', '120.0%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _digits_after(value: float) -> int:
    """Digits after the point that make three digits, or more in front of it."""
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2
