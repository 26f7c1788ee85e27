# SPDX-License-Identifier: Apache-2.0
"""What PopTorch refuses when a model is wrapped or compiled."""

from __future__ import annotations

from ._layout import Layout
from ._pod import MAX_IPUS_PER_PROCESS
from ._program import Program
from .enums import OutputMode
from .errors import createPoptorchError
from .options import Options
from .strategies import is_pipelined


def check_inference_options(options: Options) -> None:
    """Inference does not accumulate gradients.

    Raises:
        Error: It would have to.
    """
    if options.Training.gradient_accumulation == 1:
        return
    hint = ""
    if is_pipelined(options._execution_strategy):
        hint = (
            " To fill the pipeline of an inference model, set "
            "poptorch.Options().deviceIterations instead."
        )
    raise createPoptorchError(
        "You must set poptorch.Options().Training.gradientAccumulation to 1 (or leave "
        "it unset) for an inference model: it is "
        f"{options.Training.gradient_accumulation}.{hint}"
    )


def check_program(
    program: Program, layout: Layout, options: Options, *, is_training: bool
) -> None:
    """Hold a traced program against the options that it is compiled with.

    Raises:
        Error: Too many IPUs or stages, an output mode that the program can't
            have, or buffers that replicas would have to broadcast.
    """
    num_ipus = program.num_ipus * layout.replicas
    if num_ipus > MAX_IPUS_PER_PROCESS:
        raise createPoptorchError(
            f"Too many IPUs requested ({num_ipus}). Experiments that need more than "
            f"{MAX_IPUS_PER_PROCESS} IPUs require distributed execution."
        )
    if is_pipelined(options._execution_strategy):
        _check_stages(program.num_forward_stages, layout, is_training=is_training)
    if options.output_mode == OutputMode.EveryN.value:
        _check_period(program, layout, options)
    needs_broadcast = program.unsynchronised_weights and layout.input_groups > 1
    if needs_broadcast and options.broadcast_buffers:
        raise createPoptorchError(
            "PopTorch does not support broadcasting buffers. If your model is able to "
            "tolerate buffers becoming out of sync between replicas, you can disable "
            "buffer broadcasting using poptorch.Options.broadcastBuffers(False). "
            f"Changed in place: {', '.join(sorted(program.unsynchronised_weights))}."
        )


def _check_stages(forward: int, layout: Layout, *, is_training: bool) -> None:
    stages = 2 * forward - 1
    if is_training and layout.gradient_accumulation < stages:
        raise createPoptorchError(
            "poptorch.Options().Training.gradientAccumulation must be greater than or "
            f"equal to the number of pipeline stages ({stages}): {forward} forward and "
            f"{forward - 1} backward. It is {layout.gradient_accumulation}."
        )
    if not is_training and layout.device_iterations < forward:
        raise createPoptorchError(
            "poptorch.Options().deviceIterations must be greater than or equal to the "
            f"number of pipeline stages ({forward}). It is {layout.device_iterations}."
        )


def _check_period(program: Program, layout: Layout, options: Options) -> None:
    period = options.output_return_period
    iterations = layout.device_iterations
    if period > iterations or iterations % period:
        raise createPoptorchError(
            f"The period of OutputMode.EveryN ({period}) must divide the number of "
            f"device iterations ({iterations})."
        )
    if program.num_ipus > 1 and is_pipelined(options._execution_strategy):
        raise createPoptorchError(
            "OutputMode.EveryN is not supported for a model that is pipelined over "
            f"several IPUs ({program.num_ipus})."
        )
