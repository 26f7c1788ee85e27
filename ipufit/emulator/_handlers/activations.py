# SPDX-License-Identifier: Apache-2.0
"""Rules of activations."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from ipufit.emulator._handlers.rules import Call, rule


@rule("gelu-exact", "gelu")
def _(call: Call) -> Any:
    if call.arguments("input").get("approximate", "none") != "none":
        return None
    return lambda input, approximate="none": functional.gelu(input, approximate="tanh")


@rule("prelu-gradient", "prelu", "_prelu_kernel")
def _(call: Call) -> Any:
    if not call.trains:
        return None
    return lambda x, weight: functional.prelu(x.detach(), weight.detach())
