# SPDX-License-Identifier: Apache-2.0
"""A model's optimiser, and its values that change between weight updates."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Mapping

import torch

from ipufit._kinds import Kind, count, fields
from ipufit.errors import ConfigError, SharedRateWarning

from .optimizer import (
    Optimizer,
    OptimizerLike,
    make_settable,
    program_key,
    resolve_optimizer,
)
from .parameters import groups_in_words
from .scaling import LossScaleRamp
from .schedule import (
    ScheduledValues,
    ScheduleLike,
    SchedulesLike,
    Setter,
    TorchScheduler,
    make_rates,
    make_schedules,
    updates_per_epoch,
)


class Optimization:
    """The optimiser of a model, and its schedules.

    It only writes values into the optimiser; executors send the changed values.

    Args:
        optimizer: One of `poptorch.optim`.
        rates: Sets its learning rates.
        spec: The `ipufit.Optimizer` that it was made from, if any.
        schedules: Set other values of its parameter groups, by name.

    Attributes:
        optimizer: One of `poptorch.optim`.
        num_updates: Number of updates made since `compile`.
        ema_momentum: Momentum of the weights' running average; None for no average.
        automatic_loss_scaling: Whether the options must turn it on.
        needs_running_mean: Whether the options must ask for
            `MeanReductionStrategy.Running`: otherwise the optimiser clips gradients
            that aren't divided by the number of replicas yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rates: Setter,
        spec: Optimizer | None,
        schedules: Mapping[str, Setter],
    ) -> None:
        ramp = spec.loss_scaling if spec else None
        self.optimizer = optimizer
        self.num_updates = 0
        self.per_batch_size = spec.per_batch_size if spec else None
        self.ema_momentum = spec.ema_momentum if spec else None
        self.automatic_loss_scaling = ramp == "auto"
        self.needs_running_mean = bool(
            spec and spec.name == "sgd" and spec.global_clipnorm is not None
        )
        self._rates = rates
        self._schedules = dict(schedules)
        self._setters = [rates, *schedules.values()]
        self._spec = spec
        self._batch_size: int | None = None
        self._notes: list[str] = []
        self._told: set[str] = set()
        self._ramp = ramp if isinstance(ramp, LossScaleRamp) else None
        self._ramp_in_updates = self._ramp

    @property
    def program_key(self) -> tuple[object, ...]:
        """Settings that are compiled into a program: others need another one."""
        # What a device has adapted the loss scaling to can't be taken back.
        adapted = self.optimizer if self.automatic_loss_scaling else None
        return program_key(self.optimizer), adapted, self.needs_running_mean

    def numbers(self) -> list[dict[str, Any]]:
        """Return the numbers of each parameter group, such as its learning rate."""
        kinds = (bool, int, float, tuple)
        return [
            {name: value for name, value in group.items() if isinstance(value, kinds)}
            for group in self.optimizer.param_groups
        ]

    @property
    def has_schedule(self) -> bool:
        """Whether a schedule sets the learning rates."""
        return isinstance(self._rates, (ScheduledValues, TorchScheduler))

    @property
    def schedule(self) -> str:
        """The source of the learning rates, in words."""
        return self._rates.describe()

    @property
    def schedules(self) -> dict[str, str]:
        """The schedules of other values of parameter groups, in words, by name."""
        return {name: rates.describe() for name, rates in self._schedules.items()}

    @property
    def moves_per_update(self) -> str:
        """Reason why each update needs work on the host; "" if it doesn't.

        Example:
            >>> module = torch.nn.Linear(2, 1)
            >>> resolve_optimization("sgd", None, module).moves_per_update
            ''
            >>> spec = Optimizer("sgd", ema_momentum=0.9)
            >>> resolve_optimization(spec, None, module).moves_per_update
            'weights are averaged after each update'
        """
        if self._set_per_update:
            names = " and the ".join(self._set_per_update)
            return f"a schedule sets the {names} of each update"
        if self._ramp is not None or self.automatic_loss_scaling:
            return "the loss scaling may change with each update"
        if self.ema_momentum is not None:
            return "weights are averaged after each update"
        return ""

    @property
    def _set_per_update(self) -> list[str]:
        """Names of the values that a schedule sets for each update."""
        setters = {"learning rate": self._rates, **self._schedules}
        return [name for name, setter in setters.items() if setter.is_per_update]

    @property
    def needs_total(self) -> bool:
        """Whether a schedule depends on the number of updates of a fit."""
        return any(setter.needs_total for setter in self._setters)

    @property
    def needs_epochs(self) -> bool:
        """Whether a schedule or ramp has lengths in epochs."""
        in_epochs = self._ramp is not None and self._ramp.every_epochs is not None
        return in_epochs or any(setter.needs_epochs for setter in self._setters)

    def news(self) -> list[str]:
        """Return and remove the lines about automatic choices."""
        lines = list(self._notes)
        if self._spec is not None and len(self.optimizer.param_groups) > 1:
            lines.append(f"Optimizer groups: {groups_in_words(self.optimizer)}")
        per = self.per_batch_size
        if self._spec is not None and per is not None:
            rate = self._spec.learning_rate
            size = self._batch_size or per
            lines.append(
                f"Learning rate: {rate:g} * {size} / {per} = {rate * size / per:g}"
            )
        new = [line for line in lines if line not in self._told]
        self._told.update(new)
        return new

    def begin_fit(
        self,
        total_updates: int | None,
        updates_per_call: int,
        epochs: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Prepare for the updates of a fit, and set the values of the first.

        Args:
            total_updates: Number of updates it will make; None if unknown.
            updates_per_call: Number of updates that share one learning rate, since
                values are sent between calls only.
            epochs: Number of epochs it will have; None outside `fit`.
            batch_size: Number of samples of an update, for an optimizer whose rate is
                meant for another number; None leaves the rate as it is.

        Raises:
            ConfigError: A schedule needs to know the total, or is longer than the fit.

        Warns:
            SharedRateWarning: A schedule can't be followed update by update.
        """
        self.scale_to(batch_size)
        if self._ramp is not None and self._ramp.every_epochs is not None:
            per_epoch = updates_per_epoch(total_updates, epochs)
            self._ramp_in_updates = self._ramp.in_updates(per_epoch)
        for setter in self._setters:
            setter.begin_fit(self.num_updates, total_updates, epochs)
        self.before_call()
        shared = " and one ".join(self._set_per_update)
        if shared and updates_per_call > 1:
            warnings.warn(
                f"A call makes {updates_per_call} updates (device_iterations), which "
                f"share one {shared}: the schedule's for the first of them. With "
                "device_iterations=1 each has its own.",
                SharedRateWarning,
                stacklevel=4,
            )

    def note(self, line: str) -> None:
        """Add a line for `news`."""
        self._notes.append(line)

    def scale_to(self, batch_size: int | None) -> None:
        """Scale the rates to a batch size, if they are meant for another one.

        Args:
            batch_size: Number of samples of the next update; None if unknown.
        """
        per = self.per_batch_size
        if per is None or batch_size in (None, self._batch_size):
            return
        factor = (batch_size or per) / (self._batch_size or per)
        self._batch_size = batch_size
        for group in self.optimizer.param_groups:
            group["lr"] *= factor
        self._rates.rescale(factor)

    def before_call(self) -> None:
        """Set the values of the next call, which all its updates share."""
        for setter in self._setters:
            setter.write(self.num_updates)
        if self._ramp_in_updates is None or self._spec is None:
            return
        scaling = self._ramp_in_updates.value(self.num_updates)
        self.optimizer.loss_scaling = scaling  # type: ignore[attr-defined]
        if self._spec.velocity_follows:
            for group in self.optimizer.param_groups:
                group["velocity_scaling"] = scaling

    def state_dict(self) -> dict[str, Any]:
        """Return the plain values that a resumed run needs.

        The optimiser's own state isn't included.
        """
        state = {"num_updates": self.num_updates, "rates": self._rates.state_dict()}
        if self._schedules:
            others = self._schedules.items()
            state["schedules"] = {name: one.state_dict() for name, one in others}
        if self._batch_size is not None:
            state["batch_size"] = self._batch_size
        return state

    @property
    def state_kind(self) -> Kind:
        """Return the kind of states of the same optimiser and schedules."""

        def check(state: Any, where: str) -> str | None:
            is_begun = isinstance(state, Mapping) and bool(state.get("num_updates"))
            kinds = {
                "num_updates": count,
                "rates": self._rates.state_kind(is_begun=is_begun),
            }
            if self._schedules:
                others = {
                    name: setter.state_kind(is_begun=is_begun)
                    for name, setter in self._schedules.items()
                }
                kinds["schedules"] = fields(others, is_closed=True)
            if isinstance(state, Mapping) and "batch_size" in state:
                kinds["batch_size"] = count
            return fields(kinds)(state, where)

        return check

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the same optimiser and schedules."""
        self.num_updates = int(state["num_updates"])
        self._rates.load_state_dict(state["rates"])
        self._batch_size = state.get("batch_size", self._batch_size)
        for name, rates in self._schedules.items():
            rates.load_state_dict(state["schedules"][name])

    def after_call(self, num_updates: int) -> None:
        """Count the updates of a call, and step torch's scheduler as often."""
        self.num_updates += num_updates
        self._rates.advance(num_updates)

    def end_epoch(self) -> None:
        """Step a scheduler of torch that is stepped per epoch."""
        self._rates.end_epoch()


def resolve_optimization(
    optimizer: OptimizerLike,
    lr_schedule: ScheduleLike,
    module: torch.nn.Module,
    schedules: SchedulesLike = None,
    *,
    own: Callable[[Any], Any] | None = None,
    is_half: bool = False,
) -> Optimization:
    """Create the optimiser and its schedules from the arguments of `compile`.

    Args:
        optimizer: As for `resolve_optimizer`.
        lr_schedule: As for `make_rates`.
        module: Its parameters are given to an optimizer that has none.
        schedules: As for `make_schedules`.
        own: As for `resolve_optimizer`.
        is_half: Whether training is in float16; weights in float16 imply it, too.

    Raises:
        UnknownNameError: A name is unknown.
        ConfigError: Optimiser, schedule and module don't fit each other.
        UnsupportedError: PopTorch has no such optimiser or setting.

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
    spec = optimizer if isinstance(optimizer, Optimizer) else None
    is_half = is_half or any(p.dtype == torch.float16 for p in module.parameters())
    is_scaled = is_half and spec is not None and spec.loss_scaling is None
    if spec is not None and is_scaled:
        optimizer = spec = spec.scaled_for_float16()
    resolved = resolve_optimizer(optimizer, module, own)
    rates = make_rates(lr_schedule, resolved, optimizer)
    if spec and spec.per_batch_size and isinstance(rates, TorchScheduler):
        raise ConfigError(
            f"{rates.describe()} keeps rates of its own, and the optimizer has "
            f"per_batch_size={spec.per_batch_size}, which scales them. Use an "
            "ipufit.Schedule, or give the optimizer the rate for your batch size."
        )
    others = make_schedules(schedules, resolved)
    optimization = Optimization(resolved, rates, spec, others)
    make_settable(
        resolved, optimization.schedule if optimization.has_schedule else None
    )
    if spec is not None and is_scaled:
        optimization.note(
            f"Loss scaling: {spec.loss_scaling:g}, for float16; "
            "Optimizer(..., loss_scaling=1.0) turns it off"
        )
    return optimization
