# SPDX-License-Identifier: Apache-2.0
"""torch's fused optimiser kernels, where they run on a processor.

One call updates all weights in one pass over their memory. torch has had them for
processors since 2.4; older versions have the names, but nothing behind them.

The kernels walk through memory and know nothing of strides: weights, state and
gradients must be laid out alike, each without gaps (`same_layout`, `is_dense`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class FusedUpdate:
    """An update of a group of weights by one call of a kernel.

    Attributes:
        state: Lists of tensors that the kernel takes after weights and gradients.
        numbers: Keyword arguments of the kernel.
        takes_gradients: Whether the kernel takes gradients, instead of what the rule
            makes of them first.
    """

    kernel: Kernel
    state: tuple[list[Tensor], ...]
    numbers: dict[str, float]
    takes_gradients: bool = False

    def run(self, weights: list[Tensor], directions: Sequence[Tensor]) -> None:
        """Update the weights and the state in place."""
        self.kernel(weights, directions, *self.state, **self.numbers)


def adamw() -> Kernel | None:
    """Give fused AdamW, `(weights, gradients, m, v, [], steps, ...)`, or None.

    Example:
        >>> kernel = adamw()
        >>> kernel is None or callable(kernel)
        True
    """
    return _kernels()[0]


def sgd() -> Kernel | None:
    """Give fused SGD, `(weights, gradients, velocities, ...)`, or None.

    Example:
        >>> kernel = sgd()
        >>> kernel is None or callable(kernel)
        True
    """
    return _kernels()[1]


@functools.lru_cache(maxsize=None)
def _kernels() -> tuple[Kernel | None, Kernel | None]:
    with torch.inference_mode(False), torch.no_grad():
        return _if_it_runs("_fused_adamw_", _try_adamw), _if_it_runs(
            "_fused_sgd_", _try_sgd
        )


def _if_it_runs(name: str, trial: Callable[[Kernel], None]) -> Kernel | None:
    kernel: Kernel | None = getattr(torch, name, None)
    if kernel is None:
        return None
    try:
        trial(kernel)
    except (NotImplementedError, RuntimeError, TypeError):
        return None  # another signature, or not for processors
    return kernel


def _try_adamw(kernel: Kernel) -> None:
    weight, gradient, first, second = torch.zeros(4, 1)
    values = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1.0}
    flags = {"amsgrad": False, "maximize": False}
    step = torch.ones(())
    kernel([weight], [gradient], [first], [second], [], [step], **values, **flags)


def _try_sgd(kernel: Kernel) -> None:
    weight, gradient, velocity = torch.zeros(3, 1)
    values = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    kernel([weight], [gradient], [velocity], **values, **flags)


def is_dense(tensor: Tensor) -> bool:
    """Say whether the elements of a tensor fill its memory, in whatever order.

    Example:
        >>> is_dense(torch.zeros(2, 3).t()), is_dense(torch.zeros(1).expand(3))
        (True, False)
    """
    # Only of such tensors does a copy keep the strides.
    twin = tensor.detach().to("meta")
    return bool(twin.stride() == tensor.stride())


def same_layout(
    tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]
) -> Sequence[Tensor]:
    """Copy those tensors that aren't laid out as asked.

    Args:
        tensors: Tensors such as gradients.
        strides: The strides that each shall have: those of a dense tensor.

    Example:
        >>> gradient = torch.ones(1).expand(2, 3)
        >>> same_layout([gradient], [(3, 1)])[0].stride()
        (3, 1)
    """
    if [tensor.stride() for tensor in tensors] == strides:
        return tensors
    return [
        tensor if tensor.stride() == stride else _laid_out(tensor, stride)
        for tensor, stride in zip(tensors, strides)
    ]


def _laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    copy: Tensor = tensor.new_empty_strided(tensor.shape, stride)
    copy.copy_(tensor)
    return copy
