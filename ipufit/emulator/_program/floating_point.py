# SPDX-License-Identifier: Apache-2.0
"""Floating-point exceptions: stop where a result is NaN or infinite.

With `Options.Precision.enableFloatingPointExceptions(True)` a device stops at a
division by zero, an invalid operation, a comparison with NaN, or an overflow. The
emulator checks each operation of the forward pass for results that are not finite
although its arguments are. It checks the backward pass by the gradients of the weights.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node, map_aggregate

from ipufit.emulator._tracing.nodes import function_name
from ipufit.emulator._tracing.operation import tensors_in
from ipufit.emulator.errors import Error, createPoptorchError

_COMPARISONS = frozenset(
    form
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
    for form in (name, f"__{name}__")
)


def check_operations(program: GraphModule) -> None:
    """Insert a check for exceptions after every operation of a program.

    Example:
        >>> import torch
        >>> program = torch.fx.symbolic_trace(lambda x: 1.0 / x)
        >>> check_operations(program)
        >>> program(torch.zeros(1))
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': Floating point exception...
    """
    for node in program.graph.nodes:
        is_uninitialised = function_name(node).startswith(("empty", "new_empty"))
        if node.op in ("call_function", "call_method") and not is_uninitialised:
            node.target, node.op = _checking(node), "call_function"
    program.recompile()


def refuse_bad_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise if a gradient is not finite.

    Raises:
        Error: A gradient is NaN or infinite; the message names its weight.

    Example:
        >>> import torch
        >>> refuse_bad_gradients({"weight": torch.ones(2), "bias": None})
    """
    for name, gradient in gradients.items():
        if gradient is not None and not gradient.isfinite().all():
            raise _exception(f"the gradient of {name} is not finite")


def _checking(node: Node) -> Callable[..., Any]:
    target: Any = node.target
    is_method = node.op == "call_method"
    name = function_name(node)

    def check(*args: Any, **kwargs: Any) -> Any:
        had_nan, had_infinity = _has_nan_and_infinity((args, kwargs))
        call = getattr(args[0], target) if is_method else target
        result = call(*(args[1:] if is_method else args), **kwargs)
        has_nan, has_infinity = _has_nan_and_infinity(result)
        if has_nan and not had_nan:
            raise _exception(f"`{name}` gave NaN (an invalid operation)")
        if has_infinity and not (had_infinity or had_nan):
            raise _exception(
                f"`{name}` gave infinity (an overflow or a division by zero)"
            )
        if name in _COMPARISONS and had_nan:
            raise _exception(f"`{name}` compared a NaN")
        return result

    check.__name__ = check.__qualname__ = f"checked_{name}"
    return check


def _has_nan_and_infinity(value: Any) -> tuple[bool, bool]:
    """Return whether nested values contain NaN, and whether infinities."""
    tensors = [t for t in tensors_in(value) if t.is_floating_point()]
    numbers: list[Any] = []
    map_aggregate(value, lambda v: numbers.append(v) if isinstance(v, float) else v)
    tensors += [torch.tensor(number, dtype=torch.float64) for number in numbers]
    return (
        any(bool(tensor.isnan().any()) for tensor in tensors),
        any(bool(tensor.isinf().any()) for tensor in tensors),
    )


def _exception(what: str) -> Error:
    return createPoptorchError(
        f"Floating point exception: {what}. "
        "Options.Precision.enableFloatingPointExceptions(True) asks to stop here."
    )
