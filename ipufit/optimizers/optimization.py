# SPDX-License-Identifier: Apache-2.0
"""A model's optimiser, and its values that change between weight updates."""

from __future__ import annotations

import warnings
from typing import Any, Mapping

import torch

from ipufit._kinds import Kind, count, fields, like, optional
from ipufit.errors import SharedRateWarning

from .decay import groups_in_words
from .loss_scaling import LossScaleRamp
from .rates import Rates, ScheduleLike, make_rates
from .resolve import OptimizerLike, program_key, resolve_optimizer
from .settable import make_settable
from .spec import Optimizer


class Optimization:
    """The optimiser of a model, and the values it is to have at each update.

    It only writes values into the optimiser; executors send those that have changed.

    Args:
        optimizer: One of `poptorch.optim`.
        rates: Sets its learning rates.
        spec: The `ipufit.Optimizer` that it was made from; None if from none.

    Attributes:
        optimizer: One of `poptorch.optim`.
        num_updates: Number of updates made since `compile`.
        ema_momentum: Momentum of the weights' running average; None for no average.
        automatic_loss_scaling: Whether the options must turn it on.
        needs_running_mean: Whether the options must ask for
            `MeanReductionStrategy.Running`: the optimiser clips what has not been
            divided by the number of replicas otherwise.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Rates,
        spec: Optimizer | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.num_updates = 0
        self.ema_momentum = spec.ema_momentum if spec else None
        self.automatic_loss_scaling = bool(spec and spec.is_scaled_automatically)
        self.needs_running_mean = bool(
            spec and spec.name == "sgd" and spec.global_clipnorm is not None
        )
        self._rates = rates
        self._spec = spec
        self._told: set[str] = set()
        ramp = spec.loss_scaling if spec else None
        self._ramp = ramp if isinstance(ramp, LossScaleRamp) else None

    @property
    def program_key(self) -> tuple[object, ...]:
        """The settings that a program has compiled in; others need another program."""
        # What a device has adapted the loss scaling to can't be taken back.
        adapted = self.optimizer if self.automatic_loss_scaling else None
        return program_key(self.optimizer), adapted, self.needs_running_mean

    def numbers(self) -> list[dict[str, Any]]:
        """The numbers of each parameter group, such as its learning rate."""
        kinds = (bool, int, float, tuple)
        return [
            {name: value for name, value in group.items() if isinstance(value, kinds)}
            for group in self.optimizer.param_groups
        ]

    @property
    def has_schedule(self) -> bool:
        """Whether something sets the learning rates."""
        return self._rates.is_scheduled

    @property
    def schedule(self) -> str:
        """The source of the learning rates, in words."""
        return self._rates.describe()

    @property
    def needs_total(self) -> bool:
        """Whether the schedule is stretched over the updates of a fit."""
        return self._rates.needs_total

    def news(self) -> list[str]:
        """Lines about what was chosen for the user, each given once."""
        lines = []
        if self._spec is not None and len(self.optimizer.param_groups) > 1:
            lines.append(f"Optimizer groups: {groups_in_words(self.optimizer)}")
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def begin_fit(self, total_updates: int | None, updates_per_call: int) -> None:
        """Prepare for the updates of a fit, and set the values of the first.

        Args:
            total_updates: Number of updates it will make; None if unknown.
            updates_per_call: Number of updates that share one learning rate, since
                values reach the device between calls only.

        Raises:
            ConfigError: The schedule needs to know the total, or doesn't fit in.

        Warns:
            SharedRateWarning: A schedule can't be followed update by update.
        """
        self._rates.begin_fit(self.num_updates, total_updates)
        self.before_call()
        if self.has_schedule and updates_per_call > 1:
            warnings.warn(
                f"A call makes {updates_per_call} updates (device_iterations), which "
                "share one learning rate: the schedule's for the first of them. With "
                "device_iterations=1 each has its own.",
                SharedRateWarning,
                stacklevel=4,
            )

    def before_call(self) -> None:
        """Set the values of the next update, and of all that share its call."""
        self._rates.write(self.num_updates)
        if self._ramp is not None:
            scaling = self._ramp.value(self.num_updates)
            self.optimizer.loss_scaling = scaling  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Give the plain values that a resumed run needs to go on.

        The optimiser's own state isn't among them.
        """
        return {"num_updates": self.num_updates, "rates": self._rates.state_dict()}

    @property
    def state_kind(self) -> Kind:
        """The kind of value that states of the same optimiser and schedule are."""
        rates = self._rates.state_dict()
        kinds = {name: like(value) for name, value in rates.items()}
        if "total" in rates:  # nobody knows it before the first fit
            kinds["total"] = optional(count)
        kind = fields({"num_updates": count, "rates": fields(kinds, is_closed=True)})

        def check(value: Any, where: str) -> str | None:
            fault = kind(value, where)
            if fault is None and self.needs_total and value["num_updates"]:
                return count(value["rates"]["total"], f"{where}.rates.total")
            return fault

        return check

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same optimiser and schedule."""
        self.num_updates = int(state["num_updates"])
        self._rates.load_state_dict(state["rates"])

    def after_call(self, num_updates: int) -> None:
        """Count the updates of a call, and step torch's scheduler as often."""
        self.num_updates += num_updates
        self._rates.advance(num_updates)


def resolve_optimization(
    optimizer: OptimizerLike, lr_schedule: ScheduleLike, module: torch.nn.Module
) -> Optimization:
    """Join the optimiser that is meant with what changes its values.

    Args:
        optimizer: As for `resolve_optimizer`.
        lr_schedule: As for `make_rates`.
        module: Its parameters are given to an optimizer that has none.

    Raises:
        UnknownNameError: A name is unknown.
        ConfigError: Optimiser, schedule and module don't fit each other.
        UnsupportedError: PopTorch has no such thing.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> schedule = lambda sgd: torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        >>> optimization = resolve_optimization("sgd", schedule, module)
        >>> optimization.begin_fit(total_updates=3, updates_per_call=1)
        >>> for _ in range(3):
        ...     optimization.before_call()
        ...     print(optimization.optimizer.param_groups[0]["lr"])
        ...     optimization.after_call(1)
        0.01
        0.005
        0.0025
    """
    if isinstance(optimizer, str):
        optimizer = Optimizer(optimizer)
    resolved = resolve_optimizer(optimizer, module)
    rates = make_rates(lr_schedule, resolved, optimizer)
    make_settable(resolved, rates.describe() if rates.is_scheduled else None)
    spec = optimizer if isinstance(optimizer, Optimizer) else None
    return Optimization(resolved, rates, spec)
