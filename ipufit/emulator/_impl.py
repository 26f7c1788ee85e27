# SPDX-License-Identifier: Apache-2.0
"""What code that reaches into PopTorch's private module of this name asks for.

optimum-graphcore takes a wrapped model's classes off to save it, and puts them back.
"""

from __future__ import annotations

import torch

from ipufit.emulator._executor.wrapper_registry import rewrap_model, unwrap_model
from ipufit.emulator._tracing.trace_state import is_tracing


def isDispatchTracing() -> bool:
    """Whether a module is being traced: PopTorch has one way to trace left.

    Example:
        >>> isDispatchTracing()
        False
    """
    return is_tracing()


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Give a module and its weights the classes they had before `trainingModel`.

    Weights that are newer on the device are fetched.

    Args:
        model: Stays as it is if nothing of it is wrapped.

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
    """Undo `unwrapModelIfNecessary`, or a `destroy()`.

    Args:
        model: Whatever of it was wrapped before is wrapped again.

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
