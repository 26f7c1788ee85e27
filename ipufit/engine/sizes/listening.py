# SPDX-License-Identifier: Apache-2.0
"""Has a listener hear of each operator of a forward pass on shapes."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Protocol, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.config import IPUConfig
from ipufit.engine.traced.casting import computed_in
from ipufit.engine.weights.modes import mode

from .operator_flops import flops_of, operator_name
from .shapes_only import all_like

Call = Callable[[torch.nn.Module, Sequence[Tensor]], Any]
"""Calls a module with the tensors of a micro-batch, and returns what it computes."""


class Listener(Protocol):
    """Hears of a forward pass while it runs."""

    def run(self, given: Any, result: Any, flops: int, uncounted: str | None) -> None:
        """Hear of an operator that has run.

        Args:
            given: Its arguments, nested.
            result: Its result, nested.
            flops: Its floating-point operations; 0 if they aren't known.
            uncounted: Its name if they aren't known, else None.
        """

    def save(self, tensor: Tensor) -> None:
        """Hear of a tensor that is saved for the backward pass."""


@contextlib.contextmanager
def heard(
    module: torch.nn.Module, config: IPUConfig, listener: Listener
) -> Iterator[None]:
    """Put a module in train mode, and have a listener hear of what runs within.

    Args:
        module: A copy of the user's module.
        config: Has the types to compute in.
        listener: Hears of operators, and of tensors that are saved.
    """

    def save(tensor: Tensor) -> Tensor:
        listener.save(tensor)
        return tensor

    with contextlib.ExitStack() as stack:
        stack.enter_context(mode(module, training=True))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(save, _unchanged))
        stack.enter_context(_Operators(listener))
        stack.enter_context(computed_in(module, config))
        yield


def given_like(example: Sequence[Tensor], config: IPUConfig) -> list[Tensor]:
    """Inputs of the shapes and types that a device gets; floats are of the precision.

    Example:
        >>> half = IPUConfig(precision="float16")
        >>> [one.dtype for one in given_like([torch.zeros(2), torch.arange(2)], half)]
        [torch.float16, torch.int64]
    """
    given = all_like(example)
    if not config.types.is_half:
        return given
    return [one.half() if one.is_floating_point() else one for one in given]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _Operators(TorchDispatchMode):
    """Has a listener hear of each operator."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._listener = listener

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = flops_of(func, args, result)
        uncounted = operator_name(func) if flops is None else None
        self._listener.run((args, kwargs), result, flops or 0, uncounted)
        return result
