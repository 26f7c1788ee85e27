# SPDX-License-Identifier: Apache-2.0
"""Functions a module may call in `forward` (`poptorch.*`, `poptorch.ops`)."""

from __future__ import annotations

from ipufit.emulator._ops.control_flow import cond, for_loop
from ipufit.emulator._ops.custom_ops import ATTR_PREFIX, attributes_lists, custom_op
from ipufit.emulator._ops.decoder import ctc_beam_search_decoder
from ipufit.emulator._ops.host_calls import CPU
from ipufit.emulator._ops.identity_loss import identity_loss
from ipufit.emulator._ops.markers import (
    NameScope,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
)
from ipufit.emulator._ops.multi_conv import MultiConv
from ipufit.emulator._ops.overlap import set_overlap_for_input, set_overlap_for_output
from ipufit.emulator._ops.points import fps, nearest
from ipufit.emulator._ops.slices import dynamic_slice, dynamic_update
from ipufit.emulator._ops.tensor_log import ipu_print_tensor

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
