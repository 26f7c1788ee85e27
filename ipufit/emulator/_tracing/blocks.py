# SPDX-License-Identifier: Apache-2.0
"""Block annotations: which part of a model runs on which IPU.

Outside a trace they do nothing, so that an annotated model runs on the host as it
is.
"""

from __future__ import annotations

import builtins
from typing import Any, Callable, TypeVar

import torch

from ipufit.emulator._tracing.state import enclosing_trace
from ipufit.emulator.errors import createPoptorchError, require

_ResultT = TypeVar("_ResultT")


class Block(torch.nn.Module):
    """A part of a model that runs on one IPU, as a context manager.

    Blocks don't nest: after the context no block is active, not even an outer one.

    Args:
        user_id: The block's name. Without one it gets "0", "1", ... in turn.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> import torch
        >>> from ipufit.emulator import Block
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         with Block("first", ipu_id=0):
        ...             x = x + 1
        ...         with Block("second", ipu_id=1):
        ...             return x * 2
        >>> Network()(torch.tensor([1.0]))
        tensor([4.])
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from 0 again: call it first in `forward`.

        Example:
            >>> from ipufit.emulator import Block
            >>> Block.useAutoId()
        """
        trace = enclosing_trace()
        if trace is not None:
            trace.strategy._reset_auto_id()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one begins or ends.

        Args:
            user_id: The block's name; without one it is numbered.
            ipu_id: The IPU it runs on, unless the execution strategy says another.

        Raises:
            AssertionError: During a trace, if the execution strategy doesn't
                know the block, or needs its IPU.

        Example:
            >>> from ipufit.emulator import Block
            >>> Block.start("head", ipu_id=1)
        """
        trace = enclosing_trace()
        if trace is not None:
            trace.begin_block(trace.strategy._place(user_id, ipu_id))

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *exception: object) -> None:
        trace = enclosing_trace()
        if trace is not None:
            trace.block = None


class LegacyBeginBlockFn(torch.nn.Module):
    """Function that begins a block when it is called; `BeginBlock` makes it.

    Args:
        layer_to_call: The function.
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> from ipufit.emulator import LegacyBeginBlockFn
        >>> LegacyBeginBlockFn(abs, user_id="abs", ipu_id=1)(-3)
        3
    """

    def __init__(
        self,
        layer_to_call: Callable[..., Any],
        user_id: str | None = None,
        ipu_id: int | None = None,
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the block, and call the function with these arguments."""
        Block.start(self._user_id, self._ipu_id)
        return self._layer_to_call(*args, **kwargs)


class _BeginBlockHook:
    """Forward-pre-hook that begins a block.

    It is a class, not a closure, so that it can be copied and pickled.
    """

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        trace = enclosing_trace()
        if trace is not None:
            # As in PopTorch, the hook keeps its first automatic id for later traces.
            self._user_id = self._user_id or trace.strategy._next_auto_id()
            Block.start(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def BeginBlock(
    layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None
) -> Any:
    """Begin a block whenever a module is called.

    The block holds the module and all that runs after it, until the next begins.

    Args:
        layer_to_call: A module, which is changed in place, or a function.
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Returns:
        The same module; of a function, a `LegacyBeginBlockFn`.

    Raises:
        Error: If the module begins a block already, or it is neither.

    Example:
        >>> import torch
        >>> from ipufit.emulator import BeginBlock
        >>> layer = torch.nn.Linear(2, 2)
        >>> BeginBlock(layer, "head", ipu_id=1) is layer
        True
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise createPoptorchError(
            "module is not an instance of torch.nn.Module or function. Got "
            f"{layer_to_call!r}."
        )
    hooks = layer_to_call._forward_pre_hooks.values()
    if any(isinstance(hook, _BeginBlockHook) for hook in hooks):
        raise createPoptorchError(
            "module has already been assigned to a block. Call "
            "poptorch.removeBlocks(module) first."
        )
    layer_to_call.register_forward_pre_hook(_BeginBlockHook(user_id, ipu_id))
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Callable[..., _ResultT]], Callable[..., _ResultT]]:
    """Run a function in a block.

    As in PopTorch, the decorated function's name becomes `wrapper`.

    Args:
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> from ipufit.emulator import BlockFunction
        >>> @BlockFunction("double", ipu_id=1)
        ... def double(x):
        ...     return 2 * x
        >>> double(4)
        8
    """

    def decorate(func: Callable[..., _ResultT]) -> Callable[..., _ResultT]:
        def wrapper(*args: Any, **kwargs: Any) -> _ResultT:
            with Block(user_id, ipu_id):
                return func(*args, **kwargs)

        return wrapper

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Undo `BeginBlock` on a module and all modules in it.

    Args:
        module: The module; its other hooks stay.

    Raises:
        AssertionError: If it isn't a module.

    Example:
        >>> import torch
        >>> from ipufit.emulator import BeginBlock, removeBlocks
        >>> layer = BeginBlock(torch.nn.Linear(2, 2), ipu_id=1)
        >>> removeBlocks(layer)
        >>> len(layer._forward_pre_hooks)
        0
    """
    require(isinstance(module, torch.nn.Module), f"Not a torch module: {module!r}.")
    for part in module.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, _BeginBlockHook):
                del part._forward_pre_hooks[key]


def module_repr(m: torch.nn.Module) -> str:
    """Describe a module as torch does, and where `BeginBlock` begins blocks.

    Example:
        >>> from ipufit.emulator import BeginBlock
        >>> layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> _ = BeginBlock(layers[1], "second", ipu_id=1)
        >>> builtins.print(module_repr(layers))
        Sequential(
          (0): ReLU()
          (1): BeginBlock(user_id=second, ipu_id=1) Tanh()
        )
    """
    hooks = [
        repr(h) for h in m._forward_pre_hooks.values() if isinstance(h, _BeginBlockHook)
    ]
    name = " ".join([*hooks, type(m).__name__])
    extra = m.extra_repr()
    children = [f"({key}): {module_repr(child)}" for key, child in m.named_children()]
    if extra and not children and "\n" not in extra:
        return f"{name}({extra})"
    parts = [*([extra] if extra else []), *children]
    lines = [line for part in parts for line in part.split("\n")]
    if not lines:
        return f"{name}()"
    body = "".join(f"\n  {line}" for line in lines)
    return f"{name}({body}\n)"


def print(m: Any, *args: Any, **kwargs: Any) -> None:
    """Print an object; for a module, print its blocks first.

    As in PopTorch, a module is printed twice: by `module_repr`, then as usual.

    Args:
        m: A module, or any other object.
        *args: As for the built-in `print`.
        **kwargs: As for the built-in `print`.

    Example:
        >>> print(torch.nn.ReLU())
        ReLU()
        ReLU()
    """
    if isinstance(m, torch.nn.Module):
        builtins.print(module_repr(m), *args, **kwargs)  # noqa: T201 - what it is for
    builtins.print(m, *args, **kwargs)  # noqa: T201 - what it is for
