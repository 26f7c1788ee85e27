# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.poptorch`: the operators behind PopTorch's Python functions.

Some programs call them directly: `torch.ops.poptorch.push_name_scope("encoder")`. Each
calls the emulator's function that PopTorch implements with it (PopTorch,
`python/ops.py`); arguments are those of `RegisterAtenOverloads.cpp`.

They are Python functions and not operators of torch's dispatcher, where only one module
can define the library `poptorch`. If a real PopTorch is imported too,
`torch.ops.poptorch` has its operators.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch._ops import _OpNamespace

from . import ops
from ._printing import FLOAT_FORMATS
from .core.recording import current_trace
from .enums import OverlapMode
from .errors import Error, createPoptorchError
from .options import BlockPlacement

_REDUCTIONS = ("sum", "mean", "none")
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


# Blocks and scopes --------------------------------------------------------------


def push_name_scope(name: str) -> None:
    """Open a name scope, as `with NameScope` does."""
    ops.NameScope(name).__enter__()


def pop_name_scope() -> None:
    """Close the innermost name scope."""
    ops.NameScope("").__exit__()


def begin_ipu_block(stage_id: int, phase_id: int, ipu_id: int) -> None:
    """Begin a block that the execution strategy has placed, as `Block.start` does."""
    trace = current_trace()
    if trace is not None:
        name = f"begin_ipu_block({stage_id}, {phase_id}, {ipu_id})"
        trace.begin_block(BlockPlacement(name, stage_id, ipu_id, phase_id))


def end_ipu_block() -> None:
    """End the current block, as leaving a `with Block` does."""
    ops.Block().__exit__()


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Do nothing: a `with Attribute` has no effect on a host."""


def clear_attribute(attribute: str, key: str) -> None:
    """Do nothing: a `with Attribute` has no effect on a host."""


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

    Outside a trace PopTorch returns float32 for `FLOAT16` and `FLOAT32`, and ignores
    other types. In a trace it has no `FLOAT32` (PopTorch, `RegisterAtenOverloads.cpp`).
    """
    if current_trace() is None:
        return tensor.float() if dtype in ("FLOAT16", "FLOAT32") else tensor
    if dtype not in _TYPES:
        raise Error(
            f"No at::scalar_type for {dtype}: internal_cast takes "
            f"{', '.join(sorted(_TYPES))}.",
            type="poptorch_cpp_error",
        )
    return tensor.to(_TYPES[dtype])


def ipu_print_tensor(tensor: Tensor, *args: Any) -> Any:
    """Call `poptorch.ipu_print_tensor`; a format is an index of `FLOAT_FORMATS`."""
    title, print_gradient, *sizes, float_format, separator, opening, closing = args
    texts = FLOAT_FORMATS[float_format], separator, opening, closing
    printer: Any = ops.ipu_print_tensor
    return printer(tensor, title, bool(print_gradient), *sizes, *texts)


def set_matmul_serialization(
    matmul: Tensor, mode: str, factor: int, keep_precision: bool
) -> Tensor:
    """Return a matrix product unchanged, where `poptorch.serializedMatMul` marks it."""
    return matmul


def set_overlap_for_input(t: Tensor, mode: str) -> Any:
    """Call `poptorch.set_overlap_for_input` with the `OverlapMode` of value `mode`."""
    return ops.set_overlap_for_input(t, OverlapMode(mode))


def set_overlap_for_output(t: Tensor, mode: str) -> Any:
    """Call `poptorch.set_overlap_for_output` with the `OverlapMode` of value `mode`."""
    return ops.set_overlap_for_output(t, OverlapMode(mode))


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
    named = ops.accessAttributes(attributes)
    return ops.custom_op(inputs, name, domain, domain_version, outputs, named)


# All operators ------------------------------------------------------------------

_WHOLE = {
    **dict.fromkeys(("start_for_loop", "end_for_loop"), "poptorch.for_loop"),
    **dict.fromkeys(
        ("start_if_block", "start_else_block", "end_if_block"), "poptorch.cond"
    ),
    **dict.fromkeys(("begin_multi_conv", "end_multi_conv"), "poptorch.MultiConv"),
    **dict.fromkeys(("call_cpu_op", "end_cpu_op"), "poptorch.CPU"),
    "optimizer_group": "the parameter groups of poptorch.optim",
}
"""Parts of functions, refused in a trace -> the functions."""


def _part(name: str) -> Callable[..., Any]:
    def part(*args: Any) -> Any:
        if current_trace() is not None:
            raise createPoptorchError(
                f"torch.ops.poptorch.{name} is only a part of what PopTorch does for "
                f"{_WHOLE[name]}, and the emulator does that as a whole. Use "
                f"{_WHOLE[name]}."
            )
        returns_outputs = name in ("end_for_loop", "end_if_block", "end_cpu_op")
        return args[0] if returns_outputs else None

    return part


_SAME_AS_IN_OPS = """
    ctc_beam_search_decoder dynamic_slice dynamic_update fps nearest nop
    set_available_memory
""".split()  # noqa: SIM905 - one per line would be longer
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: _part(name) for name in _WHOLE},
    **{name: getattr(ops, name) for name in _SAME_AS_IN_OPS},
    "begin_ipu_block": begin_ipu_block,
    "clear_attribute": clear_attribute,
    "custom_operation": custom_operation,
    "end_ipu_block": end_ipu_block,
    "identity_loss": identity_loss,
    "internal_cast": internal_cast,
    "ipu_print_tensor": ipu_print_tensor,
    "nearest_batch_list": ops.nearest,
    "pop_name_scope": pop_name_scope,
    "push_name_scope": push_name_scope,
    "recomputation_checkpoint": ops.recomputationCheckpoint,
    "set_attribute": set_attribute,
    "set_matmul_serialization": set_matmul_serialization,
    "set_overlap_for_input": set_overlap_for_input,
    "set_overlap_for_output": set_overlap_for_output,
}


class _Operators(_OpNamespace):
    """Namespace of a real PopTorch's operators, or else of the emulator's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[no-untyped-call,unused-ignore]
        except AttributeError:
            if name in _OPERATORS:
                return _OPERATORS[name]
            raise


def provide_operators() -> None:
    """Put the operators into `torch.ops.poptorch`, unless PopTorch has its own there.

    Example:
        >>> provide_operators()
        >>> torch.ops.poptorch.nop(torch.tensor([1.0]))
        tensor([1.])
    """
    namespace = torch.ops.poptorch  # type: ignore[attr-defined,unused-ignore]
    if hasattr(namespace, "identity_loss"):  # those of a real PopTorch
        return
    operators = _Operators("poptorch")  # type: ignore[no-untyped-call,unused-ignore]
    torch.ops.poptorch = operators  # type: ignore[attr-defined,unused-ignore]
