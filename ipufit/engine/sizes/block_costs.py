# SPDX-License-Identifier: Apache-2.0
"""Measures the costs of a module's blocks, by a forward pass on shapes alone."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit._tree import Structure
from ipufit.config import IPUConfig
from ipufit.engine.traced.calling import call_module
from ipufit.engine.traced.casting import computed_in
from ipufit.engine.weights.modes import mode
from ipufit.planning import BlockCost

from .operator_flops import flops_of, operator_name
from .segments import Segments
from .shapes_only import all_like, copy_of_shapes, shapes_only

Call = Callable[[torch.nn.Module, Sequence[Tensor]], Any]
"""Calls a module with the tensors of a micro-batch, and returns what it computes."""


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
        given = all_like(example)
        if config.types.is_half:
            given = [t.half() if t.is_floating_point() else t for t in given]
        segments = Segments(copied, given)
        with _listened(copied, segments), contextlib.ExitStack() as stack:
            stack.enter_context(mode(copied, training=True))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(segments.save, _unchanged))
            stack.enter_context(_Operators(segments))
            stack.enter_context(computed_in(copied, config))
            outputs = call(copied, given)
        leaves = Structure.of_outputs(outputs).flatten(outputs)
        segments.use([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return segments.costs()


@contextlib.contextmanager
def _listened(module: torch.nn.Module, segments: Segments) -> Iterator[None]:
    """Begin a segment at each call of a submodule."""
    for name, child in module.named_modules():
        if name:
            hook = partial(_begin, segments=segments, name=name)
            child.register_forward_pre_hook(hook)
    yield


def _begin(_module: Any, _args: Any, *, segments: Segments, name: str) -> None:
    segments.begin(name)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _Operators(TorchDispatchMode):
    """Has segments hear of each operator."""

    def __init__(self, segments: Segments) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._segments = segments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        flops = flops_of(func, args, result)
        uncounted = operator_name(func) if flops is None else None
        self._segments.run((args, kwargs), result, flops or 0, uncounted)
        return result
