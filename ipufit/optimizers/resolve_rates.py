# SPDX-License-Identifier: Apache-2.0
"""From what `compile` got as schedules to what sets rates and other values."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Union

import torch
from torch.optim import lr_scheduler

from ipufit.errors import ConfigError, UnknownNameError, UnsupportedError

from .rates import BETAS, GivenRates, Rates, ScheduledValues, value_of
from .schedules import Schedule
from .torch_rates import PerEpoch, TorchRates, each

ScheduleLike = Union[
    str,
    Schedule,
    PerEpoch,
    lr_scheduler.LRScheduler,
    Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
    None,
]
"""A name, a `Schedule`, a scheduler of torch, or what makes one for an optimiser."""

SchedulesLike = Union[Mapping[str, Union[str, Schedule]], None]
"""Names of values of parameter groups, and the schedule of each."""


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
        'ScheduledValues'
    """
    if lr_schedule is None:
        if isinstance(given, torch.optim.Optimizer) and given is not optimizer:
            return GivenRates(optimizer, given)
        return Rates()
    if isinstance(lr_schedule, str):
        lr_schedule = Schedule(lr_schedule)
    if isinstance(lr_schedule, Schedule):
        _refuse_growth(lr_schedule)
        optimizer.variable_attrs.markAsVariable("lr")  # type: ignore[attr-defined]
        return ScheduledValues(optimizer, lr_schedule)
    bound_to = given if isinstance(given, torch.optim.Optimizer) else optimizer
    scheduler: Any = lr_schedule
    per_epoch = isinstance(scheduler, PerEpoch)
    if per_epoch:
        scheduler = _stepped_per_epoch(scheduler)
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
    for part in each(scheduler):
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
    return TorchRates(optimizer, scheduler, per_epoch=per_epoch)


def make_schedules(
    schedules: SchedulesLike, optimizer: torch.optim.Optimizer
) -> dict[str, ScheduledValues]:
    """Make what sets other values of parameter groups than the learning rate.

    Args:
        schedules: By name of the value, such as "weight_decay" or "momentum"; "beta1"
            and "beta2" are the parts of `betas`.
        optimizer: One of `poptorch.optim`. The values are marked as variable.

    Raises:
        UnknownNameError: The optimiser has no such value, or there is no such schedule.
        ConfigError: The value is 0 in all groups, or is set otherwise.

    Example:
        >>> from ipufit import poptorch
        >>> adamw = poptorch.optim.AdamW([torch.zeros(1)], lr=0.5, weight_decay=0.25)
        >>> made = make_schedules({"weight_decay": "linear"}, adamw)["weight_decay"]
        >>> made.begin_fit(0, total=10)
        >>> made.write(5)
        >>> adamw.param_groups[0]["weight_decay"]
        0.125
    """
    if schedules is None:
        return {}
    if not isinstance(schedules, Mapping):
        raise ConfigError(
            f"schedules={schedules!r} is no dict. Give the schedule of each value by "
            "its name: schedules={'weight_decay': ipufit.Schedule('cosine')}."
        )
    made = {}
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
                f"schedule is a factor. Give the optimizer a {name} to multiply."
            )
        attribute = "betas" if name in BETAS else name
        optimizer.variable_attrs.markAsVariable(attribute)  # type: ignore[attr-defined]
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
    known = [
        one
        for one, value in optimizer.param_groups[0].items()
        if type(value) in (int, float) and one in optimizer.defaults and one != "lr"
    ]
    if "betas" in optimizer.defaults:
        known += BETAS
    if name not in known:
        raise UnknownNameError("value of a parameter group", str(name), known)


def _stepped_per_epoch(given: PerEpoch) -> Any:
    if isinstance(given.scheduler, (str, Schedule)):
        raise ConfigError(
            f"lr_schedule={given!r}: PerEpoch is for schedulers of torch. Give the "
            "schedule lengths in epochs: ipufit.Schedule('step', boundary_epochs="
            "(30, 60)), or warmup_epochs, total_epochs, every_epochs."
        )
    return given.scheduler


def _refuse_growth(schedule: Schedule) -> None:
    if schedule.final is not None and schedule.final > 1:
        raise ConfigError(
            f"lr_schedule has final={schedule.final}: use a number at least 0 and at "
            "most 1. It is the share of the optimizer's learning rate at the end."
        )


def _is_scheduler(value: object) -> bool:
    # In torch 2.0 ReduceLROnPlateau is no LRScheduler.
    return isinstance(value, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau))
