# SPDX-License-Identifier: Apache-2.0
"""Rules of arithmetic, comparisons and functions of single elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit.emulator._handlers.rules import Call, rule

_DIVISIONS = "div", "divide", "true_divide", "__truediv__", "__itruediv__", "__idiv__"
_FLOOR_DIVISIONS = "floor_divide", "__floordiv__", "__ifloordiv__", "__rfloordiv__"


def of_whole_numbers(what: str, way: str) -> str:
    """Refuse an operation on whole numbers, of which torch makes a fraction."""
    return (
        f"{what} of whole numbers: the device computes it in int32, truncated, or "
        "refuses to, where torch computes in floats. Convert first, for example "
        f"{way}; a share of matches is `(a == b).float().mean()`."
    )


@rule("div-rounding-mode", *_DIVISIONS)
def _(call: Call) -> Any:
    mode = call.kwargs.get("rounding_mode")
    if mode is None:
        return None
    return (
        f"torch.div with rounding_mode={mode!r}: PopTorch ignores the mode "
        f"(`AtenHandlers.gen.cpp`). Write torch.{mode}(x.float() / y)."
    )


@rule("div-whole", *_DIVISIONS)
def _(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("Division", "x.float() / y")


@rule("floor-divide-whole", *_FLOOR_DIVISIONS)
def _(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("`//`", "torch.floor(x.float() / y)")


@rule("trunc-int32", "trunc", "fix")
def _(call: Call) -> Any:
    def trunc(x: Tensor) -> Tensor:
        through_int32 = x.detach().to(torch.int32).to(x.dtype)
        return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)

    return trunc


@rule("frac-int32", "frac")
def _(call: Call) -> Any:
    return lambda x: x - x.detach().to(torch.int32).to(x.dtype)
