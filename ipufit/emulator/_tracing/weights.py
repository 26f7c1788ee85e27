# SPDX-License-Identifier: Apache-2.0
"""The weights of a module that is traced: copies to compute with, and exchanges.

A trace changes no weight: it computes with copies. Assigning another tensor to a
weight's name in `forward` is undone, and refused.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit.emulator._ground.dtypes import device_tensor
from ipufit.emulator._tracing.liveness import storage_of
from ipufit.emulator.errors import createPoptorchError

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
)

Bindings = List[Tuple[torch.nn.Module, str, str, Dict[str, Optional[Tensor]]]]
"""Module, its path, `_parameters` or `_buffers`, and the tensors there by name."""


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a module, then its buffers, each tensor once."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    weights.update(module.named_buffers())
    return weights


class DeviceWeights:
    """Copies of a module's weights, for a trace to compute with.

    Args:
        weights: Name to host tensor, parameters and buffers.
        copy: Copies one of them; by default into the type that a device stores.

    Attributes:
        copies: Name to copy, in the type that a device stores.
        inputs: Name to the name of the graph's input.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        copy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.inputs = {name: f"weight_{i}" for i, name in enumerate(weights)}
        self.copies = {
            name: (copy or _copy)(tensor) for name, tensor in weights.items()
        }
        pairs = list(zip(weights.values(), self.copies.values()))
        self._copy_of = {id(host): copy for host, copy in pairs}
        self._host_of = {id(copy): host for host, copy in pairs}
        self._addresses = {name: _address(c) for name, c in self.copies.items()}

    def on_device(self, tensor: Tensor) -> Tensor:
        """The copy of a weight; any other tensor is returned as it is."""
        return self._copy_of.get(id(tensor), tensor)

    def on_host(self, tensor: Tensor) -> Tensor:
        """The weight that a tensor is a copy of; any other is returned as it is."""
        return self._host_of.get(id(tensor), tensor)

    def memory(self) -> dict[int, str]:
        """The storages of the copies, and the weights' names."""
        return {storage_of(copy): name for name, copy in self.copies.items()}

    def rebound(self) -> list[str]:
        """Weights that were given other memory, as by `weight.data = ...`."""
        return [
            name
            for name, copy in self.copies.items()
            if _address(copy) != self._addresses[name]
        ]


def _address(tensor: Tensor) -> tuple[int, int]:
    return storage_of(tensor), int(tensor.storage_offset())


def _copy(weight: Tensor) -> Tensor:
    copy = device_tensor(weight.detach(), copy=True)
    copy.requires_grad_(weight.requires_grad and copy.is_floating_point())
    return copy


def bindings_of(module: torch.nn.Module) -> Bindings:
    """The parameters and buffers of all modules, by the names that they have now."""
    return [
        (owner, prefix, kind, dict(getattr(owner, kind)))
        for prefix, owner in module.named_modules()
        for kind in ("_parameters", "_buffers")
    ]


def restore_bindings(module: torch.nn.Module, bindings: Bindings) -> list[str]:
    """Undo assignments to weights; describe those that are not allowed."""
    problems = []
    for owner, prefix, kind, before in bindings:
        now = getattr(owner, kind)
        for name in now.keys() - before.keys():
            del now[name]
        for name, tensor in before.items():
            if now.get(name) is tensor:
                continue
            verb = "reassigned" if name in now else "removed"
            if not isinstance(owner, _BATCH_NORMS):
                what = "Parameter" if kind == "_parameters" else "Buffer"
                full = f"{prefix}.{name}" if prefix else name
                problems.append(f"{what} {full} is {verb}")
            now[name] = tensor
            owner.__dict__.pop(name, None)
    return problems


def refuse_rebound(problems: list[str]) -> None:
    """Refuse weights that were exchanged, as `restore_bindings` describes them.

    Raises:
        Error: `problems` isn't empty.

    Example:
        >>> refuse_rebound([])
    """
    if not problems:
        return
    hint = ""
    if problems[0].endswith("reassigned"):
        name = problems[0].split()[1]
        hint = (
            f" This is not supported. Consider using self.{name}.copy_(src) to copy "
            "data from a source tensor, where src is the name of the source tensor."
        )
    joint = " within" if problems[0].endswith("reassigned") else " from"
    raise createPoptorchError(
        f"{problems[0]}{joint} the model when calling the forward method.{hint} The "
        "device holds the weights it was compiled with."
    )
