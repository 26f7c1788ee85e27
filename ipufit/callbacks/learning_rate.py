# SPDX-License-Identifier: Apache-2.0
"""Read and set the learning rate in a callback."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ipufit._kinds import list_of, number
from ipufit.errors import ConfigError

from .base import Callback
from .saved_state import check_keys, check_kinds


def set_learning_rate(
    optimizer: Any, rate: float, ratios: Sequence[float] = ()
) -> list[float]:
    """Set the rate of the first parameter group, and scale the other groups' rates.

    Args:
        optimizer: An optimizer of torch or `poptorch.optim`.
        rate: New rate of the first group.
        ratios: Result of the last call. It is used while the first group's rate is
            zero, since there is no ratio to zero.

    Returns:
        Rate of each group divided by that of the first.

    Example:
        >>> import torch
        >>> groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.5, 1.0)]
        >>> sgd = torch.optim.SGD(groups, lr=0.5)
        >>> ratios = set_learning_rate(sgd, 0.0)
        >>> ratios = set_learning_rate(sgd, 0.25, ratios)
        >>> [group["lr"] for group in sgd.param_groups]
        [0.25, 0.5]
    """
    groups = optimizer.param_groups
    first = learning_rate(optimizer)
    if first != 0:
        kept = [float(group["lr"]) / first for group in groups]
    else:
        kept = list(ratios) if len(ratios) == len(groups) else [1.0] * len(groups)
    for group, ratio in zip(groups, kept):
        group["lr"] = rate * ratio
    return kept


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer's first parameter group.

    Example:
        >>> import torch
        >>> learning_rate(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        0.5
    """
    return float(optimizer.param_groups[0]["lr"])


class RateCallback(Callback):
    """Base of callbacks that set the learning rate; their state includes the rates."""

    def state_dict(self) -> dict[str, Any]:
        """Return the saved attributes, and the `rates` of the parameter groups."""
        rates = [float(group["lr"]) for group in self.model.optimizer.param_groups]
        return {**super().state_dict(), "rates": rates}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` can't load.

        Raises:
            ConfigError: If it has other keys, or rates for more or fewer groups.
            DamagedCheckpointError: If a value is of another kind.
        """
        check_keys(type(self).__name__, state, (*self.saved_attributes, "rates"))
        kinds = {**self.saved_kinds, "rates": list_of(number)}
        check_kinds(type(self).__name__, state, kinds)
        groups, rates = self.model.optimizer.param_groups, state["rates"]
        if len(rates) != len(groups):
            raise ConfigError(
                f"The state of {type(self).__name__} has the rates of {len(rates)} "
                f"parameter groups, and the optimizer has {len(groups)}. Compile with "
                "the optimizer of the interrupted run."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved attributes, and set the optimizer's rates.

        Raises:
            ConfigError: If the state has other keys, or rates for more or fewer groups.
        """
        self.check_state(state)
        super().load_state_dict({n: one for n, one in state.items() if n != "rates"})
        for group, rate in zip(self.model.optimizer.param_groups, state["rates"]):
            group["lr"] = rate


def refuse_schedule(model: Any, who: str) -> None:
    """Refuse a model whose schedule sets the learning rate too.

    Args:
        model: An `IPUModel`.
        who: Name of the callback, for the message.

    Raises:
        ConfigError: If the model was compiled with a schedule.
    """
    if model.has_lr_schedule:
        raise ConfigError(
            f"{who} sets the learning rate, and so does the schedule that compile() "
            "got. Use one of the two."
        )
