# SPDX-License-Identifier: Apache-2.0
"""Compile: trace the module of an executor, and check it against its options."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ipufit.emulator._executor.constraints import (
    check_groupings,
    check_program,
    check_updatable_buffers,
)
from ipufit.emulator._executor.executable import Executable
from ipufit.emulator._executor.executable_cache import check_executable_cache
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._executor.runner_choice import choose_runner
from ipufit.emulator._executor.wrapper_registry import unwrapped
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.replica_groups import one_element_each
from ipufit.emulator._options.popart_keys import validate_popart_options
from ipufit.emulator._program.anchors import (
    add_anchors,
    named_nodes,
    weight_tensor_names,
)
from ipufit.emulator._program.args import CallArguments, check_inputs, micro_batch
from ipufit.emulator._program.floating_point import checked, stops_at_exceptions
from ipufit.emulator._program.program import Program, trace
from ipufit.emulator._tracing.recording import named_weights
from ipufit.emulator._update.optimizer_link import OptimizerLink


def compile_model(
    state: ModelState, arguments: CallArguments, link: OptimizerLink | None
) -> Executable:
    """Trace the module and make an executable, which `state` isn't given yet.

    Raises:
        AssertionError: A batch dimension is not a multiple of `D * G * R`.
        Error: The module or its options ask for something that no device does.
    """
    model, options = state.model, state.options
    check_executable_cache(options)
    check_inputs(arguments.tensors())
    layout = Layout.from_options(options)
    with torch.inference_mode(False):
        example = micro_batch(arguments, layout.input_blocks, layout.describe())
        kept = example.with_tensors(tensor.clone() for tensor in example.tensors())
    with unwrapped(model):
        check_groupings(state.grouped_parameters.by_name(model), options)
        groups = state.grouped_parameters.resolve(model, layout.replicas)
        with one_element_each(model, groups):
            program = trace(
                model,
                example,
                strategy=options._execution_strategy,
                is_training=state.is_training,
                names_modules=options._module_namescope_enabled,
            )
        validate_popart_options(options.toDict())
        target = check_program(program, layout, options, is_training=state.is_training)
        check_updatable_buffers(model, options)
        weights = {
            # Integer weights are compiled in: changes neither arrive nor come back.
            name: weight if weight.is_floating_point() else weight.detach().clone()
            for name, weight in named_weights(model).items()
        }
        if link is not None:
            link.check_groups(weights)
        names = _tensor_names(program, weights, link)
        anchors = add_anchors(program, options, names)
        if stops_at_exceptions(options):
            program = dataclasses.replace(program, graph=checked(program.graph))
        runner = choose_runner(program, layout, options, groups)
    like = arguments.like_meta()
    return Executable(
        program, target, like, kept, weights, groups, names, anchors, runner
    )


def _tensor_names(
    program: Program, host_weights: dict[str, Tensor], link: OptimizerLink | None
) -> list[str]:
    """List the names of all tensors of a program and of its optimiser."""
    trained = [
        name
        for name, weight in host_weights.items()
        if program.has_loss and weight.requires_grad and weight.is_floating_point()
    ]
    names = [*named_nodes(program), *weight_tensor_names(trained)]
    if link is not None:
        names += link.tensor_names(trained, host_weights)
    return names
