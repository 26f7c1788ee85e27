# SPDX-License-Identifier: Apache-2.0
"""Keep torch's compiler out of processes that don't use it.

From torch 2.1 on, some functions of torch import its compiler before they do their
work, to keep out of what it compiles. The import takes over a second, and most programs
are traced in less.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from torch.utils._python_dispatch import TorchDispatchMode


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take off what torch has put around a function to import its compiler.

    Args:
        function: A function, such as a method of a class; one that torch has put
            nothing around is returned as it is.

    Example:
        >>> import torch
        >>> add = without_compiler(torch.optim.Optimizer.add_param_group)
        >>> add.__module__
        'torch.optim.optimizer'
        >>> without_compiler(len) is len
        True
    """
    namespace = getattr(function, "__globals__", {})
    if namespace.get("__name__") != "torch._compile":
        return function
    inner: Callable[..., Any] = getattr(function, "__wrapped__", function)
    return inner


def is_importing_compiler() -> bool:
    """Whether an import of torch's compiler is under way.

    Modules of the compiler compute with tensors when they are imported. That is no part
    of the user's program.

    Example:
        >>> is_importing_compiler()
        False
    """
    spec = getattr(sys.modules.get("torch._dynamo"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that doesn't import torch's compiler when it first runs."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            plain = without_compiler(cls.__torch_dispatch__)
            cls.__torch_dispatch__ = plain  # type: ignore[method-assign]
