# SPDX-License-Identifier: Apache-2.0
"""Learning rates by name, counted in weight updates.

A schedule is a factor on each parameter group's own rate. Its formulas are those of
torch's schedulers and of the transformers library, where these have it.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

from ipufit.errors import ConfigError, UnknownNameError

from .checks import check_number, check_whole

_WARMUP = ("warmup_updates", "warmup_fraction", "initial", "total_updates")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes from update to update.

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
        cycles: Number of cycles of "cosine_restarts", 1 by default.
        power: Exponent of "polynomial", 1 by default.
        gamma: Factor of "exponential", where it must be given, and of "step", 0.1 by
            default.
        every_updates: Number of updates that "exponential" takes for one factor, 1 by
            default.
        boundaries: Update counts at which "step" steps, in increasing order.
        timescale: Number of updates for "inverse_sqrt": the length of the warm-up by
            default, which makes it Noam's, or 10000 without one.

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

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name.lower() not in _KINDS:
            raise UnknownNameError("schedule", str(self.name), _KINDS)
        self._set("name", self.name.lower())
        self._refuse_strangers()
        self._check_ranges()
        self._check_boundaries()
        if self.name == "exponential" and self.gamma is None:
            raise ConfigError(
                "Schedule('exponential') needs gamma, the factor of each update, as in "
                "Schedule('exponential', gamma=0.999)."
            )
        if self.warmup_updates is not None and self.warmup_fraction is not None:
            raise ConfigError(
                f"{self._who} has warmup_updates={self.warmup_updates} and "
                f"warmup_fraction={self.warmup_fraction}. Give one of them."
            )
        if self.total_updates is not None or not self.needs_total:
            self.check_fits(self.total_updates or 0)

    @property
    def needs_total(self) -> bool:
        """Whether `factor` depends on the number of all updates.

        Example:
            >>> Schedule("cosine").needs_total, Schedule("constant").needs_total
            (True, False)
        """
        return self.warmup_fraction is not None or self.name in _ENDING

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
        return _KINDS[self.name].factor(self, update, total or 0)

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
        if self.name in _ENDING and self.warmup_updates and warmup >= total:
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
        kind = _KINDS[self.name]
        for name in _SETTINGS:
            if name not in kind.settings and getattr(self, name) is not None:
                owners = [n for n, k in _KINDS.items() if name in k.settings]
                raise ConfigError(
                    f"{self._who} has no {name}. It has "
                    f"{', '.join((*kind.settings, *_WARMUP))}; {name} belongs to "
                    f"{', '.join(map(repr, owners))}."
                )

    def _check_ranges(self) -> None:
        numbers: dict[str, dict[str, float]] = {
            "warmup_fraction": {"least": 0, "below": 1},
            "initial": {"least": 0, "most": 1},
            "final": {"least": 0, "most": 1},
            "power": {"above": 0},
            "gamma": {"above": 0, "most": 1},
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
        given: Any = self.boundaries
        if not isinstance(given, (list, tuple)) or not given:
            raise ConfigError(
                f"{self._who} has boundaries={given!r}: give the updates at which the "
                "rate is multiplied by gamma, as in boundaries=(1000, 2000)."
            )
        for boundary in given:
            check_whole(self._who, "a boundary", boundary, least=1)
        if list(given) != sorted(set(given)):
            raise ConfigError(f"{self._who} has boundaries={given}: sort them.")
        self._set("boundaries", tuple(given))


# Formulas ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A formula, and the settings it has besides those of the warm-up."""

    factor: Callable[[Schedule, int, int], float]
    settings: tuple[str, ...] = ()


def _warmed_up(
    rest: Callable[[Schedule, int, int], float],
) -> Callable[[Schedule, int, int], float]:
    """Put a warm-up before a formula of the updates after it, and of their number."""

    def factor(schedule: Schedule, update: int, total: int) -> float:
        warmup = schedule.warmup(total)
        if update < warmup:
            return _between(schedule.initial or 0.0, 1.0, update / warmup)
        return rest(schedule, update - warmup, max(1, total - warmup))

    return factor


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def _constant(schedule: Schedule, update: int, total: int) -> float:
    return 1.0


def _linear(schedule: Schedule, update: int, total: int) -> float:
    return _between(1.0, schedule.final or 0.0, min(1.0, update / total))


def _cosine(schedule: Schedule, update: int, total: int) -> float:
    return _half_cosine(1.0, schedule.final or 0.0, min(1.0, update / total))


def _cosine_restarts(schedule: Schedule, update: int, total: int) -> float:
    final = schedule.final or 0.0
    if update >= total:
        return final
    share = update * (schedule.cycles or 1) % total / total
    return _half_cosine(1.0, final, share)


def _polynomial(schedule: Schedule, update: int, total: int) -> float:
    power = 1.0 if schedule.power is None else schedule.power
    left = (1.0 - min(1.0, update / total)) ** power
    return _between(schedule.final or 0.0, 1.0, left)


def _exponential(schedule: Schedule, update: int, total: int) -> float:
    gamma = 1.0 if schedule.gamma is None else schedule.gamma
    return float(gamma ** (update / (schedule.every_updates or 1)))


def _inverse_sqrt(schedule: Schedule, update: int, total: int) -> float:
    warmup = schedule.warmup(total)
    timescale = schedule.timescale or warmup or 10_000
    since = max(0, update - warmup)
    return _WARM_CONSTANT(schedule, update, total) * math.sqrt(
        timescale / (since + timescale)
    )


def _step(schedule: Schedule, update: int, total: int) -> float:
    gamma = 0.1 if schedule.gamma is None else schedule.gamma
    passed = bisect.bisect_right(schedule.boundaries or (), update)
    return float(_WARM_CONSTANT(schedule, update, total) * gamma**passed)


def _one_cycle(schedule: Schedule, update: int, total: int) -> float:
    """Compute torch's one cycle: `initial` at the first update, `final` at the last."""
    initial = 1.0 / 25.0 if schedule.initial is None else schedule.initial
    final = 1.0 / 25.0 / 1e4 if schedule.final is None else schedule.final
    if schedule.warmup_updates is not None:
        top = schedule.warmup_updates - 1.0
    else:
        share = schedule.warmup_fraction
        top = (0.3 if share is None else share) * total - 1.0
    if update < top:
        return _half_cosine(initial, 1.0, update / top)
    rest = total - 1 - top
    share = min(1.0, (update - top) / rest) if rest > 0 else 1.0
    return _half_cosine(1.0, final, share)


_WARM_CONSTANT = _warmed_up(_constant)

_KINDS = {
    "constant": _Kind(_WARM_CONSTANT),
    "linear": _Kind(_warmed_up(_linear), ("final",)),
    "cosine": _Kind(_warmed_up(_cosine), ("final",)),
    "cosine_restarts": _Kind(_warmed_up(_cosine_restarts), ("final", "cycles")),
    "polynomial": _Kind(_warmed_up(_polynomial), ("final", "power")),
    "exponential": _Kind(_warmed_up(_exponential), ("gamma", "every_updates")),
    "step": _Kind(_step, ("boundaries", "gamma")),
    "inverse_sqrt": _Kind(_inverse_sqrt, ("timescale",)),
    "one_cycle": _Kind(_one_cycle, ("final",)),
}
_ENDING = ("linear", "cosine", "cosine_restarts", "polynomial", "one_cycle")
_SETTINGS = sorted({name for kind in _KINDS.values() for name in kind.settings})
