# SPDX-License-Identifier: Apache-2.0
"""The submodules and weights of a module, and their names.

torch's generators make some ten calls of Python for each submodule, and each run, and
each call on a batch, walks over the module several times.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and all its submodules, as `module.modules()` orders them.

    Example:
        >>> len(modules_of(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())))
        3
    """
    modules: dict[torch.nn.Module, None] = {}
    waiting: list[Any] = [module]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in modules:
            modules[part] = None
            waiting += reversed(list(part._modules.values()))
    return list(modules)


def parameters_of(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters, each once; none is fetched from a device.

    Example:
        >>> len(parameters_of(torch.nn.BatchNorm1d(2)))
        2
    """
    return _tensors_of(module, "_parameters")


def weights_of(module: torch.nn.Module) -> list[Tensor]:
    """Return parameters, then buffers, each once; none is fetched from a device.

    Example:
        >>> len(weights_of(torch.nn.BatchNorm1d(2)))
        5
    """
    return _tensors_of(module, "_parameters", "_buffers")


def _tensors_of(module: torch.nn.Module, *kinds: str) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    modules = modules_of(module)
    for kind in kinds:
        for part in modules:
            for tensor in getattr(part, kind).values():
                if tensor is not None:
                    tensors[id(tensor)] = tensor
    return list(tensors.values())


def path_of(module: torch.nn.Module, part: object) -> str:
    """Return the name of a submodule or weight; "" for the module itself.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> path_of(module, module[0].bias)
        '0.bias'
    """
    weights = module.named_parameters(), module.named_buffers()
    named: Any = itertools.chain(module.named_modules(), *weights)
    return next((name for name, known in named if known is part), "")
