# SPDX-License-Identifier: Apache-2.0
"""Where an operation puts the tensors it creates: on the IPU or on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._tracing.operation import NodesById, Operation

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
