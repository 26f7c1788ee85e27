# SPDX-License-Identifier: Apache-2.0
"""Choose the way in which a program runs: looped or folded."""

from __future__ import annotations

from typing import Mapping

from ipufit.emulator._device.loop_runner import LoopRunner
from ipufit.emulator._device.runner import Runner
from ipufit.emulator._folding.fold_runner import FoldRunner
from ipufit.emulator._folding.folding import Folding, can_fold
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.program import Program


def choose_runner(
    program: Program,
    layout: Layout,
    options: Options,
    groups: Mapping[str, ReplicaGroups],
) -> Runner:
    """Choose what runs a program: folds where they are allowed and pay, else a loop.

    `groups` are the weights that differ between groups of replicas.
    """
    loop = LoopRunner()
    if can_fold(program, layout, options, groups):
        return FoldRunner(Folding(program), loop)
    return loop
