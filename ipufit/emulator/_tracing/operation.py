# SPDX-License-Identifier: Apache-2.0
"""Operations: calls of torch functions that a trace checks, runs and records.

Here are also the tensors among their arguments and results, which torch nests in
tuples, lists, dicts and slices, and the devices that they name: tensors are on the IPU
or on the host.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.fx.node import Node
from torch.overrides import handle_torch_function

from ipufit.emulator._ground.logging import logger


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments.

    Example:
        >>> import torch
        >>> [t.item() for t in tensors_in(([torch.tensor(1)], {"k": torch.tensor(2)}))]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_in(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from tensors_in(element)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def has_tensors(value: Any) -> bool:
    """Whether there is a tensor in nested arguments.

    Example:
        >>> has_tensors([1, (2, 3)])
        False
    """
    return next(tensors_in(value), None) is not None


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace the tensors in nested arguments.

    Containers in which nothing changes stay the objects they are, such as the named
    results of torch.

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


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Replace everything in nested arguments; containers become plain ones.

    Example:
        >>> map_leaves((1, [2, {"k": 3}]), str)
        ('1', ['2', {'k': '3'}])
    """
    if isinstance(value, dict):
        return {key: map_leaves(v, function) for key, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map_leaves(v, function) for v in value)
    if isinstance(value, list):
        return [map_leaves(v, function) for v in value]
    if isinstance(value, slice):
        return slice(*map_leaves((value.start, value.stop, value.step), function))
    return function(value)


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
    """Whether an operation puts what it returns on the IPU, whatever its operands.

    A factory that isn't given a device does so, and each such call is warned of in the
    log (PopTorch, `_poplar_executor.py`). `device=None` is the host's: torch decides.

    Example:
        >>> creates_on_device(Operation(torch.zeros, "zeros", (2,), {"device": None}))
        False
    """
    device = _requested_device(operation)
    if device is not None:
        return not _is_host(device)
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


class HostDevices:
    """The devices that a model has read from tensors of the host.

    They are told by their identity: tensors of an emulated device have
    `torch.device("cpu")` too, but each reading gives an object of its own.

    Example:
        >>> devices, table = HostDevices(), torch.zeros(1)
        >>> read = Operation(torch.Tensor.device.__get__, "__get__", (table,), {})
        >>> device = devices.noted(read, table.device)
        >>> rand = Operation(torch.rand, "rand", (2,), {"device": device})
        >>> devices.named(rand).kwargs
        {'device': 'cpu'}
    """

    def __init__(self) -> None:
        self._known: dict[int, torch.device] = {}  # kept alive: ids are reused

    def noted(self, operation: Operation, result: Any) -> Any:
        """Note the result of an operation on tensors of the host if it's a device."""
        if operation.name == "__get__" and isinstance(result, torch.device):
            self._known[id(result)] = result
        return result

    def named(self, operation: Operation) -> Operation:
        """Write "cpu" for such a device: a factory that gets it uses the host.

        So does `torch.distributions`, which gives samples the device of the
        distribution's parameters.
        """
        if not self._known:
            return operation
        args, kwargs = operation.args, operation.kwargs
        if operation.name == "to":
            args = (*args[:1], *map(self._name, args[1:]))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._name(kwargs["device"])}
        return replace(operation, args=args, kwargs=kwargs)

    def _name(self, value: Any) -> Any:
        return "cpu" if self._known.get(id(value)) is value is not None else value


def moves_to_host(operation: Operation) -> bool:
    """Whether an operation is `tensor.to("cpu")`.

    Example:
        >>> x = torch.zeros(1)
        >>> moves_to_host(Operation(x.to, "to", (x, "cpu"), {}))
        True
        >>> moves_to_host(Operation(x.to, "to", (x, x.device), {}))
        False
    """
    return operation.name == "to" and _is_host(_requested_device(operation))


def with_emulated_devices(operation: Operation, nodes: NodesById) -> Operation:
    """Replace "ipu" devices in the arguments of an operation.

    Example:
        >>> zeros = Operation(torch.zeros, "zeros", (2,), {"device": "ipu:0"})
        >>> with_emulated_devices(zeros, {}).kwargs
        {'device': device(type='cpu')}
    """
    args, kwargs = operation.args, operation.kwargs
    if operation.name == "to":
        args = (*args[:1], *map(_emulated_device, args[1:]))
    elif "device" not in kwargs:
        return operation
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _emulated_device(kwargs["device"])}
    return replace(operation, args=args, kwargs=kwargs)


def _emulated_device(value: Any) -> Any:
    is_ipu = isinstance(value, (str, torch.device)) and str(value).startswith("ipu")
    return torch.device("cpu") if is_ipu else value


def _requested_device(operation: Operation) -> Any:
    """The device in the arguments, if any."""
    positional = operation.args[1:2] if operation.name == "to" else ()
    devices = [d for d in positional if isinstance(d, (str, torch.device))]
    return operation.kwargs.get("device") or next(iter(devices), None)


def _is_host(device: Any) -> bool:
    """Whether a `device` argument asks for the host.

    Tensors of an emulated device have `torch.device("cpu")` as theirs, so only the
    string means the host.
    """
    return isinstance(device, str) and device == "cpu"
