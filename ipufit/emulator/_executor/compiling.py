# SPDX-License-Identifier: Apache-2.0
"""Compile: trace the module of an executor, and check it against its options."""

from __future__ import annotations

import os
from typing import Callable, Iterator, Mapping

import torch

from ipufit.emulator._device.device import Executable
from ipufit.emulator._executor.wrapping import unwrapped
from ipufit.emulator._folding.fold import choose_runner
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.pod import Target
from ipufit.emulator._layout.replica_groups import (
    GroupedParameters,
    Grouping,
    one_element_each,
)
from ipufit.emulator._ops.markers import check_overlap
from ipufit.emulator._optimizers.device_optimizer import OptimizerSync
from ipufit.emulator._options.options import Options, Settings
from ipufit.emulator._options.popart_keys import validate_popart_options
from ipufit.emulator._options.strategies import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    is_pipelined,
)
from ipufit.emulator._program.anchors import (
    add_anchors,
    named_nodes,
    weight_tensor_names,
)
from ipufit.emulator._program.args import CallArguments, check_inputs, micro_batch
from ipufit.emulator._program.checks import check_stages
from ipufit.emulator._program.floating_point import check_operations
from ipufit.emulator._program.program import Program, trace
from ipufit.emulator._tracing.recording import named_weights
from ipufit.emulator.enums import CommGroupType, OutputMode
from ipufit.emulator.errors import createPoptorchError, require


def compile_model(
    model: torch.nn.Module,
    options: Options,
    arguments: CallArguments,
    groupings: GroupedParameters,
    optimizer: OptimizerSync | None,
) -> Executable:
    """Trace a module for arguments like these, and check the traced program.

    Args:
        groupings: Parameters that differ between groups of replicas.
        optimizer: The executor's optimizer; None for inference.

    Raises:
        AssertionError: A batch dimension is not a multiple of `D * G * R`.
        Error: The module or its options ask for something that no device does.
    """
    is_training, settings = optimizer is not None, Settings.of(options)
    _check_executable_cache(options, settings.cache_dir)
    check_inputs(arguments.tensors())
    layout = Layout.from_options(options)
    with torch.inference_mode(False):
        example = micro_batch(arguments, layout.input_blocks, layout.describe())
        kept = example.with_tensors(tensor.clone() for tensor in example.tensors())
    with unwrapped(model):
        _check_groupings(groupings.by_name(model), options)
        groups = groupings.resolve(model, layout.replicas)
        with one_element_each(model, groups):
            program = trace(
                model,
                example,
                strategy=options._execution_strategy,
                is_training=is_training,
                names_modules=options._module_namescope_enabled,
            )
        validate_popart_options(options.toDict())
        for check in checks_of_program(
            program, layout, options, is_training=is_training
        ):
            check()
        target = Target.of(options, program.num_ipus * layout.replicas)
        check_updatable_buffers(model, options)
        weights = {
            # Integer weights are compiled in: changes neither arrive nor come back.
            name: weight if weight.is_floating_point() else weight.detach().clone()
            for name, weight in named_weights(model).items()
        }
        trained = [
            name
            for name, weight in weights.items()
            if program.has_loss and weight.requires_grad and weight.is_floating_point()
        ]
        names = [*named_nodes(program), *weight_tensor_names(trained)]
        if optimizer is not None:
            names += optimizer.compile(weights, trained)
        anchors = add_anchors(program, options, names)
        if settings.stops_at_exceptions:
            check_operations(program.graph)
        runner = choose_runner(program, layout, settings, groups)
    like = arguments.like_meta()
    return Executable(
        program, target, like, kept, weights, groups, names, anchors, runner
    )


def checks_of_program(
    program: Program, layout: Layout, options: Options, *, is_training: bool
) -> Iterator[Callable[[], None]]:
    """Yield functions that check a traced program against its options.

    Each raises an `Error` if it refuses the program. They check the place and order of
    blocks, the number of stages, the output mode, and buffers that replicas would have
    to broadcast.
    """
    strategy, graph = options._execution_strategy, program.graph.graph
    yield lambda: check_overlap(graph, options, has_loss=program.has_loss)
    yield lambda: _check_placement(program, strategy)
    if is_pipelined(strategy):
        forward = program.num_forward_stages
        yield lambda: _check_stages(forward, layout, is_training=is_training)
    if options.output_mode == OutputMode.EveryN.value:
        yield lambda: _check_period(program, layout, options)
    yield lambda: _check_broadcast(program, layout, options)


def _check_broadcast(program: Program, layout: Layout, options: Options) -> None:
    needs_broadcast = program.unsynchronised_weights and layout.input_groups > 1
    if needs_broadcast and options.broadcast_buffers:
        raise createPoptorchError(
            "PopTorch does not support broadcasting buffers. If your model is able to "
            "tolerate buffers becoming out of sync between replicas, you can disable "
            "buffer broadcasting using poptorch.Options.broadcastBuffers(False). "
            f"Changed in place: {', '.join(sorted(program.unsynchronised_weights))}."
        )


def _check_groupings(groupings: Mapping[str, Grouping], options: Options) -> None:
    """Refuse groups of replicas that span processes in part.

    Groups are formed of the replicas of all processes, but the emulator knows only the
    replicas of this one.

    Raises:
        Error: There are several processes, and the groups of a weight or of the inputs
            are neither all replicas nor certainly inside one process.
    """
    count = options.Distributed.numProcesses
    if count == 1:
        return
    grouped = [
        f"replicaGrouping of {name} ({kind.comm_group_type})"
        for name, kind in groupings.items()
        if kind.comm_group_type is not CommGroupType.All
    ]
    is_apart = options.input_cgt != CommGroupType.Consecutive
    if options.input_group_size > 1 and is_apart:
        grouped.append("Options.inputReplicaGrouping that isn't Consecutive")
    if grouped:
        raise createPoptorchError(
            f"Of {count} processes the emulator can't put all replicas into groups: "
            f"{', '.join(grouped)}. Use more replicas in one process "
            "(Options.replicationFactor), or CommGroupType.All for weights."
        )


def check_updatable_buffers(model: torch.nn.Module, options: Options) -> None:
    """Refuse names of buffers that can't be uploaded after compiling.

    Raises:
        Error: The model has no such buffer, or it is compiled in.
    """
    buffers = dict(model.named_buffers())
    for name in Settings.of(options).updatable_buffers:
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


def _check_placement(program: Program, strategy: ExecutionStrategy) -> None:
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
    if is_pipelined(strategy) and len(program.ipus) > 1:
        check_stages(program.graph.graph)


def _check_stages(forward: int, layout: Layout, *, is_training: bool) -> None:
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


def _check_period(program: Program, layout: Layout, options: Options) -> None:
    period = options.output_return_period
    iterations = layout.device_iterations
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


def _check_executable_cache(options: Options, folder: str | None) -> None:
    """Log that nothing is cached if caching is on, and check a shared folder.

    PopTorch saves compiled code, and lets one of several processes compile first. The
    emulator compiles by tracing, which runs the module's Python in each process.

    Raises:
        AssertionError: Several processes share a folder that can't be written to.
    """
    count = options.Distributed.numProcesses
    if folder is None:
        if count > 1 and options.Distributed.processId == 0:  # PopTorch: in each
            logger.warning(
                "Options.enableExecutableCaching isn't set: on a pod each of the %d "
                "processes would compile the model for itself.",
                count,
            )
        return
    logger.info(
        "Executable caching is on, but there are no executables: the emulator "
        "traces every model anew and writes nothing into the cache."
    )
    path = os.path.abspath(folder)
    while not os.path.lexists(path):  # missing folders are made
        path = os.path.dirname(path)
    require(
        count == 1 or (os.path.isdir(path) and os.access(path, os.W_OK)),
        f"The cache of executables, {folder}, can't be written to: several processes "
        "share it, so Options.enableExecutableCaching needs a folder that they can "
        "write to.",
    )
