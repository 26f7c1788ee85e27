# SPDX-License-Identifier: Apache-2.0
"""Measures the costs of a module's blocks, by a forward pass on shapes alone."""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.config import IPUConfig
from ipufit.engine.traced.calling import call_module
from ipufit.planning.split import BlockCost

from .listening import Call, given_like, heard
from .segments import Segments
from .shapes_only import copy_of_shapes, shapes_only


def block_costs(
    module: torch.nn.Module,
    example: Sequence[Tensor],
    config: IPUConfig | None = None,
    call: Call = call_module,
) -> tuple[BlockCost, ...]:
    """Measure what each block of a module costs, in the order in which they run.

    A block begins at each submodule that one forward pass calls exactly once, and
    lasts until the next one begins. Where several begin at the same operation, as a
    container and its first layer do, they are one block with the name of the outermost.
    So a stage of a pipeline may begin at each name. A submodule that is called several
    times, as shared layers are, belongs to the blocks that call it.

    A copy without values is called in train mode, so this takes little time and memory,
    and the module, its buffers and all random states stay as they are.

    Args:
        module: The user's module.
        example: Tensors of a micro-batch, of which only shapes and types count. Floats
            become those of the config's precision.
        config: Has the precision of activations; float32 by default.
        call: Calls the copy with tensors like those of `example`; by default with one
            argument for each.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such tensors.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
        >>> for cost in block_costs(module, [torch.zeros(16, 8)]):
        ...     print(cost.name, cost.flops, cost.parameters, cost.output_bytes)
        0 1024 36 256
        1 256 10 0
    """
    config = IPUConfig() if config is None else config
    with shapes_only():
        copied = copy_of_shapes(module)
        given = given_like(example, config)
        segments = Segments(copied, given)
        _begin_at_calls(copied, segments)
        with heard(copied, config, segments):
            outputs = call(copied, given)
        leaves = Structure.of_outputs(outputs).flatten(outputs)
        segments.use([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return segments.costs()


def _begin_at_calls(module: torch.nn.Module, segments: Segments) -> None:
    """Begin a segment at each call of a submodule."""
    for name, child in module.named_modules():
        if name:
            hook = partial(_begin, segments=segments, name=name)
            child.register_forward_pre_hook(hook)


def _begin(_module: Any, _args: Any, *, segments: Segments, name: str) -> None:
    segments.begin(name)
