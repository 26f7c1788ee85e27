# SPDX-License-Identifier: Apache-2.0
"""Functions that hide operators: torch, or a handler of PopTorch, composes them.

PopTorch's dispatcher sees the operators inside. Where the parts give other numbers on a
device than torch's whole function, the tracer records the parts: rules hold for them,
and in float16 each is rounded.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import identity_loss
from .graph import Operation


def composition_of(
    operation: Operation, *, is_training: bool
) -> Callable[..., Any] | None:
    """Return a function that calls the parts of an operation.

    Args:
        operation: The operation, of one of `PARTS`.
        is_training: Whether the program is differentiated.

    Returns:
        A function of the operation's arguments; None if the whole is computed as its
        parts are.
    """
    name = operation.name
    parts = PARTS[name]
    given, tensors = operation.arguments, operation.tensors
    if name in ("multi_head_attention_forward", "scaled_dot_product_attention"):
        p = given.get("dropout_p", 0.0) if given.get("training", True) else 0.0
        return parts if p == 1 or (p > 0 and not is_training) else None
    is_half = any(tensor.dtype == torch.float16 for tensor in tensors)
    if name == "soft_margin_loss":
        is_old = any(given.get(n) is not None for n in ("size_average", "reduce"))
        is_half &= operation.function is getattr(F, name) and not is_old
    return parts if is_half else None


def _unchecked(function: Any) -> Callable[..., Any]:
    """Copy a function of torch so that modes see the calls inside, and not itself."""
    checks = (f"has_torch_function{end}" for end in ("", "_unary", "_variadic"))
    names = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    code, defaults = function.__code__, function.__defaults__
    copied = FunctionType(code, names, function.__name__, defaults)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attend without dropout of the weights, which leaves them as they are."""
    attend: Any = F.scaled_dot_product_attention
    result = attend(query, key, value, attn_mask, 0.0, *args, **kwargs)
    return F.dropout(result, dropout_p)  # so that its rules hold


def _distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return torch.norm(x1 - x2 + eps, p, -1, keepdim)


def _similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    def unit(x: Tensor) -> Tensor:
        return x / x.pow(2).sum(dim, True).clamp_min(eps * eps).sqrt()

    x1, x2 = torch.broadcast_tensors(x1, x2)  # type: ignore[no-untyped-call,unused-ignore]
    return (unit(x1) * unit(x2)).sum(dim)


def _soft_margin_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", **old: Any
) -> Tensor:
    power = torch.exp(-target * input)
    loss = torch.where(power.isinf(), power * 0, power.log1p())  # inf * 0 is NaN
    return identity_loss(loss, reduction)


PARTS: dict[str, Callable[..., Any]] = {
    # torch 2.0.1, `functional.py`, `attention.cpp` and `Distance.cpp`
    "multi_head_attention_forward": _unchecked(F.multi_head_attention_forward),
    "scaled_dot_product_attention": _attend,
    "cosine_similarity": _similarity,
    "pairwise_distance": _distance,
    # PopTorch, `AtenHandlers.gen.cpp`
    "soft_margin_loss": _soft_margin_loss,
}
"""Functions that call the parts of others."""
