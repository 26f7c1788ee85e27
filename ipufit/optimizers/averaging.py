# SPDX-License-Identifier: Apache-2.0
"""Running averages of the weights, on the host."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor

from ipufit.errors import ConfigError

from .checks import check_number


class WeightAverage:
    """An exponential moving average of a module's parameters, as Keras keeps it.

    After the first update it is the weights; after each further one it becomes
    `momentum * average + (1 - momentum) * weights`. Parameters are averaged; buffers,
    such as the statistics of batch norm, are not, and stay as training left them.

    Averages are kept in float32 at least: small steps would get lost in float16.

    Args:
        module: All its parameters are averaged, trainable or not.
        momentum: From 0 to below 1.

    Attributes:
        num_updates: Number of updates taken in so far.

    Raises:
        ConfigError: The momentum is out of range.

    Example:
        >>> module = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(module, 0.75)
        >>> for weight in (1.0, 5.0):
        ...     _ = module.weight.data.fill_(weight)
        ...     average.update(1)
        >>> with average.swapped():
        ...     module.weight.item()
        2.0
        >>> module.weight.item()
        5.0
    """

    def __init__(self, module: torch.nn.Module, momentum: float) -> None:
        check_number("WeightAverage", "momentum", momentum, least=0, below=1)
        self._module = module
        self._momentum = momentum
        self._averages: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] | None = None
        self.num_updates = 0

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Take in the weights that a call has left in the module.

        A call of several updates brings only its last weights to the host. Those
        between aren't seen: the average forgets as after all of them,
        `momentum ** num_updates`, and takes the last weights for the rest.
        """
        share = 1.0 - self._momentum**num_updates
        for name, parameter in self._module.named_parameters():
            weights = _widened(parameter)
            if self.num_updates == 0:
                self._averages[name] = weights.clone()
            else:
                self._averages[name].lerp_(weights, share)
        self.num_updates += num_updates

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the averages into the module, and the weights back afterwards.

        Both ways the values are copied into the parameters. Before the first update
        there is nothing to swap.
        """
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    @property
    def is_swapped(self) -> bool:
        """Whether the averages are in the module, and the weights are to come back."""
        return self._kept is not None

    def swap_in(self) -> None:
        """Put the averages into the module, until `swap_out`."""
        if self._kept is None:
            parameters = self._module.named_parameters()
            self._kept = {name: p.detach().clone() for name, p in parameters}
            _copy(self._averages, dict(self._module.named_parameters()))

    def swap_out(self) -> None:
        """Put the weights back, if the averages were swapped in."""
        if self._kept is not None:
            _copy(self._kept, dict(self._module.named_parameters()))
            self._kept = None

    def apply(self) -> None:
        """Overwrite the weights with their averages, as Keras does after `fit`.

        If the averages were swapped in, they stay.
        """
        self._kept = None
        _copy(self._averages, dict(self._module.named_parameters()))

    def state_dict(self) -> dict[str, Any]:
        """Give `num_updates`, and copies of the `averages` by parameter name."""
        averages = {name: value.clone() for name, value in self._averages.items()}
        return {"num_updates": self.num_updates, "averages": averages}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of `state_dict` that is of other parameters.

        Raises:
            ConfigError: The state has other averages, or none after updates.
        """
        averages: Mapping[str, Tensor] = state["averages"]
        parameters = self._module.named_parameters() if state["num_updates"] else ()
        own = {n: (p.shape, _widest(p.dtype)) for n, p in parameters}
        given = {n: (value.shape, value.dtype) for n, value in averages.items()}
        if given != own:
            odd = sorted(n for n in {*own, *given} if own.get(n) != given.get(n))
            raise ConfigError(
                f"These averages are of other parameters: {', '.join(odd)}. Load the "
                "state of the same module."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`.

        Raises:
            ConfigError: The state is of other parameters.
        """
        self.check_state(state)
        averages: Mapping[str, Tensor] = state["averages"]
        self.num_updates = state["num_updates"]
        self._averages = {n: _widened(v).clone() for n, v in averages.items()}


def _widened(values: Tensor) -> Tensor:
    widened: Tensor = values.detach().to(_widest(values.dtype))
    return widened


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _copy(
    values: Mapping[str, Tensor], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)
