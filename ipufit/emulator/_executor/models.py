# SPDX-License-Identifier: Apache-2.0
"""`trainingModel` and `inferenceModel`, which make executors."""

from __future__ import annotations

import copy

import torch

from ipufit.emulator._executor.executor import PoplarExecutor
from ipufit.emulator._executor.wrapper_registry import is_wrapped
from ipufit.emulator._options.options import Options


def trainingModel(
    model: torch.nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap `model` for training: each call runs forward, backward and updates.

    The module must compute exactly one final loss. It is wrapped in the train or
    eval mode it is in; nothing here changes that.

    Args:
        model: The module, or an executor around it.
        options: Frozen, and cloned for the executor; defaults for None.
        optimizer: One of `poptorch.optim`, or torch's SGD, Adam, AdamW or RMSprop;
            by default SGD with a learning rate of 0.01.

    Returns:
        The executor. Until it is destroyed, the module's weights fetch themselves
        from the device when they are read.

    Raises:
        RuntimeError: The module is wrapped for training already.
        Error: `options` is something else, or a buffer is of a subclass of `Tensor`.
        AssertionError: The optimizer's type is not supported.

    Example:
        >>> from ipufit.emulator import optim, trainingModel
        >>> class Squares(torch.nn.Linear):
        ...     def forward(self, x, y):
        ...         return torch.nn.functional.mse_loss(super().forward(x), y)
        >>> module = Squares(2, 1)
        >>> sgd = optim.SGD(module.parameters(), lr=0.1)
        >>> training = trainingModel(module, optimizer=sgd)
        >>> training(torch.ones(4, 2), torch.zeros(4, 1)).shape
        torch.Size([])
    """
    if isinstance(model, PoplarExecutor):
        model = model.model
    if is_wrapped(model):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call "
            "model.destroy() on the model to unwrap before wrapping again."
        )
    # The traced object: attributes like `training` are its own, weights are shared.
    twin = copy.copy(model)
    return PoplarExecutor(
        twin, options, training=True, optimizer=optimizer, user_model=model
    )


def inferenceModel(
    model: torch.nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap `model` for inference.

    Args:
        model: The module, or an executor around it. If it is wrapped for training,
            each call first fetches what training changed.
        options: Frozen, and cloned for the executor; gradient accumulation must be 1.

    Raises:
        Error: `options` is something else, or accumulates gradients.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> inference = inferenceModel(torch.nn.Linear(2, 3))
        >>> inference(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    if isinstance(model, PoplarExecutor):
        model = model.model
    return PoplarExecutor(copy.copy(model), options, training=False)
