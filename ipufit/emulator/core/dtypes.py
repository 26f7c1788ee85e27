# SPDX-License-Identifier: Apache-2.0
"""Types of a device's tensors, and functions of torch without its compiler.

From torch 2.1 on, some functions of torch import its compiler first, to exclude
themselves from compiled code. The import takes over a second, longer than tracing most
programs.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from typing import Any, Callable

import torch
from torch import Tensor
from torch.fx import graph_module
from torch.utils._python_dispatch import TorchDispatchMode


def device_tensor(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Cast a tensor to a type that an IPU holds.

    64-bit integers keep their type, because torch's CPU kernels need it where an IPU
    takes 32 bits, but their values are cut to 32 bits. `float64` and `bfloat16` become
    `float32` (PopTorch, `PoplarExecutable.cpp`).

    Args:
        tensor: Tensor of any type.
        copy: If True, the result has memory of its own. If False, it is `tensor`
            itself where nothing changes.

    Example:
        >>> device_tensor(torch.tensor([2**32 + 7, -1]))
        tensor([ 7, -1])
        >>> device_tensor(torch.zeros(1, dtype=torch.float64)).dtype
        torch.float32
    """
    if tensor.dtype == torch.int64:
        return torch.as_tensor(tensor.to(torch.int32), dtype=torch.int64)
    if tensor.dtype in (torch.float64, torch.bfloat16):
        return torch.as_tensor(tensor, dtype=torch.float32)
    return torch.clone(tensor) if copy else tensor


def host_tensor(tensor: Tensor) -> Tensor:
    """Cast a tensor to the type that a device returns; other types stay as they are.

    Example:
        >>> host_tensor(torch.tensor([1, 2])).dtype
        torch.int32
    """
    dtype = {torch.int64: torch.int32, torch.float64: torch.float32}.get(tensor.dtype)
    return tensor if dtype is None else torch.as_tensor(tensor, dtype=dtype)


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without torch's wrapper that imports the compiler.

    Args:
        function: A function, such as a method of a class. Without such a wrapper it is
            returned as it is.

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
    return getattr(function, "__wrapped__", function)


def is_importing_compiler() -> bool:
    """Return whether torch's compiler is being imported.

    Modules of the compiler compute with tensors when they are imported. These
    operations aren't part of the user's program.

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


class GraphModule(graph_module.GraphModule):
    """Torch's module of a graph, whose source is freed with it.

    torch keeps the source of every graph for tracebacks, as long as the process runs.
    """

    def recompile(self) -> Any:
        code = super().recompile()
        name = type(self).forward.__code__.co_filename
        weakref.finalize(self, _forget_source, name).atexit = False
        return code


def _forget_source(name: str) -> None:
    linecache.cache.pop(name, None)
    graph_module._loader.eval_cache.pop(name, None)
