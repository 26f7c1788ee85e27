# SPDX-License-Identifier: Apache-2.0
"""Copying changes from the user's optimiser into PopTorch's, made from it."""

from __future__ import annotations

from typing import Any

import torch

from ipufit.errors import ConfigError

from .resolve import plain

_FOLLOWED = ("lr", "momentum", "betas", "weight_decay", "eps", "alpha")


class Followed:
    """An optimiser of the user's, whose changes are copied into PopTorch's.

    Args:
        source: The user's optimiser; it may be `optimizer` itself.
        optimizer: One of `poptorch.optim`.

    Example:
        >>> from ipufit import poptorch
        >>> weights = [torch.zeros(1)]
        >>> source = torch.optim.SGD(weights, lr=0.5)
        >>> optimizer = poptorch.optim.SGD(weights, lr=0.5)
        >>> followed = Followed(source, optimizer)
        >>> source.param_groups[0]["lr"] = 0.25
        >>> followed.copy_changes("a callback")
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """

    def __init__(
        self, source: torch.optim.Optimizer, optimizer: torch.optim.Optimizer
    ) -> None:
        self.source = source
        self._optimizer = optimizer
        self._copied = _values(optimizer)

    def forget(self) -> None:
        """Copy nothing of what the source has now: only later changes count."""
        self._copied = _values(self.source)

    def copy_changes(self, who: str) -> None:
        """Copy what has changed since the last time.

        Args:
            who: The one who made the changes, for messages.

        Raises:
            ConfigError: A changed value is a constant of the compiled program.
        """
        values = _values(self.source)
        is_constant = self._optimizer.variable_attrs.isConstant  # type: ignore[attr-defined]
        for group, old, new in zip(self._optimizer.param_groups, self._copied, values):
            for name in new:
                if new[name] == old[name]:
                    continue
                if is_constant(name):
                    raise ConfigError(
                        f"{who} changes {name}, which is a constant of the compiled "
                        f"program. Give the optimizer {name} when you make it, so that "
                        "it can change."
                    )
                group[name] = new[name]
        self._copied = values


def _values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: plain(group[name]) for name in _FOLLOWED if name in group}
        for group in optimizer.param_groups
    ]
