# SPDX-License-Identifier: Apache-2.0
"""Learning rates and other values between calls, set by nobody or by a `Schedule`.

Each of them writes into the parameter groups of the PopTorch optimiser; the executors
notice what has changed and send it.
"""

from __future__ import annotations

import weakref
from typing import (
    Any,
    List,
    Mapping,
    MutableMapping,
)

import torch

from ipufit.errors import ConfigError

from .following import Followed
from .schedules import Schedule

BETAS = {"beta1": 0, "beta2": 1}
"""Names of the parts of `betas`."""

_Values = List[Any]
_WRITTEN: MutableMapping[torch.optim.Optimizer, dict[str, tuple[_Values, _Values]]] = (
    weakref.WeakKeyDictionary()
)
"""Of each value, those a `Schedule` wrote into an optimiser last and those it had."""


class Rates:
    """The learning rates of an optimiser, left as they are or as a callback sets them.

    Those that set them derive from this. Updates are counted from 0.

    Attributes:
        is_scheduled: Whether something sets the rates.
        is_per_update: Whether they may change with each update.
    """

    is_scheduled = is_per_update = False

    @property
    def needs_total(self) -> bool:
        """Whether the rates depend on how many updates a fit makes."""
        return False

    @property
    def needs_epochs(self) -> bool:
        """Whether the rates depend on how many updates an epoch has."""
        return False

    def begin_fit(
        self, update: int, total: int | None, epochs: int | None = None
    ) -> None:
        """Prepare for the updates of a fit.

        Args:
            update: Index of the first of them.
            total: Number of updates; None if unknown.
            epochs: Number of epochs; None outside `fit`.
        """

    def write(self, update: int) -> None:
        """Set the rates of an update."""

    def advance(self, num_updates: int) -> None:
        """Go on by as many updates."""

    def end_epoch(self) -> None:
        """Go on to the next epoch."""

    def rescale(self, factor: float) -> None:
        """Multiply the rates that a schedule multiplies."""

    def describe(self) -> str:
        """Name what sets the rates, in words that are the same in every process."""
        return "None"

    def state_dict(self) -> dict[str, Any]:
        """Give the plain values that a resumed run needs to go on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""


class GivenRates(Rates):
    """Copy what is changed in the torch optimiser from which PopTorch's was made.

    Args:
        optimizer: The one of `poptorch.optim`.
        given: The user's, of torch.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, given: torch.optim.Optimizer
    ) -> None:
        self._followed = Followed(given, optimizer)
        self._followed.forget()

    def write(self, update: int) -> None:
        """Copy the values that were changed."""
        source = self._followed.source
        self._followed.copy_changes(f"What was done to the {type(source).__name__}")


class ScheduledValues(Rates):
    """Multiply each group's own rate, or another value, by the factor of a schedule.

    Args:
        optimizer: The one of `poptorch.optim`.
        schedule: Its lengths may be in epochs.
        name: The value; "beta1" and "beta2" are the parts of `betas`.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> rates = ScheduledValues(sgd, Schedule("linear"))
        >>> rates.begin_fit(0, total=10)
        >>> rates.write(5)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """

    is_scheduled = is_per_update = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule, name: str = "lr"
    ) -> None:
        self._optimizer = optimizer
        self._given = self._schedule = schedule
        self._name = name
        self._own = _own_values(optimizer, name)
        self._start = 0
        self._total: int | None = None
        self._per_epoch: int | None = None

    def begin_fit(
        self, update: int, total: int | None, epochs: int | None = None
    ) -> None:
        """Begin anew, unless the schedule counts over all fits."""
        if self._given.needs_epochs:
            self._count_epochs(update, updates_per_epoch(total, epochs))
        if not self._given.counts_all_fits:
            self._start, self._total = update, total
            if total is not None:
                self._schedule.check_fits(total)
        self.write(update)

    def _count_epochs(self, update: int, per_epoch: int) -> None:
        """Make updates of epochs; those made already stay as many epochs."""
        if self._per_epoch not in (None, per_epoch):
            made = (update - self._start) / (self._per_epoch or 1)
            self._start = update - round(made * per_epoch)
        self._per_epoch = per_epoch
        self._schedule = self._given.in_updates(per_epoch)

    def write(self, update: int) -> None:
        """Set the values of an update."""
        factor = self._schedule.factor(update - self._start, self._total)
        values = [value * factor for value in self._own]
        for group, value in zip(self._optimizer.param_groups, values):
            _put(group, self._name, value)
        _WRITTEN.setdefault(self._optimizer, {})[self._name] = values, self._own

    def rescale(self, factor: float) -> None:
        """Multiply the groups' own values."""
        self._own = [value * factor for value in self._own]

    @property
    def needs_total(self) -> bool:
        """Whether the schedule is stretched over the updates of a fit."""
        return self._given.needs_total and not self._given.counts_all_fits

    @property
    def needs_epochs(self) -> bool:
        """Whether the schedule has lengths in epochs."""
        return self._given.needs_epochs

    def describe(self) -> str:
        """Give the schedule with its settings."""
        return repr(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Give where the schedule began, its length, and the groups' own values."""
        state = {"start": self._start, "total": self._total, "own": list(self._own)}
        return {**state, "per_epoch": self._per_epoch} if self.needs_epochs else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._start, self._total = state["start"], state["total"]
        self._own = list(state["own"])
        self._per_epoch = state.get("per_epoch")
        if self._per_epoch is not None:
            self._schedule = self._given.in_updates(self._per_epoch)


def value_of(group: Mapping[str, Any], name: str) -> Any:
    """Read a value of a parameter group.

    Example:
        >>> value_of({"lr": 0.5, "betas": (0.9, 0.99)}, "beta2")
        0.99
    """
    return group["betas"][BETAS[name]] if name in BETAS else group[name]


def _put(group: dict[str, Any], name: str, value: float) -> None:
    if name in BETAS:
        betas = list(group["betas"])
        betas[BETAS[name]] = value
        group["betas"] = tuple(betas)
    else:
        group[name] = value


def _own_values(optimizer: torch.optim.Optimizer, name: str) -> _Values:
    """Give the groups' values without what another schedule has made of them."""
    values = [value_of(group, name) for group in optimizer.param_groups]
    written, own = _WRITTEN.get(optimizer, {}).get(name, (None, values))
    return own if values == written else values


def updates_per_epoch(total: int | None, epochs: int | None) -> int:
    """Divide the updates of a fit by its epochs.

    Args:
        total: Number of updates; None if unknown.
        epochs: Number of epochs; None outside `fit`.

    Raises:
        ConfigError: One of them is unknown.

    Example:
        >>> updates_per_epoch(300, 3)
        100
    """
    if total is None or epochs is None:
        raise ConfigError(
            "A schedule or ramp has lengths in epochs, and the number of updates of an "
            "epoch is unknown. Use fit(steps_per_epoch=...), or give it lengths in "
            "updates: warmup_updates, total_updates, every_updates, boundaries."
        )
    return max(1, total // max(1, epochs))
