# SPDX-License-Identifier: Apache-2.0
"""Prints modules with their blocks."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from ipufit.emulator._tracing.blocks import is_block_hook

_INDENT = "  "


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
    hooks = [repr(h) for h in m._forward_pre_hooks.values() if is_block_hook(h)]
    name = " ".join([*hooks, type(m).__name__])
    extra = m.extra_repr()
    children = [f"({key}): {module_repr(child)}" for key, child in m.named_children()]
    if extra and not children and "\n" not in extra:
        return f"{name}({extra})"
    parts = [*([extra] if extra else []), *children]
    lines = [line for part in parts for line in part.split("\n")]
    if not lines:
        return f"{name}()"
    body = "".join(f"\n{_INDENT}{line}" for line in lines)
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
