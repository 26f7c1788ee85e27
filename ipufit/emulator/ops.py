# SPDX-License-Identifier: Apache-2.0
"""Functions a module may call in `forward` (`poptorch.*`, `poptorch.ops`)."""

from __future__ import annotations

from ipufit.emulator._ops.control_flow import CPU, cond, for_loop
from ipufit.emulator._ops.custom_ops import ATTR_PREFIX, attributes_lists, custom_op
from ipufit.emulator._ops.markers import (
    MultiConv,
    NameScope,
    identity_loss,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipufit.emulator._ops.printing import ipu_print_tensor
from ipufit.emulator._ops.searches import ctc_beam_search_decoder, fps, nearest
from ipufit.emulator._tracing.slices import dynamic_slice, dynamic_update

__all__ = [
    "ATTR_PREFIX",
    "CPU",
    "MultiConv",
    "NameScope",
    "attributes_lists",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
