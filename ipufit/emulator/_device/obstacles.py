# SPDX-License-Identifier: Apache-2.0
"""Reasons why a program must run its micro-batches one after the other."""

from __future__ import annotations

from typing import Mapping

from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._ops.control_flow import run_branch, run_loop
from ipufit.emulator._ops.custom_ops import run_custom_op
from ipufit.emulator._ops.host_calls import call_on_host
from ipufit.emulator._ops.printing import print_tensor
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.floating_point import stops_at_exceptions
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import original

_LOOPED_OPERATIONS = {
    run_custom_op: "it runs what stands in for a custom operation",
    call_on_host: "it calls the host (poptorch.CPU)",
    print_tensor: "it prints a tensor (poptorch.ipu_print_tensor)",
    run_branch: "it branches (poptorch.cond)",
    run_loop: "it loops (poptorch.for_loop)",
}
"""Operations that must run as often as a device runs them, in the same order."""


def obstacle(
    program: Program, options: Options, groups: Mapping[str, ReplicaGroups]
) -> str | None:
    """Say why a program can't be folded; None if it can.

    `groups` are the weights that differ between groups of replicas.
    """
    if groups:
        return "replicas have weights of their own"
    if options._Popart.options.get("enableStochasticRounding"):
        return "rounding is stochastic"
    if stops_at_exceptions(options):
        return "it is to stop at floating-point exceptions"
    if program.written_inputs:
        return "it writes to its inputs"
    operations = (original(node.target) for node in program.graph.graph.nodes)
    return next(filter(None, map(_LOOPED_OPERATIONS.get, operations)), None)
