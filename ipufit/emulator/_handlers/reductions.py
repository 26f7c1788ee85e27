# SPDX-License-Identifier: Apache-2.0
"""Rules of sums, means, largest elements and other reductions."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.emulator._handlers.elementwise import of_whole_numbers
from ipufit.emulator._handlers.rules import Call, rule


@rule("mean-whole", "mean")
def _(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("The mean", "x.float().mean()")


_SPREADS = "std", "std_mean", "var", "var_mean"


@rule("var-correction", *_SPREADS)
def _(call: Call) -> Any:
    return call.kwargs.get("correction") not in (None, 0, 1) and _spread(call)


@rule("var-mean-keepdim", "std_mean", "var_mean")
def _(call: Call) -> Any:
    given = call.arguments("input dim unbiased keepdim")
    return bool(given.get("keepdim")) and _spread(call)


@rule("std-gradient", "std", "std_mean")
def _(call: Call) -> Any:
    return call.trains and _spread(call)


def _spread(call: Call) -> Callable[..., Any]:
    """Return the handler of `std`, `var`, `std_mean` and `var_mean`."""
    dim = call.arguments("input dim").get("dim")

    def spread(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("correction") not in (None, 0, 1):
            kwargs["correction"] = 1
        spread = torch.var(input, *args, **kwargs)
        spread = torch.sqrt(spread) if call.name.startswith("std") else spread
        if not call.name.endswith("_mean"):
            return spread
        is_whole = dim is None or isinstance(dim, bool)
        return spread, input.mean() if is_whole else input.mean(dim)

    return spread
