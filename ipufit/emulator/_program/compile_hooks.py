# SPDX-License-Identifier: Apache-2.0
"""Hooks: functions of the user's that run before and after every compilation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator

from torch.utils.hooks import RemovableHandle

_Hooks = Dict[int, Callable[[], Any]]

_before: _Hooks = OrderedDict()
_after: _Hooks = OrderedDict()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Have `hook` called whenever an executor begins to trace its model.

    It is called by every executor, without arguments, in the order of registration.
    As in PopTorch the trace is under way then: torch calls in a hook become part of
    the program, and `isRunningOnIpu()` is true.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPreCompileHook(lambda: print("compiling"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        compiling
        >>> handle.remove()
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
    """
    return _register(_before, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Have `hook` called whenever an executor has traced its model.

    It is called by every executor, without arguments, in the order of registration:
    after the trace, even one that failed, and before what compiling refuses is
    refused.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPostCompileHook(lambda: print("traced"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        traced
        >>> handle.remove()
    """
    return _register(_after, hook, "Post-compile")


def call_pre_compile_hooks() -> None:
    """Call the hooks of `registerPreCompileHook`."""
    _call(_before)


@contextlib.contextmanager
def post_compile_hooks() -> Iterator[None]:
    """Call the hooks of `registerPostCompileHook` at the end, also after an error."""
    try:
        yield
    finally:
        _call(_after)


def _register(hooks: _Hooks, hook: Callable[[], Any], kind: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{kind} hook must be callable. Got {hook!r}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call(hooks: _Hooks) -> None:
    for hook in list(hooks.values()):
        hook()
