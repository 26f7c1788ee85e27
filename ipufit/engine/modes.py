# SPDX-License-Identifier: Apache-2.0
"""Train and eval mode of a module that is traced."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch


@contextlib.contextmanager
def mode(
    module: torch.nn.Module, *, training: bool, root: torch.nn.Module | None = None
) -> Iterator[None]:
    """Put `module` and its children in train or eval mode, and back.

    PopTorch traces a module in the mode it is in, and calls neither `train` nor
    `eval` itself. To be trained, submodules that are in eval mode stay so if the user's
    module is in train mode: somebody has frozen them.

    Args:
        module: The one that is traced.
        training: Which mode.
        root: The user's, inside of it.

    Example:
        >>> module = torch.nn.Dropout()
        >>> with mode(module, training=False):
        ...     module.training
        False
        >>> module.training
        True
    """
    before: dict[torch.nn.Module, bool] = {m: m.training for m in module.modules()}
    module.train(training)
    if training and before[module] and (root is None or before[root]):
        for child, was_training in before.items():
            if not was_training:  # frozen by the user, such as batch norm
                child.training = False
    try:
        yield
    finally:
        for child, was_training in before.items():
            child.training = was_training


def trained_modes(module: torch.nn.Module) -> list[bool]:
    """In which mode each part of a module is trained: in train mode if it isn't frozen.

    Args:
        module: The user's; its parts in eval mode are frozen if it is in train mode.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.BatchNorm1d(2).eval())
        >>> trained_modes(module), trained_modes(module.eval())
        ([True, False], [True, True])
    """
    return [part.training or not module.training for part in module.modules()]
