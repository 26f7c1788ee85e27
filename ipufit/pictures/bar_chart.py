# SPDX-License-Identifier: Apache-2.0
"""Stacked bars, with or without a limit that they are held against."""

from __future__ import annotations

from typing import NamedTuple

_FAR = 10
"""A limit that is so many times the longest bar isn't drawn: no bar would be seen."""


class Part(NamedTuple):
    """A part of a bar.

    Attributes:
        kind: Kind of the part, such as "optimiser state"; the same in all bars.
        amount: Its size in the unit of the chart, 0 or more.
        is_estimate: Whether the size is an estimate, not exact.
    """

    kind: str
    amount: float
    is_estimate: bool = False


class Bar(NamedTuple):
    """A bar, stacked from parts.

    Attributes:
        label: Its name, such as "IPU 0".
        parts: The parts from left to right, at most one of each kind.

    Example:
        >>> Bar("IPU 0", (Part("weights", 8), Part("activations", 4, True))).total
        12
    """

    label: str
    parts: tuple[Part, ...]

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(part.amount for part in self.parts)

    @property
    def is_estimate(self) -> bool:
        """Whether a part that isn't empty is an estimate."""
        return any(part.is_estimate and part.amount for part in self.parts)


class BarChart(NamedTuple):
    """Bars of one unit.

    Attributes:
        title: A few words.
        caption: Sentences about it, such as what isn't counted.
        unit: "B" for bytes, "FLOP", or another one.
        bars: The bars from top to bottom.
        limit: Amount that each bar is held against; None for none.
        limit_name: Its name, such as "memory of one IPU".

    Example:
        >>> bars = (Bar("stage 0", (Part("forward", 3),)), Bar("stage 1", ()))
        >>> chart = BarChart("FLOPs", "", "FLOP", bars)
        >>> [chart.share_of(bar) for bar in chart.bars]
        [1.0, 0.0]
    """

    title: str
    caption: str
    unit: str
    bars: tuple[Bar, ...]
    limit: float | None = None
    limit_name: str = "limit"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of parts, in the order in which they come first."""
        return tuple(
            dict.fromkeys(part.kind for bar in self.bars for part in bar.parts)
        )

    @property
    def estimated_kinds(self) -> frozenset[str]:
        """Kinds of which at least one part is an estimate."""
        return frozenset(
            part.kind for bar in self.bars for part in bar.parts if part.is_estimate
        )

    @property
    def has_limit_in_sight(self) -> bool:
        """Whether there is a limit that isn't far beyond all bars."""
        return self.limit is not None and self.limit < _FAR * self._largest

    @property
    def scale(self) -> float:
        """Amount that is as long as the picture is wide, above 0."""
        limit = self.limit if self.has_limit_in_sight else None
        return max(self._largest, limit or 0.0) or 1.0

    @property
    def _largest(self) -> float:
        return max([0.0, *(bar.total for bar in self.bars)])

    def share_of(self, bar: Bar) -> float:
        """Share of a bar: of the limit if there is one, else of all bars together."""
        whole = self.limit or sum(one.total for one in self.bars)
        return bar.total / whole if whole else 0.0
