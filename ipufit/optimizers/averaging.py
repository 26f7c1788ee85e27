# SPDX-License-Identifier: Apache-2.0
"""The moving average of the weights during training, on the host."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Mapping

import torch
from torch import Tensor

from ipufit._arguments import check_number
from ipufit.errors import ConfigError

ShowWeights = Callable[[], ContextManager[None]]
"""Function that makes a context in which a module has its newest weights."""


class WeightAverage:
    """An exponential moving average of a module's weights, as in Keras.

    After the first update it equals the weights. Each further update makes it `momentum
    * average + (1 - momentum) * weights`.

    Parameters are averaged, and so are floating-point buffers: the statistics of batch
    norm belong to the weights with which they were computed. Buffers of other dtypes,
    0-d buffers (the host may change them) and values that aren't finite (such as a
    mask's) aren't averaged: they stay as training left them.

    Averages are kept in float32 or float64: float16 would lose small steps.

    Args:
        module: All its parameters are averaged, trainable or not.
        momentum: From 0 to below 1.

    Attributes:
        num_updates: Number of updates so far.

    Raises:
        ConfigError: The momentum is out of range.

    Example:
        >>> module = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(module, 0.75)
        >>> for weight in (1.0, 5.0):
        ...     _ = module.weight.data.fill_(weight)
        ...     average.update(1)
        >>> average.swap_in()
        >>> module.weight.item()
        2.0
        >>> average.swap_out()
        >>> module.weight.item()
        5.0
    """

    def __init__(self, module: torch.nn.Module, momentum: float) -> None:
        check_number("momentum", momentum, of="WeightAverage", least=0, below=1)
        self._momentum = momentum
        self._module = module
        self._averages: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] | None = None
        self.num_updates = 0

    def update(
        self, num_updates: int, show_weights: ShowWeights = contextlib.nullcontext
    ) -> None:
        """Add the module's weights after a call to the average.

        A call of several updates brings only its last weights to the host. So the
        average decays by `momentum ** num_updates`, as after all of them, and the last
        weights make up the rest.

        Args:
            num_updates: Number of updates that the call has made.
            show_weights: Function that makes a context in which the module has the
                newest weights.
        """
        with show_weights():
            self._add(1.0 - self._momentum**num_updates)
        self.num_updates += num_updates

    @torch.no_grad()
    def _add(self, share: float) -> None:
        """Move the average towards the present weights by `share` of the difference."""
        buffers = self._buffers()
        for name, tensor in self._averaged().items():
            weights = _widened(tensor)
            if not self.num_updates:
                self._averages[name] = weights.clone()
                continue
            moved = self._averages[name].lerp_(weights, share)
            if name in buffers:
                torch.where(moved.isfinite(), moved, weights, out=moved)

    @property
    def is_swapped(self) -> bool:
        """Whether the module has the averages now, until `swap_out`."""
        return self._kept is not None

    def swap_in(self) -> None:
        """Exchange the module's weights for the averages, until `swap_out`.

        The values are copied into the parameters. Before the first update nothing is
        exchanged.
        """
        if self._kept is None:
            tensors = self._averaged()
            self._kept = {name: t.detach().clone() for name, t in tensors.items()}
            _copy(self._averages, tensors)

    def swap_out(self) -> None:
        """Restore the weights, if the averages were swapped in."""
        if self._kept is not None:
            _copy(self._kept, self._averaged())
            self._kept = None

    def apply(self) -> None:
        """Overwrite the weights with their averages, as Keras does after `fit`.

        Averages that are swapped in stay in the module.
        """
        self._kept = None
        _copy(self._averages, self._averaged())

    def state_dict(self) -> dict[str, Any]:
        """Return `num_updates`, and copies of the `averages` by name."""
        averages = {name: value.clone() for name, value in self._averages.items()}
        return {"num_updates": self.num_updates, "averages": averages}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another module; change nothing.

        Raises:
            ConfigError: The state has other averages, or no averages after updates.
        """
        averages: Mapping[str, Tensor] = state["averages"]
        tensors = self._averaged() if state["num_updates"] else {}
        saved = {n: (value.shape, value.dtype) for n, value in averages.items()}
        # Earlier versions didn't average buffers.
        if saved.keys().isdisjoint(self._buffers()):
            tensors = {n: t for n, t in tensors.items() if n not in self._buffers()}
        now = {n: (t.shape, _widest(t.dtype)) for n, t in tensors.items()}
        if saved != now:
            odd = sorted(n for n in {*now, *saved} if now.get(n) != saved.get(n))
            raise ConfigError(
                f"These averages are of another module: {', '.join(odd)}. Load the "
                "state of the same module."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`.

        If the averages are swapped in, they stay in the module. Older states have no
        averages of buffers: the module's present buffers are used in their place.

        Raises:
            ConfigError: The state is of another module.
        """
        self.check_state(state)
        averages: Mapping[str, Tensor] = state["averages"]
        self._kept = None
        self.num_updates = state["num_updates"]
        tensors = self._averaged() if self.num_updates else {}
        values = {n: averages.get(n, t) for n, t in tensors.items()}
        self._averages = {n: _widened(v).clone() for n, v in values.items()}

    @property
    def averages(self) -> dict[str, Tensor]:
        """Return the averages by name; before the first update the weights."""
        return self._averages or {
            name: _widened(tensor) for name, tensor in self._averaged().items()
        }

    def _averaged(self) -> dict[str, Tensor]:
        """Return the present values of the tensors that are averaged."""
        return {**dict(self._module.named_parameters()), **self._buffers()}

    def _buffers(self) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self._module.named_buffers()
            if buffer.is_floating_point() and buffer.dim()
        }


def _widened(values: Tensor) -> Tensor:
    return values.detach().to(_widest(values.dtype))


def _widest(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value)
