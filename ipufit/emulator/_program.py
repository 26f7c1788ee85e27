# SPDX-License-Identifier: Apache-2.0
"""Compile: trace one micro-batch of a module and check what the trace shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule

from ._args import CallArguments
from ._custom_args import flattenTensorStructure, reconstructTensorStructure
from ._losses import final_loss
from ._tracing import NORM_FUNCTIONS, Tracer, device_tensor, traceable_indexing
from .blocks import BlockPlacement, tracing_blocks
from .errors import createPoptorchError

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
)
_is_tracing = False


@dataclass(frozen=True)
class Program:
    """What the device does with one micro-batch.

    Attributes:
        graph: The recorded calls; takes the weights, then the inputs, and returns
            the outputs, then the loss if there is one.
        weight_names: The weights it takes, in order.
        output_structure: What `forward` returned, with the traced tensors in it.
        constant_outputs: Those outputs, by index, that no call computed.
        has_loss: Whether the last result is the final loss.
        num_ipus: IPUs that one replica needs.
        num_forward_stages: Pipeline stages of the forward pass.
        is_random: Whether it draws random numbers.
        updated_weights: Floating-point weights that it changes in place.
        volatile_weights: Integer ones, whose changes do not persist.
        unsynchronised_weights: Of the updated weights, those that replicas would
            have to broadcast: all but the statistics of normalisation layers.
    """

    graph: GraphModule
    weight_names: tuple[str, ...]
    output_structure: Any
    constant_outputs: dict[int, Tensor]
    has_loss: bool
    num_ipus: int
    num_forward_stages: int
    is_random: bool
    updated_weights: frozenset[str]
    volatile_weights: frozenset[str]
    unsynchronised_weights: frozenset[str]

    @property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        """The graph as a function of the weights and the inputs."""
        forward: Callable[..., tuple[Tensor, ...]] = self.graph.forward
        return forward

    def rebuild_outputs(self, tensors: list[Tensor]) -> Any:
        """Put `tensors` where `forward` returned tensors."""
        if self.output_structure is None:
            return None
        return reconstructTensorStructure(self.output_structure, iter(tensors))


def is_tracing() -> bool:
    """Whether a module is being traced at this moment."""
    return _is_tracing


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, each tensor once."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    weights.update(module.named_buffers())
    return weights


def trace(
    module: torch.nn.Module,
    arguments: CallArguments,
    *,
    strategy: Any,
    is_training: bool,
) -> Program:
    """Run `module` once on the arguments of one micro-batch and record it.

    Raises:
        Error: The module breaks a rule of tracing; the message names it.
    """
    weights = named_weights(module)
    tracer = Tracer(weights, arguments.tensors())
    bindings = _bindings(module)
    rng_state = torch.random.get_rng_state()
    try:
        with torch.set_grad_enabled(is_training), _tracing_flag(), tracing_blocks(
            strategy, tracer.begin_block, tracer.end_block
        ), traceable_indexing(), tracer:
            outputs = module(*arguments.args, **arguments.kwargs)
        is_random = not torch.equal(rng_state, torch.random.get_rng_state())
    finally:
        torch.random.set_rng_state(rng_state)
        rebound = _restore_bindings(module, bindings)
    _refuse_rebound(rebound)
    _refuse_homeless(tracer)
    flat = list(flattenTensorStructure(outputs))
    nodes = tracer.finish(flat)
    results = list(nodes)
    if is_training:
        results.append(final_loss(tracer.graph))
    tracer.graph.output(tuple(results))
    floating = {name for name, weight in weights.items() if weight.is_floating_point()}
    updated = frozenset(tracer.mutated)
    return Program(
        graph=GraphModule(tracer.root, tracer.graph),
        weight_names=tuple(weights),
        output_structure=outputs,
        constant_outputs={
            index: flat[index].detach().clone()
            for index, node in enumerate(nodes)
            if node.op == "get_attr"
        },
        has_loss=is_training,
        num_ipus=max(len(tracer.ipus()), max(tracer.ipus()) + 1),
        num_forward_stages=_count_stages(tracer.begun),
        is_random=is_random,
        updated_weights=updated & floating,
        volatile_weights=updated - floating,
        unsynchronised_weights=frozenset(
            name
            for name in updated & floating
            if not tracer.mutated[name] or tracer.mutated[name] - NORM_FUNCTIONS
        ),
    )


def micro_batch(arguments: CallArguments, factor: int, explain: str) -> CallArguments:
    """The rows of the first micro-batch, in types that an IPU holds.

    Args:
        arguments: Those of the whole call.
        factor: Micro-batches per call.
        explain: How `factor` came about, for the message.

    Raises:
        AssertionError: A leading dimension is not a multiple of `factor`.
    """

    def first_rows(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] if tensor.dim() else 1
        if size % factor:
            raise AssertionError(
                f"Invalid batch dimension: In the input of shape "
                f"{tuple(tensor.shape)}, the batch dimension ({size}) must be a "
                f"multiple of {explain} = "
                f"{factor} because it is divided into that many micro-batches."
            )
        rows = tensor.narrow(0, 0, size // factor) if tensor.dim() else tensor
        return device_tensor(rows.detach(), copy=True)

    tensors = [first_rows(tensor) for tensor in arguments.tensors()]
    args, kwargs = reconstructTensorStructure(
        (arguments.args, arguments.kwargs), iter(tensors)
    )
    return CallArguments(args, kwargs)


class _tracing_flag:
    """Makes `is_tracing` true for a while."""

    def __enter__(self) -> None:
        global _is_tracing
        self._before, _is_tracing = _is_tracing, True

    def __exit__(self, *exception: object) -> None:
        global _is_tracing
        _is_tracing = self._before


def _count_stages(begun: list[BlockPlacement]) -> int:
    """IPU switches along the data, plus one (PopTorch, `CompilerImpl.cpp`)."""
    last_ipu = 0
    switches = 0
    for block in begun:
        switches += block.ipu != last_ipu
        last_ipu = block.ipu
    return switches + 1


_Bindings = List[Tuple[torch.nn.Module, str, str, Dict[str, Optional[Tensor]]]]


def _bindings(module: torch.nn.Module) -> _Bindings:
    return [
        (owner, prefix, kind, dict(getattr(owner, kind)))
        for prefix, owner in module.named_modules()
        for kind in ("_parameters", "_buffers")
    ]


def _restore_bindings(module: torch.nn.Module, bindings: _Bindings) -> list[str]:
    """Undo assignments to weights; describe those that are not allowed."""
    problems = []
    for owner, prefix, kind, before in bindings:
        now = getattr(owner, kind)
        for name, tensor in before.items():
            if now.get(name) is tensor:
                continue
            verb = "reassigned" if name in now else "removed"
            if not isinstance(owner, _BATCH_NORMS):
                what = "Parameter" if kind == "_parameters" else "Buffer"
                full = f"{prefix}.{name}" if prefix else name
                problems.append(f"{what} {full} is {verb}")
            now[name] = tensor
            owner.__dict__.pop(name, None)
    return problems


def _refuse_rebound(problems: list[str]) -> None:
    if not problems:
        return
    hint = ""
    if problems[0].endswith("reassigned"):
        name = problems[0].split()[1]
        hint = f" Change it in place instead: `self.{name}.copy_(src)`."
    joint = " within" if problems[0].endswith("reassigned") else " from"
    raise createPoptorchError(
        f"{problems[0]}{joint} the model when calling the forward method. This is not "
        f"supported: the device holds the weights it was compiled with.{hint}"
    )


def _refuse_homeless(tracer: Tracer) -> None:
    if tracer.homeless_op is not None:
        raise createPoptorchError(
            "No active Block, all the ops must belong to a Block: "
            f"`{tracer.homeless_op}` runs after a block was closed and before another "
            "one begins. Put it inside `with poptorch.Block(...)`."
        )
