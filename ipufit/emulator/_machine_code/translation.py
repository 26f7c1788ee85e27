# SPDX-License-Identifier: Apache-2.0
"""Whether a program is compiled to machine code, and why not.

`IPUFIT_EMULATOR_COMPILE=compiled` asks for it. Where nothing at all can be compiled
that is an error. A single program that can't be runs eagerly, and a warning says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.micro_batch_runs import Device
from ipufit.emulator._device.weights import DeviceWeights, GradientReduction
from ipufit.emulator._executor.executable_cache import cache_folder
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.layout import Inputs, Outputs
from ipufit.emulator._machine_code.machine_functions import HALF, require_compiler
from ipufit.emulator._machine_code.runner import CompiledInference, CompiledTraining
from ipufit.emulator._ops.control_flow import run_branch, run_loop
from ipufit.emulator._ops.custom_ops import run_custom_op
from ipufit.emulator._ops.floating_point import stops_at_exceptions
from ipufit.emulator._ops.host_calls import call_on_host
from ipufit.emulator._ops.tensor_log import print_tensor
from ipufit.emulator._tracing.half import original
from ipufit.emulator._update.loss_scale import AutomaticLossScale
from ipufit.emulator.enums import OutputMode

if TYPE_CHECKING:
    from ipufit.emulator._folding.folding import Folding
    from ipufit.emulator._layout.layout import Layout
    from ipufit.emulator._layout.replica_groups import ReplicaGroups
    from ipufit.emulator._options.options import Options
    from ipufit.emulator._program.anchors import Anchors
    from ipufit.emulator._program.program import Program
    from ipufit.emulator._update.device_optimizer import DeviceOptimizer
    from ipufit.emulator._update.optimizer_link import OptimizerLink

_EAGER_CALLS = {
    run_custom_op: "it runs what stands in for a custom operation",
    call_on_host: "it calls the host (poptorch.CPU)",
    print_tensor: "it prints a tensor (poptorch.ipu_print_tensor)",
    run_branch: "it branches (poptorch.cond)",
    run_loop: "it loops (poptorch.for_loop)",
}


def machine_code(
    program: Program,
    call: list[Tensor],
    layout: Layout,
    options: Options,
    anchors: Anchors,
    host: dict[str, Tensor],
    groups: Mapping[str, ReplicaGroups],
    folding: Folding,
    link: OptimizerLink | None,
) -> CompiledInference | CompiledTraining | None:
    """Compile a program to machine code, if it can be.

    Args:
        program: Of one micro-batch.
        call: The tensors of a call.
        layout: The factors of a call.
        options: Of the executor.
        anchors: What is seen of the program.
        host: The weights by name.
        groups: Of those that differ between groups of replicas.
        folding: Says which micro-batches run in one pass.
        link: To the optimiser, for training.

    Returns:
        What runs it; None if it is to run eagerly.

    Raises:
        Error: There is nothing to compile with.
    """
    if not program.runs_anything:
        return None
    require_compiler()
    reason = _reason_of_options(options, anchors, groups) or _reason(program)
    if reason is None:
        weights = DeviceWeights(program, host, layout.replicas, {})
        inputs = Inputs(layout, call)
        device = Device(program, weights, layout, inputs, folding)
        optimizer = None if link is None else link.made_for(weights.trained, host)
        reason = _reason_of_types(device, optimizer)
    if reason is not None:
        _runs_eagerly(reason)
        return None
    outputs = Outputs(layout, OutputMode(options.output_mode), 1)
    folder = cache_folder(options)
    before = torch.random.get_rng_state()
    try:
        if link is None or optimizer is None:
            return CompiledInference.of(device, outputs, folder)
        reduction = GradientReduction.from_options(
            options, layout, link.settings.loss_scaling, {}, link.settings.accum_type
        )
        return CompiledTraining.of(device, outputs, optimizer, reduction, folder)
    except NotImplementedError as error:
        _runs_eagerly(_first_line(error))
        return None
    except Exception as error:  # noqa: BLE001 - torch raises anything
        _runs_eagerly(f"{type(error).__name__}: {_first_line(error)}")
        return None
    finally:
        torch.random.set_rng_state(before)


def _runs_eagerly(reason: str) -> None:
    logger.warning("The program isn't compiled to machine code: %s.", reason)


def _reason_of_options(
    options: Options, anchors: Anchors, groups: Mapping[str, ReplicaGroups]
) -> str | None:
    if groups:
        return "replicas have weights of their own"
    if anchors.gradients or anchors.updates:
        return "gradients or tensors of the optimizer are anchored"
    if AutomaticLossScale.from_options(options) is not None:
        return "the loss scaling is automatic"
    if options._Popart.options.get("enableStochasticRounding"):
        return "rounding is stochastic"
    if stops_at_exceptions(options):
        return "it is to stop at floating-point exceptions"
    return None


def _reason(program: Program) -> str | None:
    if program.written_inputs:
        return "it writes to its inputs"
    for node in program.graph.graph.nodes:
        reason = _EAGER_CALLS.get(original(node.target))
        if reason is not None:
            return str(reason)
    return None


def _reason_of_types(device: Device, optimizer: DeviceOptimizer | None) -> str | None:
    weights, program = device.weights, device.program
    if program.updated_weights & weights.trained.keys():
        return "it changes a weight that is trained"
    tensors = [*weights.arguments(0), *device.inputs.rows(0)]
    if optimizer is not None:
        tensors += optimizer.tensors().values()
    if any(tensor.dtype == torch.float16 for tensor in tensors):
        return HALF
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else "no message"
