# SPDX-License-Identifier: Apache-2.0
"""Choose the way in which a program runs: looped, folded, or as machine code."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.gradients import GradientReduction
from ipufit.emulator._device.loop_runner import LoopRunner
from ipufit.emulator._device.runner import Call, Runner, Training
from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._executor.executable_cache import cache_folder
from ipufit.emulator._folding.fold_runner import FoldRunner
from ipufit.emulator._folding.folding import Folding, can_fold
from ipufit.emulator._ground.switches import compiles
from ipufit.emulator._layout.layout import Inputs, Layout, Outputs
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.program import Program
from ipufit.emulator._update.optimizer_link import OptimizerLink
from ipufit.emulator.enums import OutputMode


def choose_runner(
    program: Program,
    tensors: list[Tensor],
    layout: Layout,
    options: Options,
    anchors: Anchors,
    host: dict[str, Tensor],
    groups: Mapping[str, ReplicaGroups],
    link: OptimizerLink | None,
) -> Runner:
    """Choose what runs a program.

    `IPUFIT_EMULATOR_COMPILE=compiled` asks for machine code. Where nothing at all can
    be translated to it that is an error. A single program that can't be runs eagerly,
    and a warning says why: folded if that is allowed and pays, else in a loop.

    Args:
        program: The program of one micro-batch.
        tensors: The inputs of a call.
        layout: The factors of a call.
        options: The executor's options.
        anchors: The tensors of the program that are anchored.
        host: The weights by name.
        groups: The weights that differ between groups of replicas.
        link: The optimiser; None for inference.

    Raises:
        Error: There is nothing to translate with on this machine.
    """
    loop, folded = LoopRunner(), None
    if can_fold(program, layout, options, groups):
        folded = FoldRunner(Folding(program), loop)
    eager = folded or loop
    if not compiles() or not program.runs_anything:
        return eager
    # Imported where it is asked for: most processes do without.
    from ipufit.emulator._machine_code.translation import (
        suits_machine_code,
        translate,
    )

    if not suits_machine_code(program, options, anchors, groups):
        return eager
    with torch.inference_mode(False):
        weights = DeviceWeights(program, host, layout.replicas, {})
        outputs = Outputs(layout, OutputMode(options.output_mode), 1)
        call = Call(program, weights, layout, Inputs(layout, tensors), outputs)
        training = None
        if link is not None:
            training = Training(
                link.made_for(weights.trained, host),
                GradientReduction.from_options(options, layout, link.settings, weights),
            )
        return translate(call, training, folded, eager, cache_folder(options))
