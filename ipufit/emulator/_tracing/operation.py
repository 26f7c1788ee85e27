# SPDX-License-Identifier: Apache-2.0
"""Operations: calls of torch functions that a trace checks, runs and records.

The module also finds the tensors among arguments and results, which torch nests in
tuples, lists, dicts and slices, and the devices that arguments name: the IPU or the
host.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch.fx.node import Node
from torch.overrides import handle_torch_function

from ipufit.emulator._ground.logging import logger


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in nested arguments.

    Example:
        >>> import torch
        >>> [t.item() for t in tensors_in(([torch.tensor(1)], {"k": torch.tensor(2)}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for element in value for tensor in tensors_in(element)]


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or tuple, or a list of any other value.

    Example:
        >>> as_list((1, 2)), as_list(3)
        ([1, 2], [3])
    """
    return list(value) if isinstance(value, (list, tuple)) else [value]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested arguments.

    A container without changes is returned itself, such as a named result of torch.

    Example:
        >>> import torch
        >>> map_tensors({"k": [torch.tensor(1), "other"]}, lambda t: t.item())
        {'k': [1, 'other']}
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(v, function) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        elements = [map_tensors(v, function) for v in value]
        if all(new is old for new, old in zip(elements, value)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*elements)
        return type(value)(elements)
    if isinstance(value, slice):
        return slice(*map_tensors((value.start, value.stop, value.step), function))
    return value


NodesById = Mapping[int, Node]
"""The graph's node of each tensor that is on the device, by the tensor's `id`."""


@dataclass(frozen=True)
class Operation:
    """One call of a torch function in a program.

    Attributes:
        function: The function that computes the result.
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
        """Return the tensors in the nested arguments."""
        return tensors_in((self.args, self.kwargs))

    def arguments(self, names: str) -> dict[str, Any]:
        """Return the arguments by name; `names` are those of the positional ones."""
        return {**dict(zip(names.split(), self.args)), **self.kwargs}

    def arguments_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments, by the names in the signature of `function`."""
        signature = inspect.signature(function)
        return signature.bind_partial(*self.args, **self.kwargs).arguments

    def run(self) -> Any:
        """Compute the operation."""
        return self.function(*self.args, **self.kwargs)


class DeviceFunction:
    """A function of the emulator that a device runs as one operation.

    A call goes to the active `TorchFunctionMode`, as a call of a torch function does.
    So a mode of the user's sees one function and calls it, and the call reaches the
    tracer.

    Attributes:
        function: The function that the tracer runs and records.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the active mode."""
        return handle_torch_function(self, tensors_in((args, kwargs)), *args, **kwargs)


def recorded(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a tracer records for `func`."""
    return func.function if isinstance(func, DeviceFunction) else func


FACTORIES = frozenset(
    getattr(torch, name)
    for name in """
    arange empty full full_like linspace logspace normal ones rand randint randn
    randperm range tensor zeros zeros_like
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions that create tensors on the IPU unless given another device
(PopTorch, `_poplar_executor.py`). Others, `torch.eye` for one, use the host."""

RANDOM_FACTORIES = frozenset(
    getattr(torch, name) for name in ("normal", "rand", "randint", "randn", "randperm")
)


def creates_on_device(operation: Operation) -> bool:
    """Return whether an operation creates a tensor on the IPU, whatever its operands.

    A factory function without a device does so, and each such call logs a warning
    (PopTorch, `_poplar_executor.py`). `device=None` means torch's choice, the host.

    Example:
        >>> creates_on_device(Operation(torch.zeros, "zeros", (2,), {"device": None}))
        False
    """
    device = requested_device(operation)
    if device is not None:
        return bool(device != "cpu")
    if operation.function not in FACTORIES or "device" in operation.kwargs:
        return False
    if operation.function is torch.normal and operation.tensors():
        return False
    logger.warning(
        "No device set in torch.%s(): forcing to IPU. Pass `device`, for example that "
        "of an input.",
        operation.name,
    )
    return True


def requested_device(operation: Operation) -> Any:
    """Return the device among the arguments, if any.

    Tensors of an emulated device have the device `torch.device("cpu")`, so only the
    string "cpu" means the host.
    """
    positional = operation.args[1:2] if operation.name == "to" else ()
    devices = [d for d in positional if isinstance(d, (str, torch.device))]
    return operation.kwargs.get("device") or next(iter(devices), None)
