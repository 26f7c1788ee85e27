# SPDX-License-Identifier: Apache-2.0
"""The operations that the rules of optimisers are written with.

A rule (`rule.py`) computes with lists of tensors and Python numbers, for all weights of
a group at once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

Values = Any
"""A list of tensors: of weights, gradients or states."""

Number = Any
"""A float."""


@dataclass(frozen=True)
class Operations:
    """Arithmetic in float32.

    Those not described here are torch's, with its arguments; those whose name ends in
    `_` work in place.

    Attributes:
        may_differ: `(number, other)`: whether a number isn't known to be `other`. If it
            is known, a step that has no effect can be left out.
        choose: `(flag, then, otherwise)`: the values that calling `then` gives if the
            number `flag` isn't zero, else the values `otherwise`.
        norms: The Euclidean norm of each tensor, in one tensor.
        scale_each_: `(values, factors, factor)`: multiply each tensor by one of
            `factors`, which are in one tensor, and by `factor`.
    """

    add: Callable[..., Values]
    add_: Callable[..., object]
    mul: Callable[..., Values]
    mul_: Callable[..., object]
    div: Callable[..., Values]
    div_: Callable[..., object]
    sqrt: Callable[..., Values]
    sqrt_: Callable[..., object]
    addcmul: Callable[..., Values]
    addcmul_: Callable[..., object]
    addcdiv_: Callable[..., object]
    may_differ: Callable[[Number, float], bool]
    choose: Callable[[Number, Callable[[], Values], Values], Values]
    norms: Callable[[Values], Tensor]
    scale_each_: Callable[[Values, Tensor, Number], object]


FOREACH = Operations(
    add=torch._foreach_add,
    add_=torch._foreach_add_,
    mul=torch._foreach_mul,
    mul_=torch._foreach_mul_,
    div=torch._foreach_div,
    div_=torch._foreach_div_,
    sqrt=torch._foreach_sqrt,
    sqrt_=torch._foreach_sqrt_,
    addcmul=torch._foreach_addcmul,
    addcmul_=torch._foreach_addcmul_,
    addcdiv_=torch._foreach_addcdiv_,
    may_differ=operator.ne,
    choose=lambda flag, then, otherwise: then() if flag else otherwise,
    norms=lambda values: torch.stack(list(torch._foreach_norm(values))),
    scale_each_=lambda values, factors, factor: torch._foreach_mul_(
        values, [factor * each for each in factors.tolist()]
    ),
)
"""Of lists of tensors, with numbers that Python knows."""


def clip(groups: list[list[Tensor]], largest: float) -> list[list[Tensor]]:
    """Scale all tensors by `c / max(c, norm)`, `c` the largest norm allowed.

    What is given may be a stored velocity, which isn't clipped: it is left alone.

    Example:
        >>> clip([[torch.tensor([3.0])], [torch.tensor([4.0])]], 1.0)
        [[tensor([0.6000])], [tensor([0.8000])]]
    """
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    norm = float(torch.stack(norms).norm())
    if norm <= largest:
        return groups
    return [list(torch._foreach_mul(group, largest / norm)) for group in groups]
