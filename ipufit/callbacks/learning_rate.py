# SPDX-License-Identifier: Apache-2.0
"""Reading and setting the learning rate from a callback."""

from __future__ import annotations

from typing import Any, Sequence

from ipufit.errors import ConfigError


def set_learning_rate(
    optimizer: Any, rate: float, ratios: Sequence[float] = ()
) -> list[float]:
    """Give the first parameter group a rate, and keep the others' ratio to it.

    Args:
        optimizer: Of torch or `poptorch.optim`.
        rate: Of the first group.
        ratios: What the last call returned. It counts while the first group's rate is
            zero, which tells no ratio.

    Returns:
        The rate of each group over the first one's.

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
    """The learning rate of the first parameter group.

    Args:
        optimizer: Of torch or `poptorch.optim`.

    Returns:
        The rate.

    Example:
        >>> import torch
        >>> learning_rate(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        0.5
    """
    return float(optimizer.param_groups[0]["lr"])


def refuse_schedule(model: Any, who: str) -> None:
    """Two things can't set the learning rate.

    Args:
        model: An `IPUModel`.
        who: The callback that wants to.

    Raises:
        ConfigError: The model was compiled with a schedule.
    """
    if model.has_lr_schedule:
        raise ConfigError(
            f"{who} sets the learning rate, and so does the schedule that compile() "
            "got. Use one of the two."
        )
