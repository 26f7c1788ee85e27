# SPDX-License-Identifier: Apache-2.0
"""What to look out for in code that is traced, because an IPU computes otherwise."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

_LOSSES = frozenset(
    {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy",
        "cross_entropy_loss",
        "ctc_loss",
        "hinge_embedding_loss",
        "identity_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
    }
)
"""Functions whose results PopTorch marks as losses."""

_DIVISIONS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("div", "divide", "true_divide", "floor_divide")
    for prefix, suffix in (("", ""), ("", "_"))
) | {
    f"__{letter}{name}__"
    for letter in ("", "i", "r")
    for name in ("div", "truediv", "floordiv")
}


class LossWatch(TorchFunctionMode):
    """Notes whether a built-in loss function is called, and what is marked as a loss.

    PopTorch marks the results of these as losses, whatever they are for. A marker that
    isn't a part of the final loss is an error ("Multiple independent losses").

    Attributes:
        is_alarmed: Whether one was called.
        marked: What `identity_loss` has returned, in order.
        sums: What these functions have added up.

    Example:
        >>> import torch
        >>> with LossWatch() as watch:
        ...     _ = torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2))
        >>> watch.is_alarmed
        True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.is_alarmed = False
        self.marked: list[Tensor] = []
        self.sums: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and note it if it is a loss."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in _LOSSES:
            return result
        self.is_alarmed = True
        is_marker = name == "identity_loss"
        if is_marker:
            self.marked.append(result)
        settings = (*args[1:], *(kwargs or {}).values())
        if any(_is_sum(value, is_marker=is_marker) for value in settings):
            self.sums.append(result)
        return result


class DivisionWatch(TorchFunctionMode):
    """Refuses to divide whole numbers, which an IPU truncates (`AtenHandlers`).

    Args:
        what: Divides, for the message.

    Example:
        >>> import torch
        >>> with DivisionWatch("The metric 'share'"):
        ...     torch.tensor([True, False]).sum() / 2
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The metric 'share' divides whole numbers ...
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._what = what

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it divides whole numbers."""
        given = (*args, *(kwargs or {}).values())
        if getattr(func, "__name__", "") in _DIVISIONS and all(map(_is_whole, given)):
            # No TypeError: Python would take it for a type that can't be divided.
            kinds = " / ".join(_kind_of(value) for value in args[:2])
            raise ConfigError(
                f"{self._what} divides whole numbers ({kinds}), and an IPU cuts the "
                "result off: 3 / 4 is 0 there. Divide numbers with a fraction, such as "
                "(outputs.argmax(-1) == targets).float().mean()."
            )
        return func(*args, **(kwargs or {}))


def divisions_watched(what: str) -> ContextManager[Any]:
    """A `DivisionWatch` while a program is traced; on the host torch divides exactly.

    Args:
        what: Divides, for the message.
    """
    if poptorch.isRunningOnIpu():
        return DivisionWatch(what)
    return contextlib.nullcontext()


def _is_sum(setting: Any, *, is_marker: bool) -> bool:
    """Whether a setting asks for a sum; PopTorch's own marker has numbers for them."""
    if isinstance(setting, str):
        return setting == "sum"
    return is_marker and isinstance(setting, int) and setting == 0


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return not isinstance(value, float)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.dtype).replace("torch.", "")
    return type(value).__name__
