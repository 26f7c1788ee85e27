# SPDX-License-Identifier: Apache-2.0
"""Learning rates that a scheduler of torch sets."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import torch
from torch.optim import lr_scheduler

from ipufit.errors import ConfigError

from .following import Followed
from .rates import Rates


@dataclass(frozen=True)
class PerEpoch:
    """Have a scheduler of torch stepped at the end of each epoch, not of each update.

    For `compile(lr_schedule=...)`. An `ipufit.Schedule` has lengths in epochs instead.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler` that is bound to the
            optimizer given to `compile`, or a function that makes one of an optimizer.

    Example:
        >>> PerEpoch(lambda optimizer: lr_scheduler.StepLR(optimizer, 30))
        PerEpoch(scheduler=<function <lambda> at ...>)
    """

    scheduler: Any


class TorchRates(Rates):
    """Step a scheduler of torch, once per update or once per epoch.

    It may be bound to the user's torch optimiser, from which the one of PopTorch was
    made: then the values it changes are copied.

    Args:
        optimizer: The one of `poptorch.optim`.
        scheduler: One that is bound to it, or to the optimiser it was made from.
        per_epoch: If True, it is stepped at the end of each epoch.

    Example:
        >>> from ipufit import poptorch
        >>> sgd = poptorch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> rates = TorchRates(sgd, lr_scheduler.StepLR(sgd, 2, 0.5),
        ...                    per_epoch=False)
        >>> rates.advance(2)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """

    is_scheduled = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any, *, per_epoch: bool
    ) -> None:
        self._scheduler = scheduler
        self._per_epoch = per_epoch
        self.is_per_update = not per_epoch
        self._followed = Followed(scheduler.optimizer, optimizer)
        _mark_variable(optimizer, scheduler)
        # A scheduler sets values when it is made, too.
        self._followed.copy_changes(type(scheduler).__name__)

    def begin_fit(
        self, update: int, total: int | None, epochs: int | None = None
    ) -> None:
        """Refuse to run past the end of a scheduler that raises there."""
        scheduler = self._scheduler
        if self._per_epoch and epochs is None:
            raise ConfigError(
                f"{type(scheduler).__name__} is stepped per epoch (ipufit.PerEpoch), "
                "and train_on_batch has no epochs. Use fit, or step it per update."
            )
        coming = epochs if self._per_epoch else total
        if coming is None or not isinstance(scheduler, lr_scheduler.OneCycleLR):
            return
        made, end = scheduler.last_epoch, scheduler.total_steps
        unit = "epochs" if self._per_epoch else "updates"
        if made + coming > end:
            raise ConfigError(
                f"OneCycleLR ends after {end} {unit}, of which {made} are made, and "
                f"{coming} are to come. Make it with total_steps={made + coming} or "
                "more."
            )

    def advance(self, num_updates: int) -> None:
        """Step the scheduler, unless per epoch, and copy what it has changed."""
        self._step(0 if self._per_epoch else num_updates)

    def end_epoch(self) -> None:
        """Step the scheduler if it is stepped per epoch, and copy its changes."""
        if self._per_epoch:
            self._step(1)

    def _step(self, times: int) -> None:
        with warnings.catch_warnings():
            # Copies of a scheduler and its optimiser no longer know of each other.
            warnings.filterwarnings("ignore", "Seems like `optimizer.step")
            for _ in range(times):
                _step_nothing(self._followed.source)
                self._scheduler.step()
        self._followed.copy_changes(type(self._scheduler).__name__)

    def describe(self) -> str:
        """Name the classes of the scheduler and of those that it chains."""
        names = ", ".join(type(one).__name__ for one in each(self._scheduler))
        return f"PerEpoch({names})" if self._per_epoch else names

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's own state, and the numbers of its optimiser."""
        return {
            "scheduler": _plain_state(self._scheduler.state_dict()),
            "groups": [
                {n: _plain_state(v) for n, v in group.items() if _is_plain(v)}
                for group in self._followed.source.param_groups
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self._scheduler.load_state_dict(dict(state["scheduler"]))
        for group, values in zip(self._followed.source.param_groups, state["groups"]):
            group.update({n: _as_before(v, group.get(n)) for n, v in values.items()})
        self._followed.forget()


def each(scheduler: Any) -> Iterator[Any]:
    """Iterate over a scheduler and those that it chains."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from each(part)


def _mark_variable(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Mark as variable what a scheduler of torch changes."""
    names = {"lr"}
    if any(getattr(part, "cycle_momentum", False) for part in each(scheduler)):
        names |= {"betas", "momentum"} & set(optimizer.defaults)
    for name in sorted(names):
        optimizer.variable_attrs.markAsVariable(name)  # type: ignore[attr-defined]


def _plain_state(value: Any) -> Any:
    """Leave out of a scheduler's state what JSON has no word for.

    That is functions, and the milestones of MultiStepLR: a Counter. Both are settings,
    which the scheduler that loads the state has from its user. Tuples become lists.
    """
    if isinstance(value, dict):
        return {
            name: _plain_state(one)
            for name, one in value.items()
            if not callable(one) and not isinstance(one, Counter)
        }
    is_listed = type(value) in (list, tuple)
    return [_plain_state(one) for one in value] if is_listed else value


def _as_before(value: Any, before: Any) -> Any:
    """A saved value, as a tuple if the one in its place is a tuple, as betas are."""
    return tuple(value) if isinstance(before, tuple) else value


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
