# SPDX-License-Identifier: Apache-2.0
"""Schedules of learning rates, loss scaling and other values, ipufit's and torch's.

A `Schedule` is a factor on the value of each parameter group. Its formulas are those of
torch's schedulers and of the transformers library, as far as they exist there.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import math
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import (
    Any,
    Callable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Union,
)

import torch
from torch.optim import lr_scheduler

from ipufit._arguments import (
    ArgumentRepr,
    check_integer,
    check_number,
    refuse,
    shown,
)
from ipufit._kinds import check_saved, count, damaged, like, optional
from ipufit._kinds import fields as dict_with
from ipufit.errors import (
    ConfigError,
    UnknownNameError,
    UnsupportedError,
    refuse_foreign,
    suggesting_constructor,
)

from .values import mark_variable, numeric_settings, plain, set_value, value_of


def to_updates(epochs: float, updates_per_epoch: int, least: int = 1) -> int:
    """Convert a length in epochs to updates, rounded to the nearest.

    Example:
        >>> to_updates(1.5, updates_per_epoch=3)
        5
    """
    return max(least, math.floor(epochs * updates_per_epoch + 0.5))


# Loss scaling ----------------------------------------------------------------------

FLOAT16_LOSS_SCALING = 128.0
"""Loss scaling of float16 training unless the user sets it.

Graphcore's CNN training begins with this value. It keeps most of the gradients that
float16 would lose, and leaves room for sums of gradients below the largest float16,
65504.
"""


@suggesting_constructor
@dataclass(frozen=True, repr=False)
class LossScaleRamp(ArgumentRepr):
    """Multiply the loss scaling by a factor at regular intervals.

    Gradients shrink during training, so float16 can take a larger scaling later.
    Updates are counted over all fits since `compile`. The velocity of SGD with
    `use_combined_accum=True` is scaled too, unless `velocity_scaling` is set.

    Args:
        initial: Scaling of the first updates.
        factor: Factor by which the scaling grows; above 1.
        every_updates: Number of updates between two steps; None if `every_epochs` is
            set.
        maximum: Largest scaling; 32768, the largest power of 2 in float16, by default.
        every_epochs: Number of epochs between two steps, whole or not. `fit` converts
            it to updates, rounded to the nearest.

    Raises:
        ConfigError: A value is out of range.

    Example:
        >>> ramp = LossScaleRamp(128, factor=2, every_updates=1000, maximum=512)
        >>> [ramp.value(update) for update in (0, 999, 1000, 2000, 9000)]
        [128.0, 128.0, 256.0, 512.0, 512.0]
    """

    initial: float
    factor: float
    every_updates: int | None = None
    maximum: float = 32768.0
    every_epochs: float | None = None

    def __post_init__(self) -> None:
        where = "LossScaleRamp"
        check_number("initial", self.initial, of=where, above=0)
        check_number("factor", self.factor, of=where, above=1)
        if self.every_epochs is None:
            check_integer("every_updates", self.every_updates, of=where, least=1)
        else:
            check_number("every_epochs", self.every_epochs, of=where, above=0)
            if self.every_updates is not None:
                raise ConfigError(
                    f"LossScaleRamp has every_updates={self.every_updates} and "
                    f"every_epochs={self.every_epochs}. Give one of them."
                )
        check_number("maximum", self.maximum, of=where, above=0)
        if self.maximum < self.initial:
            raise ConfigError(
                f"LossScaleRamp has maximum={self.maximum}, which is less than "
                f"initial={self.initial}. Raise maximum, or lower initial."
            )

    def in_updates(self, updates_per_epoch: int) -> LossScaleRamp:
        """Return a ramp with `every_epochs` converted to updates.

        Example:
            >>> LossScaleRamp(1, 2, every_epochs=1.5).in_updates(100).every_updates
            150
        """
        if self.every_epochs is None:
            return self
        every = to_updates(self.every_epochs, updates_per_epoch)
        return replace(self, every_updates=every, every_epochs=None)

    def value(self, update: int) -> float:
        """Compute the scaling of an update.

        Args:
            update: The update's index, from 0.

        Returns:
            `min(maximum, initial * factor ** (update // every_updates))`.

        Example:
            >>> LossScaleRamp(1, factor=4, every_updates=1, maximum=8).value(1)
            4.0
        """
        # The length of an epoch is unknown only before the first update.
        steps = update // self.every_updates if self.every_updates else 0
        # Limited, because the power of many steps would overflow.
        enough = math.ceil(math.log(self.maximum / self.initial, self.factor))
        if steps > enough:
            return float(self.maximum)
        return float(min(self.maximum, self.initial * self.factor**steps))


# Schedules -------------------------------------------------------------------------

# Name of a schedule -> its settings besides those of the warm-up.
_SETTINGS = {
    "constant": (),
    "linear": ("final",),
    "cosine": ("final",),
    "cosine_restarts": (
        *("final", "cycles", "every_updates", "every_epochs", "t_mul", "m_mul"),
    ),
    "polynomial": ("final", "power"),
    "exponential": ("gamma", "every_updates", "every_epochs"),
    "step": ("boundaries", "gamma", "boundary_epochs", "factors"),
    "inverse_sqrt": ("timescale",),
    "inverse_time": ("timescale",),
    "one_cycle": ("final",),
}
_STRETCHED = ("linear", "cosine", "cosine_restarts", "polynomial", "one_cycle")
_WARMUP = ("warmup_updates", "warmup_fraction", "initial", "total_updates")
_BOUNDS: dict[str, dict[str, Any]] = {
    "warmup_fraction": {"least": 0, "below": 1},
    "initial": {"least": 0, "most": 1},
    "final": {"least": 0},
    "power": {"above": 0},
    "gamma": {"above": 0, "most": 1},
    "warmup_epochs": {"least": 0},
    "total_epochs": {"above": 0},
    "every_epochs": {"above": 0},
    "warmup_updates": {"least": 0, "is_whole": True},
    "total_updates": {"least": 1, "is_whole": True},
    "cycles": {"least": 1, "is_whole": True},
    "every_updates": {"least": 1, "is_whole": True},
    "timescale": {"above": 0},
    "t_mul": {"least": 1},
    "m_mul": {"above": 0},
}
"""What a setting must be, for `check_number`."""

_IN_EPOCHS = {
    "warmup_epochs": "warmup_updates",
    "total_epochs": "total_updates",
    "every_epochs": "every_updates",
    "boundary_epochs": "boundaries",
}
"""Lengths in epochs, and the settings that are the same in updates."""


_EITHER = (
    ("warmup_updates", "warmup_fraction"),
    *_IN_EPOCHS.items(),
    ("warmup_epochs", "warmup_fraction"),
    *(("cycles", name) for name in ("every_updates", "every_epochs", "t_mul", "m_mul")),
    ("factors", "gamma"),
)
"""Settings that exclude each other."""


@suggesting_constructor
@dataclass(frozen=True, repr=False)
class Schedule(ArgumentRepr):
    """How the learning rate, or another value, changes from update to update.

    Lengths are numbers of updates, or of epochs, which needn't be whole. `fit` converts
    epochs to updates, rounded to the nearest.

    With a warm-up the factor rises linearly from `initial` to 1, and the rest of the
    schedule follows. The names, with `p` for the share of the rest that is done:

    - "constant": 1.
    - "linear": from 1 to `final`.
    - "cosine": `final + (1 - final) * (1 + cos(pi * p)) / 2`.
    - "cosine_restarts": the cosine, repeated `cycles` times; or with `every_updates`
      again and again, each cycle `t_mul` times as long as the one before, and beginning
      `m_mul` times as high above `final`.
    - "polynomial": `final + (1 - final) * (1 - p) ** power`.
    - "exponential": `gamma` to the power of the updates since the warm-up, divided by
      `every_updates`.
    - "step": multiplied by `gamma` at each of `boundaries`, counted from the first
      update; or any `factors`.
    - "inverse_sqrt": `sqrt(timescale / (updates since the warm-up + timescale))`.
    - "inverse_time": the same without the root.
    - "one_cycle": by half cosines from `initial` up to 1, then down to `final`; the
      way up is the warm-up, 0.3 of the updates by default. Momentum isn't changed.

    Args:
        name: Name of the schedule.
        warmup_updates: Length of the warm-up, in updates.
        warmup_fraction: Length of the warm-up, as a share of all updates.
        initial: Factor that the warm-up begins with, 0 by default (1/25 for
            "one_cycle").
        total_updates: Where the schedule ends; updates are counted over all fits since
            `compile`. None for the updates of a fit: each fit begins anew.
        final: Factor at the end and from there on; 0 by default (4e-6 for "one_cycle").
            Above 1 only for other values than learning rates.
        cycles: Number of cycles of "cosine_restarts", 1 by default.
        power: Exponent of "polynomial", 1 by default.
        gamma: Factor of "exponential", which has no default, and of "step", 0.1 by
            default.
        every_updates: Number of updates that "exponential" takes for one factor, 1 by
            default; or of the first cycle of "cosine_restarts".
        boundaries: Update counts at which "step" steps, in increasing order.
        timescale: Number of updates for "inverse_sqrt" and "inverse_time": the length
            of the warm-up by default, which makes the former Noam's schedule, or 10000
            without a warm-up.
        warmup_epochs: `warmup_updates`, in epochs.
        total_epochs: `total_updates`, in epochs.
        every_epochs: `every_updates`, in epochs.
        boundary_epochs: `boundaries`, in epochs.
        factors: Factors of "step" before the first boundary, between two, and after the
            last, in place of `gamma`: one more than boundaries.
        t_mul: Factor by which each cycle is longer than the one before, 1 by default.
        m_mul: Factor by which each cycle begins higher, 1 by default.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: A value is out of range, or the schedule has no such setting.

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
    factors: Sequence[float] | None = None
    t_mul: float | None = None
    m_mul: float | None = None

    def __post_init__(self) -> None:
        name = self.name if isinstance(self.name, str) else shown(self.name)
        if name.lower() not in _SETTINGS:
            raise UnknownNameError("schedule", name, _SETTINGS)
        object.__setattr__(self, "name", name.lower())
        self._check_settings()
        if self.name == "step":
            self._check_boundaries()
        if self.name == "exponential" and self.gamma is None:
            raise ConfigError(
                "Schedule('exponential') needs gamma, the factor of each update, as in "
                "Schedule('exponential', gamma=0.999)."
            )
        for name, twin in _EITHER:
            values = getattr(self, name), getattr(self, twin)
            if None not in values:
                raise ConfigError(
                    f"{self._who} has {name}={values[0]} and {twin}={values[1]}. Give "
                    "one of them."
                )
        for name in ("t_mul", "m_mul"):
            if getattr(self, name) is not None and self._is_stretched:
                raise ConfigError(
                    f"{self._who} has {name}={getattr(self, name)} and no length of a "
                    "cycle. Give every_updates or every_epochs."
                )
        if self.needs_epochs:
            return  # the rest can be checked when `fit` knows the length of an epoch
        if self.total_updates is not None or not self.needs_total:
            self.check_fits(self.total_updates or 0)

    @property
    def needs_epochs(self) -> bool:
        """Whether a length is in epochs, so that `factor` needs `in_updates` first."""
        return any(getattr(self, name) is not None for name in _IN_EPOCHS)

    @property
    def counts_all_fits(self) -> bool:
        """Whether updates are counted since `compile`, and not in each fit."""
        return self.total_updates is not None or self.total_epochs is not None

    def in_updates(self, updates_per_epoch: int) -> Schedule:
        """Return a schedule with lengths in epochs converted to updates.

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
        changes: dict[str, Any] = dict.fromkeys(_IN_EPOCHS)
        for name, twin in _IN_EPOCHS.items():
            length = getattr(self, name)
            if isinstance(length, tuple):
                changes[twin] = [to_updates(part, updates_per_epoch) for part in length]
            elif length is not None:
                least = 0 if name == "warmup_epochs" else 1
                changes[twin] = to_updates(length, updates_per_epoch, least)
        return replace(self, **changes)

    @property
    def needs_total(self) -> bool:
        """Whether `factor` depends on the number of all updates.

        Example:
            >>> Schedule("cosine").needs_total, Schedule("constant").needs_total
            (True, False)
        """
        return self.warmup_fraction is not None or self._is_stretched

    @property
    def _is_stretched(self) -> bool:
        """Whether the schedule takes all updates, and doesn't repeat in cycles."""
        lengths = self.every_updates, self.every_epochs
        return self.name in _STRETCHED and lengths == (None, None)

    def factor(self, update: int, total: int | None = None) -> float:
        """Compute the factor on the learning rate of an update.

        Args:
            update: The update's index, from 0.
            total: Number of all updates, used if `total_updates` is None.

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
                "data is unknown. Pass total_updates=..., or fit(steps_per_epoch="
                "...)."
            )
        total = total or 0
        if self.name == "one_cycle":
            return self._one_cycle(update, total)
        warmup = self.warmup(total)
        if update < warmup:
            return _between(self.initial or 0.0, 1.0, update / warmup)
        return self._after_warmup(update - warmup, max(1, total - warmup), warmup)

    def _after_warmup(self, update: int, total: int, warmup: int) -> float:
        """Compute the factor of an update; both counts exclude the warm-up."""
        final, share = self.final or 0.0, min(1.0, update / total)
        if self.name == "linear":
            return _between(1.0, final, share)
        if self.name == "cosine_restarts" and self.every_updates is not None:
            return self._restarted(update, final)
        if self.name in ("cosine", "cosine_restarts"):
            if update >= total:
                return final
            of_cycle = update * (self.cycles or 1) % total / total
            return _half_cosine(1.0, final, of_cycle)
        if self.name == "polynomial":
            power = 1.0 if self.power is None else self.power
            return _between(final, 1.0, (1.0 - share) ** power)
        if self.name == "exponential":
            return float((self.gamma or 1.0) ** (update / (self.every_updates or 1)))
        if self.name in ("inverse_sqrt", "inverse_time"):
            timescale = self.timescale or warmup or 10_000
            share = timescale / (update + timescale)
            return share if self.name == "inverse_time" else math.sqrt(share)
        if self.name == "step":
            gamma = 0.1 if self.gamma is None else self.gamma
            passed = bisect.bisect_right(self.boundaries or (), update + warmup)
            return float(
                gamma**passed if self.factors is None else self.factors[passed]
            )
        return 1.0

    def _restarted(self, update: int, final: float) -> float:
        """Compute the factor in cycles whose length and height grow."""
        length, growth = float(self.every_updates or 1), self.t_mul or 1.0
        num_cycles, done = divmod(update, length) if growth == 1.0 else (0, update)
        while done >= length:
            num_cycles, done, length = num_cycles + 1, done - length, length * growth
        height = (1.0 - final) * (self.m_mul or 1.0) ** num_cycles
        return _half_cosine(final + height, final, done / length)

    def _one_cycle(self, update: int, total: int) -> float:
        """Compute torch's cycle: `initial` at the first update, `final` at the last."""
        initial = 1.0 / 25.0 if self.initial is None else self.initial
        final = 1.0 / 25.0 / 1e4 if self.final is None else self.final
        if self.warmup_updates is not None:
            top = self.warmup_updates - 1.0
        else:
            fraction = self.warmup_fraction
            top = (0.3 if fraction is None else fraction) * total - 1.0
        if update < top:
            return _half_cosine(initial, 1.0, update / top)
        rest = total - 1 - top
        share = min(1.0, (update - top) / rest) if rest > 0 else 1.0
        return _half_cosine(1.0, final, share)

    def check_fits(self, total: int) -> None:
        """Refuse a warm-up that leaves too few updates for the schedule.

        Args:
            total: Number of all updates, used if the schedule needs it.

        Raises:
            ConfigError: The warm-up takes all updates, or passes a boundary.

        Example:
            >>> Schedule("linear", warmup_updates=10).check_fits(5)
            Traceback (most recent call last):
            ipufit.errors.ConfigError: Schedule('linear') warms up for 10 updates...
        """
        warmup = self.warmup(total)
        if self._is_stretched and self.warmup_updates and warmup >= total:
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

    @property
    def _who(self) -> str:
        return f"Schedule({self.name!r})"

    def _check_settings(self) -> None:
        settings = _SETTINGS[self.name]
        for name in sorted({name for names in _SETTINGS.values() for name in names}):
            if name not in settings and getattr(self, name) is not None:
                owners = [repr(n) for n, names in _SETTINGS.items() if name in names]
                raise ConfigError(
                    f"{self._who} has no {name}. It has "
                    f"{', '.join((*settings, *_WARMUP))}; {name} belongs to "
                    f"{', '.join(owners)}."
                )
        for name, bounds in _BOUNDS.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), of=self._who, **bounds)

    def _check_boundaries(self) -> None:
        name = "boundaries" if self.boundary_epochs is None else "boundary_epochs"
        boundaries: Any = getattr(self, name)
        if not isinstance(boundaries, (list, tuple)) or not boundaries:
            raise ConfigError(
                f"{self._who} has {name}={boundaries!r}: give the updates at which the "
                "rate is multiplied by gamma, as in boundaries=(1000, 2000), or the "
                "epochs, as in boundary_epochs=(30, 60)."
            )
        for boundary in boundaries:
            if name == "boundaries":
                check_integer("a boundary", boundary, of=self._who, least=1)
            else:
                check_number("a boundary", boundary, of=self._who, above=0)
        if list(boundaries) != sorted(set(boundaries)):
            raise ConfigError(
                f"{self._who} has {name}={boundaries}: sort them, each above the one "
                "before."
            )
        object.__setattr__(self, name, tuple(boundaries))
        if self.factors is None:
            return
        if not isinstance(self.factors, (list, tuple)):
            refuse("factors", self.factors, "a list of numbers", of="Schedule")
        if len(self.factors) != len(boundaries) + 1:
            raise ConfigError(
                f"{self._who} has {len(self.factors)} factors and {len(boundaries)} "
                f"{name}: give one factor more than boundaries."
            )
        for factor in self.factors:
            check_number("a factor", factor, of=self._who, least=0)
        object.__setattr__(self, "factors", tuple(self.factors))


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


# Setting the values of an optimizer -------------------------------------------------


class Fit(NamedTuple):
    """The updates of a fit.

    Attributes:
        first: Index of the first update, counted since `compile`.
        per_epoch: Number of updates of an epoch; None if unknown.
        epochs: Number of epochs; None outside `fit`.
    """

    first: int
    per_epoch: int | None
    epochs: int | None

    @property
    def num_updates(self) -> int | None:
        """Number of updates; None if unknown.

        Example:
            >>> Fit(0, 100, epochs=3).num_updates
            300
        """
        if self.per_epoch is None or self.epochs is None:
            return self.per_epoch
        return self.per_epoch * self.epochs

    @property
    def updates_per_epoch(self) -> int:
        """Number of updates of an epoch, for lengths in epochs; 1 or more.

        Raises:
            ConfigError: The number is unknown.
        """
        if self.per_epoch is None:
            raise ConfigError(
                "A schedule or ramp has lengths in epochs, and the number of updates "
                "of an epoch is unknown. Use fit(steps_per_epoch=...), or lengths in "
                "updates: warmup_updates, total_updates, every_updates, boundaries."
            )
        return max(1, self.per_epoch)


class Setter:
    """Base of classes that set values of an optimizer's parameter groups.

    Executors notice changed values, and send them to the device.

    Attributes:
        needs_total: Whether values depend on the number of updates of a fit.
        needs_epochs: Whether values depend on the number of updates of an epoch.
        is_per_update: Whether values may change with each update.
    """

    needs_total = needs_epochs = is_per_update = False

    def begin_fit(self, fit: Fit) -> None:
        """Prepare for the updates of a fit."""

    def write(self, update: int) -> None:
        """Set the values of an update."""

    def step(self, *, updates: int = 0, epochs: int = 0) -> None:
        """Count updates after a call, or an epoch at its end."""

    def go_on(self, state: Mapping[str, Any], num_updates: int) -> None:
        """Continue a fit from a state, after updates of another run."""

    def describe(self) -> str:
        """Describe the schedule in words that are equal in every process."""
        return "None"

    def state_dict(self) -> dict[str, Any]:
        """Return the plain values that a resumed run needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""

    def check_state(self, state: Any, where: str, is_begun: bool) -> None:
        """Refuse a state that can't be of this schedule; change nothing.

        Args:
            state: A saved state.
            where: Name of the state in error messages.
            is_begun: Whether updates were made. Lengths are unknown before the first.

        Raises:
            DamagedCheckpointError: The state can't be of this schedule.
        """
        kinds = {name: like(value) for name, value in self.state_dict().items()}
        lengths = {"total": self.needs_total, "per_epoch": self.needs_epochs}
        for name in set(lengths).intersection(kinds):
            is_known = is_begun and lengths[name]
            kinds[name] = count if is_known else optional(count)
        check_saved(dict_with(kinds, is_closed=True), state, where)


class ScheduledValues(Setter):
    """Multiplies the rates of parameter groups, or other values, by a schedule.

    The values before the first update are multiplied.
    """

    is_per_update = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, name: str = "lr"
    ) -> None:
        self.needs_epochs = schedule.needs_epochs
        self.needs_total = schedule.needs_total and not schedule.counts_all_fits
        self._optimizer = optimizer
        self._as_made = self._schedule = schedule
        self._name = name
        self._start = 0
        self._total: int | None = None
        self._per_epoch: int | None = None
        # If the optimizer is compiled again, its values are a schedule's by now.
        values = [value_of(group, name) for group in optimizer.param_groups]
        self._written = vars(optimizer).setdefault("_written_by_schedules", {})
        written, base = self._written.get(name, (None, values))
        self._base = base if values == written else values
        mark_variable(optimizer, name)

    def begin_fit(self, fit: Fit) -> None:
        """Restart the schedule, unless it counts over all fits."""
        if self.needs_epochs:
            per_epoch = fit.updates_per_epoch
            if self._per_epoch not in (None, per_epoch):
                # The number of epochs so far is kept.
                made = (fit.first - self._start) / (self._per_epoch or 1)
                self._start = fit.first - round(made * per_epoch)
            self._per_epoch = per_epoch
            self._schedule = self._as_made.in_updates(per_epoch)
        if not self._as_made.counts_all_fits:
            self._start, self._total = fit.first, fit.num_updates
            if fit.num_updates is not None:
                self._schedule.check_fits(fit.num_updates)
        self.write(fit.first)

    def write(self, update: int) -> None:
        """Set the values of an update."""
        factor = self._schedule.factor(update - self._start, self._total)
        values = [value * factor for value in self._base]
        for group, value in zip(self._optimizer.param_groups, values):
            set_value(group, self._name, value)
        self._written[self._name] = values, self._base

    def go_on(self, state: Mapping[str, Any], num_updates: int) -> None:
        """Restore a state, and skip the updates of another run.

        A schedule that counts the updates of all fits counts those, too.
        """
        self.load_state_dict(state)
        if not self._as_made.counts_all_fits:
            self._start += num_updates

    def describe(self) -> str:
        """Return the schedule with its settings."""
        return repr(self._as_made)

    def state_dict(self) -> dict[str, Any]:
        """Return start and length of the schedule, and the base values of groups."""
        state = {"start": self._start, "total": self._total, "own": list(self._base)}
        return {**state, "per_epoch": self._per_epoch} if self.needs_epochs else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._start, self._total = state["start"], state["total"]
        self._base = list(state["own"])
        self._per_epoch = state.get("per_epoch")
        self._schedule = self._as_made
        if self._per_epoch is not None:
            self._schedule = self._as_made.in_updates(self._per_epoch)


class RampedScaling(Setter):
    """Sets the loss scaling of a ramp, and the velocity scaling of SGD if needed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, ramp: LossScaleRamp, has_velocity: bool
    ) -> None:
        self.needs_epochs = ramp.every_epochs is not None
        self._optimizer = optimizer
        self._as_made = self._ramp = ramp
        self._has_velocity = has_velocity

    def begin_fit(self, fit: Fit) -> None:
        """Convert a length in epochs to updates."""
        if self.needs_epochs:
            self._ramp = self._as_made.in_updates(fit.updates_per_epoch)

    def write(self, update: int) -> None:
        """Set the scaling of an update."""
        scaling = self._ramp.value(update)
        self._optimizer.loss_scaling = scaling  # type: ignore[attr-defined]
        if self._has_velocity:
            for group in self._optimizer.param_groups:
                group["velocity_scaling"] = scaling

    def state_dict(self) -> dict[str, Any]:
        """Return the ramp of this fit, with its lengths in updates."""
        return {"ramp": self._ramp}

    def go_on(self, state: Mapping[str, Any], num_updates: int) -> None:
        """Continue with the ramp of the fit, which counts the other run's updates."""
        self._ramp = state["ramp"]


class OptimizerMirror(Setter):
    """Copies changes of the user's optimizer into the PopTorch optimizer made from it.

    Args:
        optimizer: The optimizer of `poptorch.optim`.
        source: The user's optimizer; it may be `optimizer` itself.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, source: torch.optim.Optimizer
    ) -> None:
        self.source = source
        self._optimizer = optimizer
        self.forget()

    def forget(self) -> None:
        """Take the present values as copied: only later changes will be copied."""
        self._copied = self._values()

    def write(self, update: int) -> None:
        """Copy the values that have changed."""
        self.copy_changes(f"What was done to the {type(self.source).__name__}")

    def copy_changes(self, who: str) -> None:
        """Copy the values that have changed since the last time.

        Args:
            who: Name of the code that made the changes, for messages.

        Raises:
            ConfigError: A changed value is a constant of the compiled program.
        """
        values = self._values()
        is_constant = self._optimizer.variable_attrs.isConstant  # type: ignore[attr-defined]
        for group, old, new in zip(self._optimizer.param_groups, self._copied, values):
            for name in new:
                if new[name] == old[name]:
                    continue
                if name == "lr":
                    check_number(name, new[name], of=f"{who}, which", least=0)
                if is_constant(name):
                    raise ConfigError(
                        f"{who} changes {name}, which is a constant of the compiled "
                        f"program. Pass {name} when you make the optimizer, so that it "
                        "can change."
                    )
                group[name] = new[name]
        self._copied = values

    def _values(self) -> list[dict[str, Any]]:
        names = ["lr", "momentum", "betas", "weight_decay", "eps", "alpha"]
        names += ["dampening", "nesterov"]
        return [
            {name: plain(group[name]) for name in names if name in group}
            for group in self.source.param_groups
        ]


# Schedulers of torch ----------------------------------------------------------------


@suggesting_constructor
@dataclass(frozen=True, repr=False)
class PerEpoch(ArgumentRepr):
    """Step a scheduler of torch at the end of each epoch, not of each update.

    For `compile(lr_schedule=...)`. An `ipufit.Schedule` has lengths in epochs instead.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler` that is bound to the
            optimizer of `compile`, or a function that makes a scheduler for an
            optimizer.

    Example:
        >>> PerEpoch(lambda optimizer: lr_scheduler.StepLR(optimizer, 30))
        PerEpoch(scheduler=<function <lambda> at ...>)
    """

    scheduler: Any


class TorchScheduler(Setter):
    """Steps a scheduler of torch, once per update or once per epoch.

    If the scheduler is bound to the user's torch optimizer, the values that it changes
    are copied to the PopTorch optimizer.

    Args:
        optimizer: An optimizer of `poptorch.optim`.
        scheduler: Scheduler that is bound to `optimizer`, or to the torch optimizer
            that `optimizer` was made from.
        per_epoch: If True, the scheduler is stepped at the end of each epoch.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, *, per_epoch: bool
    ) -> None:
        self._scheduler = scheduler
        self._who = type(scheduler).__name__
        self._per_epoch = per_epoch
        self.is_per_update = not per_epoch
        changed = {"lr"}
        if any(
            getattr(part, "cycle_momentum", False)
            for part in _list_schedulers(scheduler)
        ):
            changed |= {"betas", "momentum"} & set(optimizer.defaults)
        for name in sorted(changed):
            mark_variable(optimizer, name)
        # A scheduler sets values when it is made, too. PopTorch's optimizer may not
        # have them yet.
        self._mirror = OptimizerMirror(optimizer, optimizer)
        self._mirror.source = scheduler.optimizer
        self._mirror.copy_changes(self._who)

    def begin_fit(self, fit: Fit) -> None:
        """Refuse a fit that is longer than a scheduler such as OneCycleLR."""
        if self._per_epoch and fit.epochs is None:
            raise ConfigError(
                f"{self._who} is stepped per epoch (ipufit.PerEpoch), and "
                "train_on_batch has no epochs. Use fit, or step it per update."
            )
        unit, coming = "updates", fit.num_updates
        if self._per_epoch:
            unit, coming = "epochs", fit.epochs
        if coming is None or not isinstance(self._scheduler, lr_scheduler.OneCycleLR):
            return
        made, end = self._scheduler.last_epoch, self._scheduler.total_steps
        if made + coming > end:
            raise ConfigError(
                f"OneCycleLR ends after {end} {unit}, of which {made} are made, and "
                f"{coming} are to come. Make it with total_steps={made + coming} or "
                "more."
            )

    def step(self, *, updates: int = 0, epochs: int = 0) -> None:
        """Step the scheduler once per update or epoch, and copy changed values."""
        source, times = self._mirror.source, epochs if self._per_epoch else updates
        with contextlib.ExitStack() as stack:
            # A copied scheduler isn't linked to the copied optimizer, of which torch
            # warns in the first step. Python shows all warnings again after a catch.
            parts = _list_schedulers(self._scheduler)
            if any(getattr(part, "_step_count", 1) == 1 for part in parts):
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            for _ in range(times):
                # Schedulers warn if the optimizer was never stepped. The device has
                # made the step, so an empty step is made here.
                groups, source.param_groups = source.param_groups, []
                try:
                    source.step()
                finally:
                    source.param_groups = groups
                self._scheduler.step()
        self._mirror.copy_changes(self._who)

    def describe(self) -> str:
        """Name the classes of the scheduler and of schedulers that it calls."""
        names = ", ".join(
            type(part).__name__ for part in _list_schedulers(self._scheduler)
        )
        return f"PerEpoch({names})" if self._per_epoch else names

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the numbers of its optimizer."""
        return {
            "scheduler": _plain_state(self._scheduler.state_dict()),
            "groups": [
                {n: _plain_state(v) for n, v in group.items() if _is_plain(v)}
                for group in self._mirror.source.param_groups
            ],
        }

    def check_state(self, state: Any, where: str, is_begun: bool) -> None:
        """Refuse a state that a copy of the scheduler can't load."""
        super().check_state(state, where, is_begun)
        source = self._mirror.source
        if not all(map(_has_no_user_code, _list_schedulers(self._scheduler))):
            return
        groups = [dict(group) for group in source.param_groups]
        stub = SimpleNamespace(param_groups=groups, defaults=source.defaults)
        try:
            copied = copy.deepcopy(self._scheduler, {id(source): stub})
        except TypeError:  # CyclicLR holds a WeakMethod in torch 2.0
            return
        try:
            copied.load_state_dict(dict(state["scheduler"]))
            for part in _list_schedulers(copied):
                part._get_lr_called_within_step = True
                with contextlib.suppress(NotImplementedError):  # raised by SequentialLR
                    part.get_lr()
        except Exception as error:  # torch's code may raise anything
            raise damaged(
                f"{where}.scheduler isn't one of {self._who}: {error!r}"
            ) from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._scheduler.load_state_dict(dict(state["scheduler"]))
        for group, values in zip(self._mirror.source.param_groups, state["groups"]):
            for name, value in values.items():
                is_tuple = isinstance(group.get(name), tuple)  # betas
                group[name] = tuple(value) if is_tuple else value
        self._mirror.forget()


def _list_schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler, and the schedulers that it calls."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _list_schedulers(part)


def _has_no_user_code(scheduler: Any) -> bool:
    """Return whether the rates depend on the scheduler's state alone."""
    calling = lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR
    return (
        type(scheduler).__module__.startswith("torch.optim.")
        and not isinstance(scheduler, calling)
        and getattr(scheduler, "_scale_fn_custom", None) is None  # CyclicLR's
    )


def _plain_state(value: Any) -> Any:
    """Return a scheduler's state without values that JSON can't hold.

    Functions and the Counter of MultiStepLR's milestones are left out: both are
    settings, which the scheduler that loads the state has already. Tuples become lists.
    """
    if isinstance(value, dict):
        return {
            name: _plain_state(part)
            for name, part in value.items()
            if not callable(part) and not isinstance(part, Counter)
        }
    is_listed = type(value) in (list, tuple)
    return [*map(_plain_state, value)] if is_listed else value


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, or a tuple or list of numbers like betas."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    return all(type(part) in (int, float) for part in parts)


# What `compile` gets ----------------------------------------------------------------

ScheduleLike = Union[
    str,
    Schedule,
    PerEpoch,
    lr_scheduler.LRScheduler,
    Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
    None,
]
"""A name, a `Schedule`, a scheduler of torch, or a function that makes a scheduler."""

SchedulesLike = Union[Mapping[str, Union[str, Schedule]], None]
"""Names of values of parameter groups, and the schedule of each."""


def make_rates(
    lr_schedule: ScheduleLike, optimizer: torch.optim.Optimizer, source: object
) -> Setter:
    """Create the setter of an optimizer's learning rates.

    Args:
        lr_schedule: A name, a `Schedule`, a scheduler of torch that is bound to
            `source`, a function that makes a scheduler for an optimizer, or None.
        optimizer: An optimizer of `poptorch.optim`.
        source: The optimizer of the user, or its name or description.

    Raises:
        UnknownNameError: There is no schedule of that name.
        ConfigError: The scheduler is bound to another optimizer, or isn't a scheduler.
        UnsupportedError: The scheduler is torch's ReduceLROnPlateau.
    """
    followed = source if isinstance(source, torch.optim.Optimizer) else optimizer
    if lr_schedule is None:
        if followed is optimizer:
            return Setter()
        return OptimizerMirror(optimizer, followed)
    if isinstance(lr_schedule, str):
        lr_schedule = Schedule(lr_schedule)
    if isinstance(lr_schedule, Schedule):
        if lr_schedule.final is not None and lr_schedule.final > 1:
            raise ConfigError(
                f"lr_schedule has final={lr_schedule.final}: use a number at least 0 "
                "and at most 1. It is the share of the optimizer's learning rate at "
                "the end."
            )
        return ScheduledValues(optimizer, lr_schedule)
    scheduler: Any = lr_schedule
    if isinstance(lr_schedule, PerEpoch):
        scheduler = lr_schedule.scheduler
        if isinstance(scheduler, (str, Schedule)):
            raise ConfigError(
                f"lr_schedule={lr_schedule!r}: PerEpoch is for schedulers of torch. "
                "Pass a schedule with lengths in epochs: ipufit.Schedule('step', "
                "boundary_epochs=(30, 60)), or warmup_epochs, total_epochs, "
                "every_epochs."
            )
    refuse_foreign("lr_schedule", scheduler, "an ipufit.Schedule")
    if isinstance(scheduler, type):
        raise ConfigError(
            f"lr_schedule={scheduler.__name__} is a class. Pass a scheduler of the "
            f"optimizer, or lambda optimizer: {scheduler.__name__}(optimizer, ...)."
        )
    # In torch 2.0 ReduceLROnPlateau isn't an LRScheduler.
    kinds = lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau
    advice = (
        "For a function of the update's index pass lambda optimizer: LambdaLR("
        "optimizer, function); one of epoch and rate goes to callbacks=["
        "ipufit.LearningRateScheduler(function)]."
    )
    if not isinstance(scheduler, kinds) and callable(scheduler):
        try:
            scheduler = scheduler(followed)
        except TypeError as error:
            raise ConfigError(
                f"lr_schedule={shown(lr_schedule)} can't be called with the optimizer: "
                f"{error}. It must return a scheduler of torch. {advice}"
            ) from error
    if not isinstance(scheduler, kinds):
        raise ConfigError(
            f"lr_schedule={shown(lr_schedule)} is neither a name, nor an "
            "ipufit.Schedule, nor a scheduler of torch.optim.lr_scheduler, nor a "
            f"function that makes one of an optimizer. {advice}"
        )
    for part in _list_schedulers(scheduler):
        if isinstance(part, lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                "torch's ReduceLROnPlateau needs a metric after each epoch, which a "
                "schedule of updates doesn't have. Use the callback "
                "ipufit.ReduceLROnPlateau."
            )
        if part.optimizer is not followed:
            raise ConfigError(
                f"This {type(part).__name__} is bound to another optimizer than the "
                "one that compile() got. Make it with that one, or pass a function: "
                f"lambda optimizer: {type(part).__name__}(optimizer, ...)."
            )
    return TorchScheduler(
        optimizer, scheduler, per_epoch=isinstance(lr_schedule, PerEpoch)
    )


def make_schedules(
    schedules: SchedulesLike, optimizer: torch.optim.Optimizer
) -> dict[str, Setter]:
    """Create the setters of other values than the learning rate, by name.

    Args:
        schedules: By name of the value, such as "weight_decay" or "momentum"; "beta1"
            and "beta2" are the parts of `betas`.
        optimizer: An optimizer of `poptorch.optim`. The values are marked as variable.

    Raises:
        UnknownNameError: The optimizer has no such value, or there is no such schedule.
        ConfigError: The value is 0 in all groups, or another argument sets it.
    """
    if schedules is None:
        return {}
    if not isinstance(schedules, Mapping):
        raise ConfigError(
            f"schedules={shown(schedules)} must be a dict with the schedule of each "
            "value by name: schedules={'weight_decay': ipufit.Schedule('cosine')}."
        )
    made: dict[str, Setter] = {}
    for name, schedule in schedules.items():
        _check_name(name, optimizer)
        if isinstance(schedule, str):
            schedule = Schedule(schedule)
        if not isinstance(schedule, Schedule):
            raise ConfigError(
                f"schedules has {schedule!r} for {name!r}: use a name or an "
                "ipufit.Schedule. Schedulers of torch are for lr_schedule."
            )
        if not any(value_of(group, name) for group in optimizer.param_groups):
            raise ConfigError(
                f"schedules has {name!r}, which is 0 in every parameter group, and a "
                f"schedule is a factor. Set a {name} in the optimizer."
            )
        made[name] = ScheduledValues(optimizer, schedule, name)
    return made


def _check_name(name: Any, optimizer: torch.optim.Optimizer) -> None:
    if name in ("lr", "learning_rate"):
        raise ConfigError(
            f"schedules has {name!r}: the learning rate's schedule is "
            "compile(lr_schedule=...)."
        )
    if name in ("loss_scaling", "velocity_scaling"):
        raise ConfigError(
            f"schedules has {name!r}: use Optimizer(..., loss_scaling=ipufit."
            "LossScaleRamp(...)), which the velocity scaling follows."
        )
    known = numeric_settings(optimizer)
    if name not in known:
        raise UnknownNameError("value of a parameter group", str(name), known)
