# SPDX-License-Identifier: Apache-2.0
"""Floating-point exceptions: stop where a value ceases to be a number.

With `Options.Precision.enableFloatingPointExceptions(True)` a device stops at a
division by zero, an invalid operation, a comparison with NaN, or an overflow. Here
each operation of the forward pass is checked for results that are not finite
although its arguments are; the backward pass is checked at the gradients of the
weights.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, NamedTuple

from torch import Tensor
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node, map_aggregate

from ipufit.emulator._ground.torch_extras import rewritten
from ipufit.emulator._tracing.nodes import function_name
from ipufit.emulator._tracing.operation import tensors_in
from ipufit.emulator.errors import Error, createPoptorchError

_COMPARISONS = frozenset(
    form
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
    for form in (name, f"__{name}__")
)


def checked(graph: GraphModule) -> GraphModule:
    """Copy a recorded program, with a check for exceptions around every operation.

    Example:
        >>> import torch
        >>> program = torch.fx.symbolic_trace(lambda x: 1.0 / x)
        >>> checked(program)(torch.zeros(1))
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': Floating point exception...
    """
    return rewritten(graph, _is_computed, _check)


def _is_computed(node: Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and not _is_uninitialised(function_name(node))


def _check(node: Node) -> None:
    node.target, node.op = _checking(node), "call_function"


def refuse_bad_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise if a gradient is not finite.

    Raises:
        Error: There is one; the message names its weight.

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
        before = _NotFinite.among((args, kwargs))
        call = getattr(args[0], target) if is_method else target
        result = call(*(args[1:] if is_method else args), **kwargs)
        after = _NotFinite.among(result)
        if after.has_nan and not before.has_nan:
            raise _exception(f"`{name}` gave NaN (an invalid operation)")
        if after.has_infinity and not (before.has_infinity or before.has_nan):
            raise _exception(
                f"`{name}` gave infinity (an overflow or a division by zero)"
            )
        if name in _COMPARISONS and before.has_nan:
            raise _exception(f"`{name}` compared a NaN")
        return result

    check.__name__ = check.__qualname__ = f"checked_{name}"
    return check


def _is_uninitialised(name: str) -> bool:
    return name.startswith(("empty", "new_empty"))


class _NotFinite(NamedTuple):
    """The kinds of values that are not finite among tensors and numbers."""

    has_nan: bool
    has_infinity: bool

    @classmethod
    def among(cls, value: Any) -> _NotFinite:
        tensors = [t for t in tensors_in(value) if t.is_floating_point()]
        numbers: list[float] = []
        map_aggregate(value, lambda v: numbers.append(v) if isinstance(v, float) else v)
        return cls(
            any(bool(t.isnan().any()) for t in tensors)
            or any(map(math.isnan, numbers)),
            any(bool(t.isinf().any()) for t in tensors)
            or any(map(math.isinf, numbers)),
        )


def _exception(what: str) -> Error:
    return createPoptorchError(
        f"Floating point exception: {what}. "
        "Options.Precision.enableFloatingPointExceptions(True) asks to stop here."
    )
