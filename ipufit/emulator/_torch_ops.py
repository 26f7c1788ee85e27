# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.poptorch`: the operators that PopTorch's Python functions are made of.

Some programs call them themselves: `torch.ops.poptorch.push_name_scope("encoder")`.
Each does here what the function of `poptorch` does that PopTorch implements with it
(PopTorch, `python/ops.py`); arguments are those of `RegisterAtenOverloads.cpp`.

They are Python functions, and none of torch's dispatcher, whose library `poptorch` only
one module can define: if a real PopTorch is imported too, `torch.ops.poptorch` has its
operators.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor
from torch._ops import _OpNamespace

from ipufit.emulator import ops
from ipufit.emulator._ops import markers
from ipufit.emulator._ops.custom_ops import attributes_at
from ipufit.emulator._options.strategies import BlockPlacement
from ipufit.emulator._tracing.state import current_trace
from ipufit.emulator.enums import OverlapMode
from ipufit.emulator.errors import Error, createPoptorchError

_NAMES = """
    begin_ipu_block begin_multi_conv call_cpu_op clear_attribute
    ctc_beam_search_decoder custom_operation dynamic_slice dynamic_update end_cpu_op
    end_for_loop end_if_block end_ipu_block end_multi_conv fps identity_loss
    internal_cast ipu_print_tensor nearest nearest_batch_list nop optimizer_group
    pop_name_scope push_name_scope recomputation_checkpoint set_attribute
    set_available_memory set_matmul_serialization set_overlap_for_input
    set_overlap_for_output start_else_block start_for_loop start_if_block
"""
OPERATORS = frozenset(_NAMES.split())
"""Names of the operators, each of which is a function of this module."""

_REDUCTIONS = ("sum", "mean", "none")
_FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
_TYPES = {
    "BOOL": torch.bool,
    "DOUBLE": torch.float32,
    "FLOAT": torch.float32,
    "FLOAT16": torch.float16,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
}
"""ONNX's names of types, and their types on a device (PopTorch, `Utils.cpp`)."""

ctc_beam_search_decoder = ops.ctc_beam_search_decoder
dynamic_slice = ops.dynamic_slice
dynamic_update = ops.dynamic_update
fps = ops.fps
nearest = ops.nearest
nearest_batch_list = ops.nearest
nop = ops.nop
pop_name_scope = markers.pop_name_scope
push_name_scope = markers.push_name_scope
recomputation_checkpoint = ops.recomputationCheckpoint
set_available_memory = ops.set_available_memory


class _Operators(_OpNamespace):
    """Namespace of a real PopTorch's operators, or else of the emulator's."""

    def __getattr__(self, name: str) -> Any:
        """Find an operator by name."""
        try:
            return super().__getattr__(name)  # type: ignore[no-untyped-call,unused-ignore]
        except AttributeError:
            if name in OPERATORS:
                return globals()[name]
            raise


def provide_operators() -> None:
    """Put the operators into `torch.ops.poptorch`, where programs look for them.

    Example:
        >>> provide_operators()
        >>> torch.ops.poptorch.nop(torch.tensor([1.0]))
        tensor([1.])
    """
    operators = _Operators("poptorch")  # type: ignore[no-untyped-call,unused-ignore]
    torch.ops.poptorch = operators  # type: ignore[attr-defined,unused-ignore]


# Blocks and scopes --------------------------------------------------------------


def begin_ipu_block(stage_id: int, phase_id: int, ipu_id: int) -> None:
    """Begin a block that the execution strategy has placed, as `Block.start` does."""
    trace = current_trace()
    if trace is not None:
        name = f"begin_ipu_block({stage_id}, {phase_id}, {ipu_id})"
        trace.recording.begin_block(BlockPlacement(name, stage_id, ipu_id, phase_id))


def end_ipu_block() -> None:
    """End the current block, as leaving a `with Block` does."""
    trace = current_trace()
    if trace is not None:
        trace.recording.end_block()


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Do nothing: entering a `with Attribute` has no effect on a host."""


def clear_attribute(attribute: str, key: str) -> None:
    """Do nothing: leaving a `with Attribute` has no effect on a host."""


# Functions with other arguments -------------------------------------------------


def identity_loss(x: Tensor, reduction: int) -> Tensor:
    """Call `poptorch.identity_loss`; the reduction is 0 (sum), 1 (mean) or 2 (none)."""
    if reduction not in range(len(_REDUCTIONS)):
        raise createPoptorchError(
            f"reduction must be sum (0), mean (1) or none (2). Got {reduction!r}."
        )
    return ops.identity_loss(x, _REDUCTIONS[reduction])


def internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor to the type that ONNX calls `dtype`.

    Outside a trace PopTorch makes float32 of `FLOAT16` and of `FLOAT32`, which isn't a
    type in a trace, and ignores all others (PopTorch, `RegisterAtenOverloads.cpp`).
    """
    if current_trace() is None:
        return tensor.float() if dtype in ("FLOAT16", "FLOAT32") else tensor
    if dtype not in _TYPES:
        raise Error(
            f"No at::scalar_type for {dtype}: internal_cast takes "
            f"{', '.join(sorted(_TYPES))}.",
            type="poptorch_cpp_error",
        )
    cast: Tensor = tensor.to(_TYPES[dtype])
    return cast


def ipu_print_tensor(
    tensor: Tensor,
    title: str,
    print_gradient: int,
    summarize_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: int,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> Tensor:
    """Call `poptorch.ipu_print_tensor`; a format is an index of `_FLOAT_FORMATS`."""
    return ops.ipu_print_tensor(
        tensor,
        title,
        bool(print_gradient),
        summarize_threshold,
        edge_items,
        max_line_width,
        digits,
        _FLOAT_FORMATS[float_format],
        separator,
        open_bracket,
        close_bracket,
    )


def set_matmul_serialization(
    matmul: Tensor, mode: str, factor: int, keep_precision: bool
) -> Tensor:
    """Return a matrix product as it is; `poptorch.serializedMatMul` marks it so."""
    return matmul


def set_overlap_for_input(t: Tensor, mode: str) -> Tensor:
    """Call `poptorch.set_overlap_for_input` with the `OverlapMode` of value `mode`."""
    result: Tensor = ops.set_overlap_for_input(t, OverlapMode(mode))
    return result


def set_overlap_for_output(t: Tensor, mode: str) -> Tensor:
    """Call `poptorch.set_overlap_for_output` with the `OverlapMode` of value `mode`."""
    result: Tensor = ops.set_overlap_for_output(t, OverlapMode(mode))
    return result


def custom_operation(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    num_outputs: int,
    outputs: Sequence[Tensor],
    attributes: str,
) -> list[Tensor]:
    """Call `poptorch.custom_op`; `attributes` holds the address of their dict."""
    found = attributes_at(attributes)
    return ops.custom_op(inputs, name, domain, domain_version, outputs, found)


# Parts of functions, refused in a trace -----------------------------------------


def start_for_loop(inputs: Sequence[Tensor]) -> None:
    """Refuse the first part of `poptorch.for_loop`."""
    _refuse_part("start_for_loop", "poptorch.for_loop")


def end_for_loop(outputs: Any, inputs: Sequence[Tensor], trip_count: int) -> Any:
    """Refuse the last part of `poptorch.for_loop`."""
    _refuse_part("end_for_loop", "poptorch.for_loop")
    return outputs


def start_if_block(condition: Tensor) -> None:
    """Refuse the first part of `poptorch.cond`."""
    _refuse_part("start_if_block", "poptorch.cond")


def start_else_block(outputs_true: Sequence[Tensor]) -> None:
    """Refuse the second part of `poptorch.cond`."""
    _refuse_part("start_else_block", "poptorch.cond")


def end_if_block(outputs: Any, condition: Tensor) -> Any:
    """Refuse the last part of `poptorch.cond`."""
    _refuse_part("end_if_block", "poptorch.cond")
    return outputs


def begin_multi_conv() -> None:
    """Refuse the first part of a `with poptorch.MultiConv`."""
    _refuse_part("begin_multi_conv", "poptorch.MultiConv")


def end_multi_conv(*settings: Any) -> None:
    """Refuse the last part of a `with poptorch.MultiConv`."""
    _refuse_part("end_multi_conv", "poptorch.MultiConv")


def call_cpu_op(inputs: Sequence[Tensor], name: str) -> None:
    """Refuse the first part of a `poptorch.CPU`."""
    _refuse_part("call_cpu_op", "poptorch.CPU")


def end_cpu_op(output: Any) -> Any:
    """Refuse the last part of a `poptorch.CPU`."""
    _refuse_part("end_cpu_op", "poptorch.CPU")
    return output


def optimizer_group(group: int, inputs: Sequence[Tensor]) -> None:
    """Refuse the mark by which PopTorch's executor sets parameter groups."""
    _refuse_part("optimizer_group", "the parameter groups of poptorch.optim")


def _refuse_part(name: str, instead: str) -> None:
    if current_trace() is not None:
        raise createPoptorchError(
            f"torch.ops.poptorch.{name} is only a part of what PopTorch does for "
            f"{instead}, and the emulator does that as a whole. Use {instead}."
        )
