# SPDX-License-Identifier: Apache-2.0
"""Blocks of a pipeline that a module begins itself."""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional, Sequence, Tuple

import torch

from ._poptorch import poptorch
from .errors import UnknownNameError

Begun = Tuple[Optional[str], Optional[int]]
"""Name and IPU of a block, as they were given to PopTorch."""

Blocks = List[Begun]


@contextlib.contextmanager
def started_blocks(stages: Sequence[Sequence[str]] = ()) -> Iterator[Blocks]:
    """List the blocks that a module starts, by `with Block(...)` or `Block.start`.

    Those of `BeginBlock` aren't listed: they are never closed, so they needn't be
    entered again.

    Args:
        stages: Names of each stage; empty if they aren't known.

    Yields:
        The blocks so far, in order.

    Raises:
        UnknownNameError: A block that the module starts is in none of the stages.

    Example:
        >>> with started_blocks() as blocks, poptorch.Block("head", ipu_id=1):
        ...     pass
        >>> blocks
        [('head', 1)]
    """
    blocks: Blocks = []
    start = poptorch.Block.start
    names = {name for stage in stages for name in stage}

    def listed(user_id: str | None = None, ipu_id: int | None = None) -> None:
        if names and user_id is not None and user_id not in names:
            kind = "block of the model (`pipeline` names others)"
            raise UnknownNameError(kind, user_id, names)
        blocks.append((user_id, ipu_id))
        start(user_id, ipu_id)

    poptorch.Block.start = staticmethod(listed)  # type: ignore[method-assign,assignment]
    try:
        yield blocks
    finally:
        poptorch.Block.start = staticmethod(start)  # type: ignore[method-assign,assignment]


def annotated_blocks(module: torch.nn.Module) -> dict[str, Begun]:
    """Find the blocks of `BeginBlock`, by the names of the submodules that begin them.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> _ = poptorch.BeginBlock(module[1], "head", ipu_id=1)
        >>> annotated_blocks(module)
        {'1': ('head', 1)}
    """
    found: dict[str, Begun] = {}
    for name, child in module.named_modules():
        if not child._forward_pre_hooks:
            continue
        probe = torch.nn.Module()  # PopTorch can remove its hooks, not list them
        probe._forward_pre_hooks.update(child._forward_pre_hooks)
        poptorch.removeBlocks(probe)
        for key, hook in child._forward_pre_hooks.items():
            if key not in probe._forward_pre_hooks:
                found[name] = (
                    getattr(hook, "_user_id", None),
                    getattr(hook, "_ipu_id", None),
                )
    return found
