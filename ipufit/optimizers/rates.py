# SPDX-License-Identifier: Apache-2.0
"""Learning rates between calls, set by nobody, by a `Schedule`, or by torch.

Each of them writes into the parameter groups of the PopTorch optimiser; the executors
notice what has changed and send it.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from typing import (
    Any,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Union,
)

import torch
from torch.optim import lr_scheduler

from ipufit.errors import ConfigError, UnsupportedError

from .following import Followed
from .schedules import Schedule

ScheduleLike = Union[
    str,
    Schedule,
    lr_scheduler.LRScheduler,
    Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
    None,
]
"""A name, a `Schedule`, a scheduler of torch, or what makes one for an optimiser."""

_WRITTEN: MutableMapping[torch.optim.Optimizer, tuple[list[Any], list[Any]]] = (
    weakref.WeakKeyDictionary()
)
"""The rates a `Schedule` wrote into an optimiser last, and the ones it began with."""


class Rates:
    """The learning rates of an optimiser, left as they are or as a callback sets them.

    Those that set them derive from this. Updates are counted from 0.

    Attributes:
        is_scheduled: Whether something sets the rates.
    """

    is_scheduled = False

    @property
    def needs_total(self) -> bool:
        """Whether the rates depend on how many updates a fit makes."""
        return False

    def begin_fit(self, update: int, total: int | None) -> None:
        """Prepare for the updates of a fit, `total` of them; None if unknown."""

    def write(self, update: int) -> None:
        """Set the rates of an update."""

    def advance(self, num_updates: int) -> None:
        """Go on by as many updates."""

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


class ScheduledRates(Rates):
    """Multiply each group's own rate by the factor of a schedule.

    Example:
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> rates = ScheduledRates(sgd, Schedule("linear"))
        >>> rates.begin_fit(0, total=10)
        >>> rates.write(5)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """

    is_scheduled = True

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._own = _own_rates(optimizer)
        self._start = 0
        self._total: int | None = None

    def begin_fit(self, update: int, total: int | None) -> None:
        """Begin anew, unless the schedule counts over all fits."""
        if self._schedule.total_updates is None:
            self._start, self._total = update, total
            if total is not None:
                self._schedule.check_fits(total)
        self.write(update)

    def write(self, update: int) -> None:
        """Set the rates of an update."""
        factor = self._schedule.factor(update - self._start, self._total)
        rates = [rate * factor for rate in self._own]
        for group, rate in zip(self._optimizer.param_groups, rates):
            group["lr"] = rate
        _WRITTEN[self._optimizer] = rates, self._own

    @property
    def needs_total(self) -> bool:
        """Whether the schedule is stretched over the updates of a fit."""
        return self._schedule.needs_total and self._schedule.total_updates is None

    def describe(self) -> str:
        """Give the schedule with its settings."""
        return repr(self._schedule)

    def state_dict(self) -> dict[str, Any]:
        """Give where the schedule began, its length, and the groups' own rates."""
        return {"start": self._start, "total": self._total, "own": list(self._own)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._start, self._total = state["start"], state["total"]
        self._own = list(state["own"])


def _own_rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Give the groups' rates without what another schedule has made of them."""
    rates = [group["lr"] for group in optimizer.param_groups]
    written, own = _WRITTEN.get(optimizer, (None, rates))
    return own if rates == written else rates


class TorchRates(Rates):
    """Step a scheduler of torch, once per update.

    It may be bound to the user's torch optimiser, from which the one of PopTorch was
    made: then the values it changes are copied.

    Args:
        optimizer: The one of `poptorch.optim`.
        scheduler: One that is bound to it, or to the optimiser it was made from.

    Example:
        >>> from ipufit import poptorch
        >>> sgd = poptorch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> rates = TorchRates(sgd, lr_scheduler.StepLR(sgd, 2, gamma=0.5))
        >>> rates.advance(2)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """

    is_scheduled = True

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._followed = Followed(scheduler.optimizer, optimizer)
        _mark_variable(optimizer, scheduler)
        # A scheduler sets values when it is made, too.
        self._followed.copy_changes(type(scheduler).__name__)

    def begin_fit(self, update: int, total: int | None) -> None:
        """Refuse to run past the end of a scheduler that raises there."""
        scheduler = self._scheduler
        if total is None or not isinstance(scheduler, lr_scheduler.OneCycleLR):
            return
        made, end = scheduler.last_epoch, scheduler.total_steps
        if made + total > end:
            raise ConfigError(
                f"OneCycleLR ends after {end} updates, of which {made} are made, and "
                f"{total} are to come. Make it with total_steps={made + total} or more."
            )

    def advance(self, num_updates: int) -> None:
        """Step the scheduler and copy what it has changed."""
        with warnings.catch_warnings():
            # Copies of a scheduler and its optimiser no longer know of each other.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            for _ in range(num_updates):
                _step_nothing(self._followed.source)
                self._scheduler.step()
        self._followed.copy_changes(type(self._scheduler).__name__)

    def describe(self) -> str:
        """Name the classes of the scheduler and of those that it chains."""
        return ", ".join(type(one).__name__ for one in _each(self._scheduler))

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's own state, and the numbers of its optimiser."""
        return {
            "scheduler": _plain_state(self._scheduler.state_dict()),
            "groups": [
                {name: value for name, value in group.items() if _is_plain(value)}
                for group in self._followed.source.param_groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._scheduler.load_state_dict(dict(state["scheduler"]))
        for group, values in zip(self._followed.source.param_groups, state["groups"]):
            group.update(values)
        self._followed.forget()


def make_rates(
    lr_schedule: ScheduleLike,
    optimizer: torch.optim.Optimizer,
    given: object,
) -> Rates:
    """Make what sets the rates of an optimiser.

    Args:
        lr_schedule: A name, a `Schedule`, a scheduler of torch that is bound to
            `given`, a function that makes one of an optimiser, or None.
        optimizer: One of `poptorch.optim`.
        given: The `optimizer` of the user, or its name or class.

    Raises:
        UnknownNameError: There is no schedule of that name.
        ConfigError: The scheduler is bound to another optimiser, or is none.
        UnsupportedError: The scheduler is torch's ReduceLROnPlateau.

    Example:
        >>> from ipufit import poptorch
        >>> sgd = poptorch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> type(make_rates("cosine", sgd, sgd)).__name__
        'ScheduledRates'
    """
    if lr_schedule is None:
        if isinstance(given, torch.optim.Optimizer) and given is not optimizer:
            return GivenRates(optimizer, given)
        return Rates()
    if isinstance(lr_schedule, str):
        lr_schedule = Schedule(lr_schedule)
    if isinstance(lr_schedule, Schedule):
        optimizer.variable_attrs.markAsVariable("lr")  # type: ignore[attr-defined]
        return ScheduledRates(optimizer, lr_schedule)
    bound_to = given if isinstance(given, torch.optim.Optimizer) else optimizer
    scheduler: Any = lr_schedule
    if isinstance(scheduler, type):
        raise ConfigError(
            f"lr_schedule={scheduler.__name__} is a class. Pass a scheduler of the "
            f"optimizer, or lambda optimizer: {scheduler.__name__}(optimizer, ...)."
        )
    if not _is_scheduler(scheduler) and callable(scheduler):
        scheduler = scheduler(bound_to)
    if not _is_scheduler(scheduler):
        raise ConfigError(
            f"lr_schedule={lr_schedule!r} is neither a name, nor an ipufit.Schedule, "
            "nor a scheduler of torch.optim.lr_scheduler, nor a function that makes "
            "one of an optimizer. For a function of the update's index pass lambda "
            "optimizer: LambdaLR(optimizer, function)."
        )
    for part in _each(scheduler):
        if isinstance(part, lr_scheduler.ReduceLROnPlateau):
            raise UnsupportedError(
                "torch's ReduceLROnPlateau needs a metric after each epoch, which a "
                "schedule of updates doesn't have. Use the callback "
                "ipufit.ReduceLROnPlateau."
            )
        if part.optimizer is not bound_to:
            raise ConfigError(
                f"This {type(part).__name__} is bound to another optimizer than the "
                "one that compile() got. Make it with that one, or pass a function: "
                f"lambda optimizer: {type(part).__name__}(optimizer, ...)."
            )
    return TorchRates(optimizer, scheduler)


def _is_scheduler(value: object) -> bool:
    # In torch 2.0 ReduceLROnPlateau is no LRScheduler.
    return isinstance(value, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau))


def _each(scheduler: Any) -> Iterator[Any]:
    """Iterate over a scheduler and those that it chains."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _each(part)


def _mark_variable(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Mark as variable what a scheduler of torch changes."""
    names = {"lr"}
    if any(getattr(part, "cycle_momentum", False) for part in _each(scheduler)):
        names |= {"betas", "momentum"} & set(optimizer.defaults)
    for name in sorted(names):
        optimizer.variable_attrs.markAsVariable(name)  # type: ignore[attr-defined]


def _plain_state(value: Any) -> Any:
    """Leave out of a scheduler's state what JSON has no word for.

    That is functions, and the milestones of MultiStepLR: a Counter. Both are settings,
    which the scheduler that loads the state has from its user.
    """
    if isinstance(value, dict):
        return {
            name: _plain_state(one)
            for name, one in value.items()
            if not callable(one) and not isinstance(one, Counter)
        }
    return [_plain_state(one) for one in value] if type(value) is list else value


def _is_plain(value: Any) -> bool:
    """Say whether a scheduler may set a value: a number, or several as in betas."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    return all(type(part) in (int, float) for part in parts)


def _step_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Tell torch that the optimiser has made a step, without making one.

    The device made it. Schedulers warn if the optimiser has never been stepped.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = []
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
