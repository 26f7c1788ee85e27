# SPDX-License-Identifier: Apache-2.0
"""PopTorch's private module `_impl`, as far as other packages use it.

optimum-graphcore removes a wrapped model's wrapper classes to save it, and restores
them.
"""

from __future__ import annotations

import torch

from ipufit.emulator._executor.wrapping import rewrap_model, unwrap_model
from ipufit.emulator._tracing.state import is_tracing


def isDispatchTracing() -> bool:
    """Return whether a module is being traced.

    Example:
        >>> isDispatchTracing()
        False
    """
    return is_tracing()


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Restore the classes that a module and its weights had before `trainingModel`.

    Weights that are newer on the device are fetched. A module that isn't wrapped stays
    as it is.

    Example:
        >>> from ipufit.emulator import trainingModel
        >>> module = torch.nn.Linear(2, 1)
        >>> training = trainingModel(module)
        >>> unwrapModelIfNecessary(module)
        >>> type(module), type(module.weight) is torch.nn.Parameter
        (<class 'torch.nn.modules.linear.Linear'>, True)
    """
    unwrap_model(model)


def rewrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Wrap a module again after `unwrapModelIfNecessary` or a `destroy()`.

    Example:
        >>> from ipufit.emulator import trainingModel
        >>> module = torch.nn.Linear(2, 1)
        >>> training = trainingModel(module)
        >>> unwrapModelIfNecessary(module)
        >>> rewrapModelIfNecessary(module)
        >>> type(module).__name__
        'PoptorchLinear'
    """
    rewrap_model(model)
