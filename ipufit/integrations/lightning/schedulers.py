# SPDX-License-Identifier: Apache-2.0
"""Schedulers as Lightning steps them: every few updates, or by a figure."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping, NamedTuple

from torch.optim import lr_scheduler

from ipufit._kinds import Kind, anything, list_of, number
from ipufit.callbacks import Callback
from ipufit.errors import ConfigError

from .names import figure_name


class Every(lr_scheduler.LRScheduler):
    """Steps another scheduler of torch at every `frequency`-th of its own steps.

    Args:
        scheduler: The other scheduler.
        frequency: Number of steps from one step of `scheduler` to the next.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> halving = Every(lr_scheduler.StepLR(sgd, 1, gamma=0.5), 2)
        >>> rates = []
        >>> for _ in range(4):
        ...     sgd.step()
        ...     halving.step()
        ...     rates.append(sgd.param_groups[0]["lr"])
        >>> rates
        [1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, scheduler: Any, frequency: int) -> None:
        # Not the base's: it would count a first step, and set the rates.
        self.optimizer = scheduler.optimizer
        self.frequency = frequency
        self.last_epoch = 0
        self._schedulers = [scheduler]

    def step(self, epoch: int | None = None) -> None:
        """Count one step."""
        self.last_epoch += 1
        if self.last_epoch % self.frequency == 0:
            self._schedulers[0].step()

    def get_last_lr(self) -> list[Any]:
        """The rates of the parameter groups."""
        rates: list[Any] = self._schedulers[0].get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The number of steps so far, and the other scheduler's state."""
        own = {"last_epoch": self.last_epoch, "frequency": self.frequency}
        return {**own, "scheduler": self._schedulers[0].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        self.last_epoch = state_dict["last_epoch"]
        self._schedulers[0].load_state_dict(dict(state_dict["scheduler"]))


class Plateau(NamedTuple):
    """A `ReduceLROnPlateau` of torch, and what it is stepped by.

    Attributes:
        scheduler: The scheduler, which is bound to the optimizer that `compile` got.
        monitor: Name of the figure, as in the logs or as the module logs it.
        frequency: Number of epochs from one step to the next.
        strict: If False, an epoch without the figure is passed over.
    """

    scheduler: Any
    monitor: str
    frequency: int = 1
    strict: bool = True


class SteppedByFigure(Callback):
    """Steps torch's `ReduceLROnPlateau` with a figure of each epoch.

    ipufit takes over what the scheduler changes in the torch optimizer.

    Args:
        plateau: The scheduler, and its figure.

    Raises:
        ConfigError: When an epoch ends without the figure.
    """

    saved_attributes = ("scheduler_state", "rates")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "scheduler_state": anything,
        "rates": list_of(number),
    }

    def __init__(self, plateau: Plateau) -> None:
        self.scheduler, self.monitor, self.frequency, self.strict = plateau

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Step the scheduler if it is time."""
        if (epoch + 1) % self.frequency:
            return
        value = logs.get(self.monitor, logs.get(figure_name(self.monitor)))
        if value is not None:
            self.scheduler.step(float(value))
        elif self.strict:
            raise ConfigError(
                f"configure_optimizers has ReduceLROnPlateau with monitor="
                f"{self.monitor!r}, which is not among the figures of epoch {epoch}: "
                f"{', '.join(sorted(logs))}. Log it, validate in every epoch, or use "
                "one of these names."
            )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.scheduler.optimizer.param_groups
        return groups

    @property
    def scheduler_state(self) -> dict[str, Any]:
        """Plain values of the scheduler's state."""
        state = self.scheduler.state_dict()
        plain = (bool, int, float, str, list, type(None))
        return {
            name: value for name, value in state.items() if isinstance(value, plain)
        }

    @scheduler_state.setter
    def scheduler_state(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(dict(state))

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups]

    @rates.setter
    def rates(self, rates: list[float]) -> None:
        for group, rate in zip(self._groups, rates):
            group["lr"] = rate
