# SPDX-License-Identifier: Apache-2.0
"""The result of compiling: the program, and everything it was compiled with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ipufit.emulator._device.runner import Runner
from ipufit.emulator._layout.pod import Target
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._program.program import Program


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
