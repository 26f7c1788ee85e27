# SPDX-License-Identifier: Apache-2.0
"""`ipufit.log`: scalars that a module reports from the program."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Dict, Iterator

import torch
from torch import Tensor

from .errors import ConfigError

Scalars = Dict[str, Tensor]
"""0-d tensors by name."""

_collector: ContextVar[Scalars | None] = ContextVar("collector", default=None)
"""Where this thread collects the scalars of the module that it traces."""


def log(name: str, value: Tensor) -> None:
    """Report a scalar under `name` in logs, History and on the progress bar.

    Call it in a module's `forward`, which Python runs once: the value is computed in
    the program, for every micro-batch, and averaged over all samples. In a validation
    the key begins with `val_`. Outside of ipufit's runs `log` does nothing, so the
    module works anywhere.

    Args:
        name: Key in logs, which no metric has.
        value: A tensor of one element, such as a mean over the samples. Its gradient
            doesn't change.

    Raises:
        ConfigError: The value is no such tensor, or the name is taken.

    Example:
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def forward(self, x):
        ...         log("size", x.abs().mean())
        ...         return self.layer(x)
        >>> Net()(torch.zeros(1, 2)).shape
        torch.Size([1, 1])
    """
    scalars = _collector.get()
    if scalars is None:
        return
    if not isinstance(name, str) or not name:
        raise ConfigError(f"log() needs a name, and got {name!r}.")
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"log({name!r}) got {value!r}: a {type(value).__name__} would be baked "
            "into the compiled program. Pass a tensor computed from the inputs or "
            "weights."
        )
    if value.numel() != 1:
        raise ConfigError(
            f"log({name!r}) got a tensor of shape {tuple(value.shape)}, which is no "
            "scalar: reduce it first, as with .mean()."
        )
    if name in scalars:
        raise ConfigError(
            f"log({name!r}) was called twice in one forward pass: add the values up, "
            "or give them names of their own."
        )
    scalars[name] = value.detach().reshape(()).to(torch.float32)


@contextlib.contextmanager
def collected() -> Iterator[Scalars]:
    """Collect the scalars that are logged inside the context.

    Example:
        >>> with collected() as scalars:
        ...     log("two", torch.tensor(2))
        >>> scalars
        {'two': tensor(2.)}
    """
    scalars: Scalars = {}
    token = _collector.set(scalars)
    try:
        yield scalars
    finally:
        _collector.reset(token)
