# SPDX-License-Identifier: Apache-2.0
"""Amounts of bytes, FLOPs and the like as short texts."""

from __future__ import annotations

_PREFIXES = ("", "K", "M", "G", "T", "P")


def amount_in_words(amount: float, unit: str, is_estimate: bool = False) -> str:
    """An amount with three digits or so; each prefix stands for a factor of 1000.

    Args:
        amount: The amount in units, 0 or more.
        unit: The unit, such as "B" for bytes or "FLOP".
        is_estimate: If True, the text of an amount above 0 begins with "~".

    Example:
        >>> amount_in_words(940_572_672, "B"), amount_in_words(1_640_000, "FLOP")
        ('941 MB', '1.64 MFLOP')
        >>> amount_in_words(260, "B"), amount_in_words(1536, "B", is_estimate=True)
        ('260 B', '~1.54 KB')
    """
    power = 0
    while power + 1 < len(_PREFIXES) and amount >= 999.5 * 1000**power:
        power += 1
    value = amount / 1000**power
    digits = 0 if not power and float(amount).is_integer() else _digits_after(value)
    about = "~" if is_estimate and amount else ""
    return f"{about}{value:.{digits}f} {_PREFIXES[power]}{unit}"


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
