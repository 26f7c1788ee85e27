# SPDX-License-Identifier: Apache-2.0
"""Schedules by name, counted in weight updates.

A schedule is a factor on each parameter group's own rate, or other value. `formulas.py`
has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Sequence

from ipufit.errors import ConfigError, UnknownNameError

from .checks import check_number, check_whole
from .formulas import ENDING, FORMULAS

_WARMUP = ("warmup_updates", "warmup_fraction", "initial", "total_updates")
_IN_EPOCHS = {
    "warmup_epochs": "warmup_updates",
    "total_epochs": "total_updates",
    "every_epochs": "every_updates",
    "boundary_epochs": "boundaries",
}
"""Lengths in epochs, and the settings that are the same in updates."""

_SETTINGS = sorted({name for one in FORMULAS.values() for name in one.settings})


@dataclass(frozen=True)
class Schedule:
    """How the learning rate, or another value, changes from update to update.

    Lengths are numbers of updates, or of epochs, which needn't be whole. `fit` makes
    updates of epochs, rounded to the nearest.

    With a warm-up the factor rises in a straight line from `initial` to 1, and the rest
    of the schedule follows. Names, with `p` the share of the rest that is done:

    - "constant": 1.
    - "linear": from 1 to `final`.
    - "cosine": `final + (1 - final) * (1 + cos(pi * p)) / 2`.
    - "cosine_restarts": the same `cycles` times.
    - "polynomial": `final + (1 - final) * (1 - p) ** power`.
    - "exponential": `gamma` to the power of the updates since the warm-up, divided by
      `every_updates`.
    - "step": times `gamma` at each of `boundaries`, counted from the first update.
    - "inverse_sqrt": `sqrt(timescale / (updates since the warm-up + timescale))`.
    - "one_cycle": by half cosines from `initial` up to 1, then down to `final`; its
      warm-up, 0.3 of the updates by default, is the way up. Momentum stays.

    Args:
        name: One of these.
        warmup_updates: Length of the warm-up, in updates.
        warmup_fraction: Length of the warm-up, as a share of all updates.
        initial: Factor that the warm-up begins with, 0 by default (1/25 for
            "one_cycle").
        total_updates: Where the schedule ends; updates are counted over all fits since
            `compile`. None for the updates of one fit: each begins anew.
        final: Factor at the end and from there on; 0 by default (4e-6 for "one_cycle").
            Above 1 only for other values than learning rates.
        cycles: Number of cycles of "cosine_restarts", 1 by default.
        power: Exponent of "polynomial", 1 by default.
        gamma: Factor of "exponential", where it must be given, and of "step", 0.1 by
            default.
        every_updates: Number of updates that "exponential" takes for one factor, 1 by
            default.
        boundaries: Update counts at which "step" steps, in increasing order.
        timescale: Number of updates for "inverse_sqrt": the length of the warm-up by
            default, which makes it Noam's, or 10000 without one.
        warmup_epochs: `warmup_updates`, in epochs.
        total_epochs: `total_updates`, in epochs.
        every_epochs: `every_updates`, in epochs.
        boundary_epochs: `boundaries`, in epochs.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: A value is out of range, or the schedule doesn't have it.

    Example:
        >>> schedule = Schedule("linear", warmup_updates=2, total_updates=6)
        >>> [schedule.factor(update) for update in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    name: str
    warmup_updates: int | None = None
    warmup_fraction: float | None = None
    total_updates: int | None = None
    initial: float | None = None
    final: float | None = None
    cycles: int | None = None
    power: float | None = None
    gamma: float | None = None
    every_updates: int | None = None
    boundaries: Sequence[int] | None = None
    timescale: int | None = None
    warmup_epochs: float | None = None
    total_epochs: float | None = None
    every_epochs: float | None = None
    boundary_epochs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name.lower() not in FORMULAS:
            raise UnknownNameError("schedule", str(self.name), FORMULAS)
        self._set("name", self.name.lower())
        self._refuse_strangers()
        self._check_ranges()
        self._check_boundaries()
        if self.name == "exponential" and self.gamma is None:
            raise ConfigError(
                "Schedule('exponential') needs gamma, the factor of each update, as in "
                "Schedule('exponential', gamma=0.999)."
            )
        self._refuse_twins()
        if self.needs_epochs:
            return  # the rest can be checked when `fit` knows the length of an epoch
        if self.total_updates is not None or not self.needs_total:
            self.check_fits(self.total_updates or 0)

    def __repr__(self) -> str:
        """Show lengths in epochs only if there are any."""
        names = [field.name for field in fields(self)]
        shown = [
            n for n in names if n not in _IN_EPOCHS or getattr(self, n) is not None
        ]
        return f"Schedule({', '.join(f'{n}={getattr(self, n)!r}' for n in shown)})"

    @property
    def needs_epochs(self) -> bool:
        """Whether a length is in epochs: `factor` is that of `in_updates` then."""
        return any(getattr(self, name) is not None for name in _IN_EPOCHS)

    @property
    def counts_all_fits(self) -> bool:
        """Whether updates are counted since `compile`; else each fit begins anew."""
        return self.total_updates is not None or self.total_epochs is not None

    def in_updates(self, updates_per_epoch: int) -> Schedule:
        """Make updates of the lengths in epochs.

        Args:
            updates_per_epoch: Number of updates of an epoch.

        Raises:
            ConfigError: Lengths don't fit each other.

        Example:
            >>> schedule = Schedule("step", warmup_epochs=0.5, boundary_epochs=(2, 3))
            >>> schedule = schedule.in_updates(100)
            >>> schedule.warmup_updates, schedule.boundaries
            (50, (200, 300))
        """
        changes: dict[str, Any] = {}
        for name, twin in _IN_EPOCHS.items():
            value = getattr(self, name)
            changes[name] = None
            if isinstance(value, (list, tuple)):
                changes[twin] = [
                    max(1, _rounded(one * updates_per_epoch)) for one in value
                ]
            elif value is not None:
                least = 0 if name == "warmup_epochs" else 1
                changes[twin] = max(least, _rounded(value * updates_per_epoch))
        return replace(self, **changes)

    @property
    def needs_total(self) -> bool:
        """Whether `factor` depends on the number of all updates.

        Example:
            >>> Schedule("cosine").needs_total, Schedule("constant").needs_total
            (True, False)
        """
        return self.warmup_fraction is not None or self.name in ENDING

    def factor(self, update: int, total: int | None = None) -> float:
        """Compute the factor on the learning rate of an update.

        Args:
            update: The update's index, from 0.
            total: Number of all updates; of use if `total_updates` is None.

        Returns:
            From 0 to 1.

        Raises:
            ConfigError: The schedule needs the number of all updates, which is unknown.

        Example:
            >>> Schedule("cosine", final=0.5).factor(50, total=100)
            0.75
        """
        total = self.total_updates if self.total_updates is not None else total
        if self.needs_total and total is None:
            raise ConfigError(
                f"{self._who} needs the number of all updates, and the length of the "
                "data is unknown. Give it: total_updates=..., or fit(steps_per_epoch="
                "...)."
            )
        return FORMULAS[self.name].factor(self, update, total or 0)

    def check_fits(self, total: int) -> None:
        """Refuse a warm-up that leaves too little of the updates.

        Args:
            total: Number of all updates; of use if the schedule needs it.

        Raises:
            ConfigError: The warm-up takes all updates, or passes a boundary.

        Example:
            >>> Schedule("linear", warmup_updates=10).check_fits(5)
            Traceback (most recent call last):
            ipufit.errors.ConfigError: Schedule('linear') warms up for 10 updates...
        """
        warmup = self.warmup(total)
        if self.name in ENDING and self.warmup_updates and warmup >= total:
            raise ConfigError(
                f"{self._who} warms up for {warmup} updates, but there are "
                f"{total} in all. Use fewer warmup_updates, a warmup_fraction, or "
                "more updates."
            )
        if self.boundaries and warmup > self.boundaries[0]:
            raise ConfigError(
                f"{self._who} warms up for {warmup} updates, past its boundary "
                f"{self.boundaries[0]}. Warm up for less."
            )

    def warmup(self, total: int) -> int:
        """Compute the length of the warm-up.

        Args:
            total: Number of all updates.

        Returns:
            Number of updates; a fraction is rounded up.

        Example:
            >>> Schedule("constant", warmup_fraction=0.25).warmup(10)
            3
        """
        if self.warmup_fraction is not None:
            return math.ceil(total * self.warmup_fraction)
        return self.warmup_updates or 0

    # Checks -------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return f"Schedule({self.name!r})"

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for all others

    def _refuse_strangers(self) -> None:
        kind = FORMULAS[self.name]
        for name in _SETTINGS:
            if name not in kind.settings and getattr(self, name) is not None:
                owners = [n for n, k in FORMULAS.items() if name in k.settings]
                raise ConfigError(
                    f"{self._who} has no {name}. It has "
                    f"{', '.join((*kind.settings, *_WARMUP))}; {name} belongs to "
                    f"{', '.join(map(repr, owners))}."
                )

    def _check_ranges(self) -> None:
        numbers: dict[str, dict[str, float]] = {
            "warmup_fraction": {"least": 0, "below": 1},
            "initial": {"least": 0, "most": 1},
            "final": {"least": 0},
            "power": {"above": 0},
            "gamma": {"above": 0, "most": 1},
            "warmup_epochs": {"least": 0},
            "total_epochs": {"above": 0},
            "every_epochs": {"above": 0},
        }
        for name, bounds in numbers.items():
            if getattr(self, name) is not None:
                check_number(self._who, name, getattr(self, name), **bounds)
        least = {"warmup_updates": 0, "total_updates": 1, "cycles": 1}
        for name in (*least, "every_updates", "timescale"):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                check_whole(self._who, name, value, least=least.get(name, 1))

    def _check_boundaries(self) -> None:
        if self.name != "step":
            return
        name = "boundaries" if self.boundary_epochs is None else "boundary_epochs"
        given: Any = getattr(self, name)
        if not isinstance(given, (list, tuple)) or not given:
            raise ConfigError(
                f"{self._who} has {name}={given!r}: give the updates at which the "
                "rate is multiplied by gamma, as in boundaries=(1000, 2000), or the "
                "epochs, as in boundary_epochs=(30, 60)."
            )
        for boundary in given:
            if name == "boundaries":
                check_whole(self._who, "a boundary", boundary, least=1)
            else:
                check_number(self._who, "a boundary", boundary, above=0)
        if list(given) != sorted(set(given)):
            raise ConfigError(
                f"{self._who} has {name}={given}: sort them, each above the one before."
            )
        self._set(name, tuple(given))

    def _refuse_twins(self) -> None:
        pairs = [("warmup_updates", "warmup_fraction"), *_IN_EPOCHS.items()]
        for one, other in (*pairs, ("warmup_epochs", "warmup_fraction")):
            values = getattr(self, one), getattr(self, other)
            if None not in values:
                raise ConfigError(
                    f"{self._who} has {one}={values[0]} and {other}={values[1]}. Give "
                    "one of them."
                )


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)
