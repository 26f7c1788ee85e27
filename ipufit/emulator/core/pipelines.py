# SPDX-License-Identifier: Apache-2.0
"""Blocks and stages: the IPUs of a program, and checks of it against its options."""

from __future__ import annotations

from typing import Iterable

import torch
from torch.fx.node import Node

from .._options_keys import popart_error, refused_settings, validate_popart_options
from ..enums import OutputMode, OverlapMode
from ..errors import createPoptorchError
from ..ops import overlapped_input, overlapped_output
from ..options import (
    BlockPlacement,
    Options,
    ParallelPhasedExecution,
    Settings,
    is_pipelined,
)
from .graph import effects_of, error_about, function_name
from .layout import Layout
from .program import Program


def used_ipus(nodes: Iterable[Node], constants: set[Node]) -> tuple[int, ...]:
    """List the IPUs that operators run on, in the order of first use.

    Args:
        nodes: Nodes of a program, and of the bodies of its loops and branches.
        constants: Nodes that are computed while the program is compiled.

    Returns:
        Numbers of IPUs; 0 alone if there is no operator.

    Raises:
        Error: An operator runs when no block is active. PopTorch sets the active IPU
            to none when a `with Block` ends (PopTorch, `Compiler.cpp` and
            `CompilerImpl.cpp`).
    """
    ipus: dict[int, None] = {}
    for node in nodes:
        users = [user for user in node.users if user.op != "output"]
        is_constant = node in constants and constants.issuperset(users)
        if is_constant or not effects_of(node).is_operator:
            continue
        block: BlockPlacement | None = node.meta.get("block")
        if block is None:
            raise error_about(
                "No active Block, all the ops must belong to a Block: "
                f"`{function_name(node)}` runs after a block was closed and before "
                "another one begins. This counts for views, casts and constants, "
                "and for the copy of an input that is returned as it is. Put it "
                "inside `with poptorch.Block(...)`.",
                node,
            )
        ipus[block.ipu] = None
    return tuple(ipus) or (0,)


def _check_order(program: Program, options: Options, is_training: bool) -> None:
    """Refuse a program that can't be pipelined over its IPUs.

    Raises:
        Error: A stage needs results of a later one, or is on two IPUs.
    """
    if not is_pipelined(options._execution_strategy) or len(program.ipus) < 2:
        return
    stages: dict[Node, int] = {}
    ipus: dict[int, int] = {}
    for node in program.graph.graph.nodes:
        latest = max((stages[source] for source in node.all_input_nodes), default=0)
        block: BlockPlacement | None = node.meta.get("block")
        if block is None or not effects_of(node).is_operator:
            stages[node] = latest
            continue
        stages[node] = block.stage
        if latest > block.stage:
            raise error_about(
                f"Block '{block.block_id}' is in stage {block.stage} of the pipeline "
                f"but needs results of stage {latest}: stages must increase along the "
                "data. poptorch.AutoStage.AutoIncrement gives each block a stage of "
                "its own, several on one IPU if need be.",
                node,
            )
        if ipus.setdefault(block.stage, block.ipu) != block.ipu:
            raise error_about(
                f"Stage {block.stage} of the pipeline is on IPU {ipus[block.stage]} "
                f"and, with `{function_name(node)}`, on IPU {block.ipu}. All ops with "
                "the same pipeline stage must also have the same virtual graph id "
                "(PopART, `ir.cpp`). What runs before the first block is in stage 0 "
                "on IPU 0: move it into the block, or put the first stage on IPU 0.",
                node,
            )


def _check_weights(program: Program, options: Options, is_training: bool) -> None:
    """Refuse a weight that two IPUs of a pipeline use.

    PopART copies it between them if they run one after the other (`pipeline.cpp`).

    Raises:
        Error: There is such a weight, or a floating-point buffer.
    """
    if not is_pipelined(options._execution_strategy) or len(program.ipus) < 2:
        return
    nodes = list(program.graph.graph.nodes)
    named = dict(zip(program.weight_names, nodes))
    for name in program.used_weights & program.variables:
        first: dict[int, Node] = {}
        waiting = [named[name]]
        while waiting:
            for user in waiting.pop().users:
                block: BlockPlacement | None = user.meta.get("block")
                if not effects_of(user).is_operator:
                    waiting.append(user)
                elif block is not None and user.op != "output":
                    first.setdefault(block.ipu, user)
        if len(first) > 1:
            ipus = sorted(first)
            uses = " and ".join(
                f"`{function_name(first[ipu])}` on IPU {ipu}" for ipu in ipus[:2]
            )
            raise error_about(
                f"Can not copy variable tensor {name} between virtual graphs when "
                "pipelining. All pipeline stages using this tensor should be on the "
                f"same graph (PopART, `pipeline.cpp`): it is used by {uses}. Put what "
                "shares it on one IPU, or use poptorch.ShardedExecution.",
                first[ipus[1]],
            )


def _check_overlap(program: Program, options: Options, is_training: bool) -> None:
    *nodes, output = program.graph.graph.nodes
    returned = list(output.args[0])[: -1 if program.has_loss else None]
    inputs = [n for n in nodes if str(n.target).startswith("input_")]
    marks = [n for n in nodes if n.target in (overlapped_input, overlapped_output)]
    for mark in marks:
        marked, is_input = mark.args[0], mark.target is overlapped_input
        kind = "input" if is_input else "output"
        if marked not in inputs if is_input else mark not in returned:
            raise createPoptorchError(
                f"poptorch.set_overlap_for_{kind} applied on a node which is not a "
                f"tensor {kind} to the model: {marked}."
            )
        if is_input and len(marked.users) > 1:
            raise createPoptorchError(
                "poptorch.set_overlap_for_input must be the only op applied to an "
                "input. This is not the case for input "
                f"{inputs.index(marked)} to the model. Compute with the tensor that it "
                "returns."
            )
        if not is_input and (returned.count(mark) > 1 or marked in returned):
            raise createPoptorchError(
                "poptorch.set_overlap_for_output cannot be used with a tensor that is "
                "returned twice. Please check all returned tensors including those "
                "nested in tuples/lists."
            )
    if all(mark.args[1] == OverlapMode.NoOverlap.value for mark in marks):
        return
    if is_pipelined(options._execution_strategy):
        raise createPoptorchError(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you "
            "are using only one IPU, please switch to poptorch.ShardedExecution."
        )
    if not options.TensorLocations.exists("numIOTiles"):
        raise createPoptorchError(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    if options.output_mode not in (OutputMode.All.value, OutputMode.Sum.value):
        raise createPoptorchError(
            "Overlapped IO needs every micro-batch's output: OutputMode.All or "
            f"OutputMode.Sum, not {OutputMode(options.output_mode).name}. Set "
            "poptorch.Options().outputMode."
        )


def _check_broadcast(program: Program, options: Options, is_training: bool) -> None:
    layout = Layout(options)
    needs_broadcast = program.unsynchronised_weights and layout.input_groups > 1
    if needs_broadcast and options.broadcast_buffers:
        raise createPoptorchError(
            "PopTorch does not support broadcasting buffers. If your model is able to "
            "tolerate buffers becoming out of sync between replicas, you can disable "
            "buffer broadcasting using poptorch.Options.broadcastBuffers(False). "
            f"Changed in place: {', '.join(sorted(program.unsynchronised_weights))}."
        )


def check_updatable_buffers(model: torch.nn.Module, options: Options) -> None:
    """Refuse names of buffers that can't be uploaded after compiling.

    Raises:
        Error: The model has no such buffer, or it is compiled in.
    """
    buffers = dict(model.named_buffers())
    for name in Settings(options).updatable_buffers:
        if name not in buffers:
            raise createPoptorchError(
                f"Options.updatableNamedBuffers names {name!r}, but the model's "
                f"buffers are: {', '.join(buffers) or 'none'}."
            )
        if not buffers[name].is_floating_point():
            raise createPoptorchError(
                f"Options.updatableNamedBuffers names {name!r}, a buffer of "
                f"{buffers[name].dtype}: only floating-point buffers can be "
                "uploaded, others are constants of the compiled model."
            )


def _check_placement(program: Program, options: Options, is_training: bool) -> None:
    strategy = options._execution_strategy
    for block in program.blocks:
        if block.ipu < 0:
            raise createPoptorchError(
                f"No active Block: '{block.block_id}' was given no IPU. Pass "
                "`ipu_id`, or set it on the stage or the phase."
            )
        is_parallel = isinstance(strategy, ParallelPhasedExecution)
        if is_parallel and block.phase % 2 != block.ipu % 2:
            raise createPoptorchError(
                "When phases are executed in parallel, even phases must run on even "
                f"IPUs and odd phases on odd IPUs: phase {block.phase}, block "
                f"'{block.block_id}', is on IPU {block.ipu}."
            )


def _check_stages(program: Program, options: Options, is_training: bool) -> None:
    if not is_pipelined(options._execution_strategy):
        return
    layout, forward = Layout(options), program.num_forward_stages
    stages = 2 * forward - 1
    if is_training and layout.gradient_accumulation < stages:
        raise createPoptorchError(
            "poptorch.Options().Training.gradientAccumulation must be greater than or "
            f"equal to the number of pipeline stages ({stages}) when using "
            f"poptorch.PipelinedExecution. Please note that a model with {forward} "
            f"pipeline stages in PopTorch will have an additional {forward - 1} stages "
            f"when training. It is {layout.gradient_accumulation}."
        )
    if not is_training and layout.device_iterations < forward:
        raise createPoptorchError(
            "poptorch.Options().deviceIterations must be greater than or equal to the "
            f"number of pipeline stages ({forward}). It is {layout.device_iterations}."
        )


def _check_loss_scaling(program: Program, options: Options, is_training: bool) -> None:
    if is_training and Settings(options).scales_loss and not program.has_half:
        raise createPoptorchError(
            "Automatic loss scaling: no tracked gradient tensors of type fp16 were "
            "found (PopART, `automaticlossscaling.cpp`). Compute in float16, as with "
            "model.half(), or leave setAutomaticLossScaling out."
        )


def _check_period(program: Program, options: Options, is_training: bool) -> None:
    if options.output_mode != OutputMode.EveryN.value:
        return
    period, iterations = options.output_return_period, options.device_iterations
    if iterations % period:
        raise createPoptorchError(
            f"The period of OutputMode.EveryN ({period}) must divide the number of "
            f"device iterations ({iterations})."
        )
    if program.num_ipus > 1 and is_pipelined(options._execution_strategy):
        raise createPoptorchError(
            "OutputMode.EveryN is not supported for a model that is pipelined over "
            f"several IPUs ({program.num_ipus})."
        )


def _check_settings(program: Program, options: Options, is_training: bool) -> None:
    settings = options.toDict()
    validate_popart_options(settings)
    problems = [*refused_settings(settings, program.ipus, is_training=is_training)]
    if problems:
        raise popart_error(
            f"{' '.join(problems)} Change these settings, or leave them out."
        )


LOWERING_CHECKS = (
    _check_settings,
    _check_broadcast,
    _check_overlap,
    _check_placement,
)
"""Checks of a traced program against its options. Each raises an `Error` if it refuses
the program."""

SESSION_CHECKS = (
    _check_stages,
    _check_order,
    _check_weights,
    _check_loss_scaling,
    _check_period,
)
"""Checks that come after that of the number of IPUs (PopTorch, `Compiler.cpp`,
`initSession`)."""
