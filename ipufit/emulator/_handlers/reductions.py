# SPDX-License-Identifier: Apache-2.0
"""Rules of sums, means, largest elements and other reductions."""

from __future__ import annotations

from typing import Any

import torch

from ipufit.emulator._handlers.elementwise import of_whole_numbers
from ipufit.emulator._handlers.rules import Call, rule


@rule("mean-whole", "mean")
def _(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("The mean", "x.float().mean()")


@rule("var-correction", "std", "std_mean", "var", "var_mean")
def _(call: Call) -> Any:
    correction = call.kwargs.get("correction")
    if correction in (None, 0, 1):
        return None
    function = getattr(torch, call.name)
    return lambda *args, **kwargs: function(*args, **{**kwargs, "correction": 1})
