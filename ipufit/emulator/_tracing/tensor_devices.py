# SPDX-License-Identifier: Apache-2.0
"""On the IPU or on the host: where a call of torch puts the tensors it creates."""

from __future__ import annotations

from typing import Any

import torch

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._tracing.operands import has_tensors

FACTORIES = frozenset(
    getattr(torch, name)
    for name in (
        "arange",
        "empty",
        "full",
        "full_like",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "tensor",
        "zeros",
        "zeros_like",
    )
)
"""Functions that create tensors on the IPU when they aren't told another device
(PopTorch, `_poplar_executor.py`). Others, `torch.eye` for one, use the host."""

RANDOM_FACTORIES = frozenset(
    getattr(torch, name) for name in ("normal", "rand", "randint", "randn", "randperm")
)


def is_forced_to_device(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call creates a tensor on the IPU without being told to.

    Each such call is warned of in the log, however often one is made (PopTorch,
    `_poplar_executor.py`). `device=None` isn't replaced: torch then takes the host.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: The same by name.

    Example:
        >>> is_forced_to_device(torch.zeros, (2,), {"device": None})
        False
    """
    if function not in FACTORIES or "device" in kwargs:
        return False
    if function is torch.normal and has_tensors((args, kwargs)):
        return False
    logger.warning(
        "No device set in torch.%s(): forcing to IPU. Pass `device`, for example that "
        "of an input.",
        function.__name__,
    )
    return True


def is_host_device(device: Any) -> bool:
    """Whether a `device` argument asks for the host.

    An emulated device's tensors say that they are on `torch.device("cpu")`, so only
    the string is taken at its word.

    Example:
        >>> is_host_device("cpu"), is_host_device(torch.zeros(1).device)
        (True, False)
    """
    return isinstance(device, str) and device == "cpu"


def emulated_devices(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Replace "ipu" devices in the arguments of a call of torch.

    Args:
        name: Of the function.
        args: Its arguments.
        kwargs: The same by name.

    Returns:
        The arguments, and the device that they ask for, if any.

    Example:
        >>> emulated_devices("zeros", (2,), {"device": "ipu:0"})
        ((2,), {'device': device(type='cpu')}, device(type='cpu'))
    """
    if name == "to":
        args = (*args[:1], *map(_emulated_device, args[1:]))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _emulated_device(kwargs["device"])}
    positional = args[1:2] if name == "to" else ()
    devices = [d for d in positional if isinstance(d, (str, torch.device))]
    return args, kwargs, kwargs.get("device") or next(iter(devices), None)


def _emulated_device(value: Any) -> Any:
    is_ipu = isinstance(value, (str, torch.device)) and str(value).startswith("ipu")
    return torch.device("cpu") if is_ipu else value
