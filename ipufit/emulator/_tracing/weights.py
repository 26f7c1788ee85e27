# SPDX-License-Identifier: Apache-2.0
"""Weights that `forward` exchanges for others: put back, and refused."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit.emulator.errors import createPoptorchError

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
)


Bindings = List[Tuple[torch.nn.Module, str, str, Dict[str, Optional[Tensor]]]]


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, each tensor once."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    weights.update(module.named_buffers())
    return weights


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
        Error: There are some.

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
