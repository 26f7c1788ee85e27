# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of recomputation: activations that are kept for the backward pass."""

from __future__ import annotations

import contextlib
import fnmatch
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import tree_map
from ipufit.blocks import Blocks
from ipufit.config import IPUConfig
from ipufit.errors import ConfigError, UnknownNameError
from ipufit.placement import is_inside, own_stages


def kept_submodules(module: torch.nn.Module, patterns: Sequence[str]) -> list[str]:
    """Find the submodules whose outputs are kept.

    Args:
        patterns: Names of submodules, or patterns of them, as in `fnmatch`, where `*`
            stands for dots too. A pattern doesn't mean what is within its matches, so
            `"encoder.layer.*"` keeps what each layer returns, and nothing inside.

    Raises:
        UnknownNameError: A pattern matches none.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["layer.*"])
        ['layer.0', 'layer.1']
        >>> kept_submodules(torch.nn.ModuleDict({"layer": layers}), ["l*"])
        ['layer']
    """
    names = [name for name, _ in module.named_modules() if name]
    kept: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            raise UnknownNameError("submodule in recompute", pattern, names)
        kept.update(
            name for name in found if not any(is_inside(name, other) for other in found)
        )
    return [name for name in names if name in kept]


@contextlib.contextmanager
def recomputed_between(
    module: torch.nn.Module, patterns: Sequence[str]
) -> Iterator[None]:
    """Have the outputs of submodules kept, and what is between them computed again.

    The hooks are there while a program is traced, so the module stays as it was.

    Args:
        patterns: As for `kept_submodules`.

    Raises:
        UnknownNameError: A pattern matches no submodule.
    """
    children = dict(module.named_modules())
    handles = [
        children[name].register_forward_hook(
            lambda _module, _inputs, outputs: tree_map(_kept, outputs)
        )
        for name in kept_submodules(module, patterns)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def refuse_unseen_pipeline(
    module: torch.nn.Module, config: IPUConfig, blocks: Blocks
) -> None:
    """Refuse recomputation in a pipeline that only the trace has shown.

    The options are made before `forward` begins its blocks, and what recomputes on one
    IPU does nothing in a pipeline (PopART, `ir.cpp`).

    Args:
        module: The user's module.
        config: Has `recompute`.
        blocks: Blocks that `forward` has begun.

    Raises:
        ConfigError: The blocks are on several IPUs, and something is to be recomputed.

    Example:
        >>> module, blocks = torch.nn.ReLU(), [("a", 0), ("b", 1)]
        >>> refuse_unseen_pipeline(module, IPUConfig(recompute="auto"), blocks)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: recompute='auto', and `forward` begins blocks on 2...
    """
    if config.recompute in (None, "off") or config.customize is not None:
        return
    is_known = config.placement is not None or own_stages(module, config) > 1
    num_ipus = len({ipu or 0 for _, ipu in blocks})
    if is_known or not config.is_pipelined or num_ipus < 2:
        return
    names = ", ".join(repr(name) for name, _ in blocks)
    raise ConfigError(
        f"recompute={config.recompute!r}, and `forward` begins blocks on {num_ipus} "
        "IPUs, a pipeline that isn't known before: there PopART would recompute "
        f"nothing. Name the blocks in pipeline=({names}), or leave recompute out: "
        "pipelines recompute by default."
    )


def _kept(output: Any) -> Any:
    """A checkpoint of a tensor that has a gradient; anything else as it is."""
    is_kept = isinstance(output, Tensor) and output.is_floating_point()
    return poptorch.recomputationCheckpoint(output) if is_kept else output
