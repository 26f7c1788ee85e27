# SPDX-License-Identifier: Apache-2.0
"""Compile: trace the module of an executor, and check it against its options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._device.runner import Runner
from ipufit.emulator._executor.constraints import (
    check_executable_cache,
    check_groupings,
    check_program,
    check_updatable_buffers,
)
from ipufit.emulator._executor.wrapping import unwrapped
from ipufit.emulator._folding.fold_runner import choose_runner
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.pod import Target
from ipufit.emulator._layout.replica_groups import (
    GroupedParameters,
    ReplicaGroups,
    one_element_each,
)
from ipufit.emulator._optimizers.optimizer_sync import OptimizerSync
from ipufit.emulator._options.options import Options
from ipufit.emulator._options.popart_keys import validate_popart_options
from ipufit.emulator._program.anchors import (
    Anchors,
    add_anchors,
    named_nodes,
    weight_tensor_names,
)
from ipufit.emulator._program.args import CallArguments, check_inputs, micro_batch
from ipufit.emulator._program.floating_point import checked, stops_at_exceptions
from ipufit.emulator._program.program import Program, trace
from ipufit.emulator._tracing.recording import named_weights


@dataclass(frozen=True)
class Executable:
    """A compiled model: its program, and everything it was compiled with.

    Attributes:
        target: The kind and number of IPUs that the program needs.
        arguments: The arguments of a call, as tensors with shapes but no data.
        first_micro_batch: The arguments of the first micro-batch it was compiled with.
        host_weights: The module's parameters and buffers by name. Integers are
            copies: they are constants of the program.
        replica_groups: For each parameter that differs between replicas its groups.
        tensor_names: Names that `Options.anchorTensor` accepts.
        runner: Runs the program: looped or folded.
    """

    program: Program
    target: Target
    arguments: CallArguments
    first_micro_batch: CallArguments
    host_weights: dict[str, Tensor]
    replica_groups: dict[str, ReplicaGroups]
    tensor_names: list[str]
    anchors: Anchors
    runner: Runner

    def given_arguments(self) -> tuple[Any, Any]:
        """Give the first micro-batch in the types in which the caller gave it."""
        rows = self.first_micro_batch
        pairs = zip(rows.tensors(), self.arguments.tensors())
        given = rows.with_tensors(row.to(like.dtype) for row, like in pairs)
        return given.args, given.kwargs

    def facts(self, options: Options) -> dict[str, object]:
        """List what must be the same in all processes that train the model."""
        training = options.Training
        weights = [
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in self.host_weights.items()
        ]
        reduction = (
            training.accumulation_and_replication_reduction_type,
            training.meanAccumulationAndReplicationReductionStrategy,
        )
        return {
            "the number of device iterations": options.device_iterations,
            "the gradient accumulation": training.gradient_accumulation,
            "the number of replicas": options.replication_factor,
            "the reduction of gradients": reduction,
            "the weights": weights,
        }


def compile_model(
    model: torch.nn.Module,
    options: Options,
    arguments: CallArguments,
    groupings: GroupedParameters,
    optimizer: OptimizerSync | None,
) -> Executable:
    """Trace a module for arguments like these, and check what the trace shows.

    Args:
        groupings: Parameters that differ between groups of replicas.
        optimizer: None for inference.

    Raises:
        AssertionError: A batch dimension is not a multiple of `D * G * R`.
        Error: The module or its options ask for something that no device does.
    """
    is_training = optimizer is not None
    check_executable_cache(options)
    check_inputs(arguments.tensors())
    layout = Layout.from_options(options)
    with torch.inference_mode(False):
        example = micro_batch(arguments, layout.input_blocks, layout.describe())
        kept = example.with_tensors(tensor.clone() for tensor in example.tensors())
    with unwrapped(model):
        check_groupings(groupings.by_name(model), options)
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
        target = check_program(program, layout, options, is_training=is_training)
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
        if stops_at_exceptions(options):
            program = dataclasses.replace(program, graph=checked(program.graph))
        runner = choose_runner(program, layout, options, groups)
    like = arguments.like_meta()
    return Executable(
        program, target, like, kept, weights, groups, names, anchors, runner
    )
