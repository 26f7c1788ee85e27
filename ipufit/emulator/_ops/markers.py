# SPDX-License-Identifier: Apache-2.0
"""Annotations that tell a compiler something and change no value."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.emulator._ground.checks import require
from ipufit.emulator._tracing.trace_state import current_trace, require_tensor
from ipufit.emulator.enums import MatMulSerializationMode


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor, by an operator that no compiler removes.

    Raises:
        Error: `tensor` isn't a tensor.

    Example:
        >>> nop(torch.tensor([1.0]))
        tensor([1.])
    """
    require_tensor(tensor, "nop must take a torch.tensor argument.")
    return _operator(nop, tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep these activations for the backward pass; those between are recomputed.

    Args:
        *tensors: Tensors, or one list or tuple of them.

    Returns:
        A tensor for one, a tuple for several, a list or tuple for a list or tuple.
        As in PopTorch, a container of one tensor becomes one of the tensor's rows.

    Raises:
        ValueError: An argument isn't a tensor.

    Example:
        >>> x, y = torch.tensor([1.0]), torch.tensor([2.0])
        >>> recomputationCheckpoint([x, y])
        [tensor([1.]), tensor([2.])]
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        container = tensors[0]
        return type(container)(recomputationCheckpoint(*container))
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"All inputs must be tensors. Got {type(tensor).__name__}."
            )
    if len(tensors) == 1:
        return _operator(recomputationCheckpoint, tensors[0])
    return tuple(map(recomputationCheckpoint, tensors))


def _operator(function: Callable[..., Any], tensor: Tensor) -> Tensor:
    """Record an operator that returns its argument, but only where that is an error.

    After a block has ended no operator may follow; elsewhere it makes no difference.
    """
    trace = current_trace()
    if trace is None or trace.recording.is_in_block():
        return tensor
    result: Tensor = trace.record(function, tensor)
    return result


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Multiply matrices; the device computes the product in `factor` smaller ones.

    Args:
        lhs: Left operand.
        rhs: Right operand.
        mode: The dimension to cut.
        factor: Number of parts; it must divide that dimension.
        keep_precision: Add the parts of half-precision products in float32.

    Returns:
        `torch.matmul(lhs, rhs)`.

    Raises:
        AssertionError: One of the last three arguments has another type.

    Example:
        >>> mode = MatMulSerializationMode.ReducingDim
        >>> serializedMatMul(torch.ones(2, 4), torch.ones(4, 1), mode, factor=2)
        tensor([[4.],
                [4.]])
    """
    require(isinstance(keep_precision, bool), "keep_precision must be a bool.")
    require(isinstance(factor, int), "factor must be an int.")
    require(
        isinstance(mode, MatMulSerializationMode),
        f"mode must be a poptorch.MatMulSerializationMode. Got {mode!r}.",
    )
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Limit the memory for temporary data of the operation that made `tensor`.

    Args:
        tensor: Result of a convolution, a matrix product or a look-up.
        available_memory_proportion: Between 0 and 1; a device takes 0.6 by default.

    Returns:
        The same tensor.

    Raises:
        Error: `tensor` isn't a tensor.

    Example:
        >>> set_available_memory(torch.tensor([1.0]), 0.3)
        tensor([1.])
    """
    require_tensor(tensor, "You may only set available memory for torch.tensor values.")
    return tensor


class NameScope:
    """Put a name before those of the operators inside.

    `PoplarExecutor.getTensorNames` shows it: `encoder/Relu:0`.

    Args:
        name: The prefix.

    Raises:
        AssertionError: `name` isn't a string.

    Example:
        >>> with NameScope("encoder"):
        ...     torch.tensor([1.0]) + 1
        tensor([2.])
    """

    def __init__(self, name: str) -> None:
        require(isinstance(name, str), "Parameter to NameScope must be a string.")
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, *exception: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Open a name scope in the trace under way, if any."""
    trace = current_trace()
    if trace is not None:
        trace.recording.scopes.push(name)


def pop_name_scope() -> None:
    """Close the innermost name scope of the trace under way, if any."""
    trace = current_trace()
    if trace is not None:
        trace.recording.scopes.pop()


class Attribute:
    """Attach attributes to the operators inside, for a device's compiler.

    Args:
        **attributes: Name of an attribute to its keys and values, all strings.

    Example:
        >>> with Attribute(__outline={"layer": "embedding"}):
        ...     torch.tensor([1.0]) + 1
        tensor([2.])
    """

    def __init__(self, **attributes: dict[str, str]) -> None:
        self.attributes = attributes

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass
