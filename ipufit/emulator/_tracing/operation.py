# SPDX-License-Identifier: Apache-2.0
"""Operations: calls of torch functions that a trace checks, runs and records."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Mapping

from torch import Tensor
from torch.fx.node import Node
from torch.overrides import handle_torch_function

from ipufit.emulator._tracing.operands import tensors_in

NodesById = Mapping[int, Node]
"""The graph's node of each tensor that is on the device, by the tensor's `id`."""


@dataclass(frozen=True)
class Operation:
    """One call of a torch function in a program.

    Attributes:
        function: The function that computes it.
        name: Name of the torch function, such as `add_` or `__getitem__`.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Example:
        >>> import torch
        >>> x = torch.zeros(2)
        >>> operation = Operation(torch.sum, "sum", (x,), {"dim": 0})
        >>> operation.arguments("input dim keepdim")
        {'input': tensor([0., 0.]), 'dim': 0}
        >>> operation.run()
        tensor(0.)
    """

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, however nested."""
        return list(tensors_in((self.args, self.kwargs)))

    def arguments(self, names: str) -> dict[str, Any]:
        """The given arguments by name; `names` are those of the positional ones."""
        return {**dict(zip(names.split(), self.args)), **self.kwargs}

    def arguments_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The given arguments, by the names in the signature of `function`."""
        signature = inspect.signature(function)
        return signature.bind_partial(*self.args, **self.kwargs).arguments

    def run(self) -> Any:
        """Compute the operation."""
        return self.function(*self.args, **self.kwargs)


class DeviceFunction:
    """A function of the emulator that a device runs as one operation.

    Calling it hands it to the next active `TorchFunctionMode`, as calling one of
    torch's functions does. So modes that the user's code has entered see one function,
    call it, and it arrives at the tracer.

    Attributes:
        function: The function that the tracer runs and records.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the next mode."""
        tensors = tuple(tensors_in((args, kwargs)))
        return handle_torch_function(self, tensors, *args, **kwargs)


def recorded(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a tracer records for `func`."""
    return func.function if isinstance(func, DeviceFunction) else func
