# SPDX-License-Identifier: Apache-2.0
"""Uses of torch's autograd, which no device runs.

PopTorch records `forward` once, and PopART makes the backward pass from that. torch's
own autograd never runs, so its hooks are never called.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ipufit._poptorch import poptorch
from ipufit.errors import UnsupportedError

from .observing import Observer, Operation

_HOOKS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""Methods of tensors that ask autograd for something."""

_LIBRARIES = tuple(
    Path(str(file)).parent
    for file in (torch.__file__, poptorch.__file__, Path(__file__).parents[1])
)

INSTEAD_OF_HOOKS = (
    "a device makes its own backward pass and never calls it, so training would go "
    "on without it. Remove it: GradientMonitor and model.gradients() show gradients, "
    "global_clipnorm clips them, requires_grad_(False) freezes weights, and "
    "`x * a + (x * (1 - a)).detach()` scales what flows back through x."
)
"""End of the messages that refuse a hook."""


class AutogradObserver(Observer):
    """Refuses, or mends, what a trace would pass over.

    Gradients in `forward`, hooks on gradients, autograd functions with a backward pass
    of their own, autocast and inference mode are refused. What is computed without
    gradients is detached, because PopTorch works out from the weights what needs a
    gradient, and doesn't know of `torch.no_grad` (`fixRequiresGradFromDispatch`).

    Args:
        is_training: Whether there will be gradients.

    Example:
        >>> from ipufit.engine.observers.observing import Observing
        >>> weight = torch.ones(1, requires_grad=True)
        >>> with Observing(AutogradObserver(is_training=True)):
        ...     _ = (weight * 2).register_hook(print)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: register_hook() in forward ...
    """

    def __init__(self, *, is_training: bool) -> None:
        self._is_training = is_training
        self._was_inference_mode = torch.is_inference_mode_enabled()

    def before(self, operation: Operation) -> None:
        """Refuse an operation that a device would do otherwise."""
        if self._is_training and operation.name in _HOOKS:
            raise UnsupportedError(
                f"{operation.name}() in forward ({user_line()}): {INSTEAD_OF_HOOKS}"
            )
        if operation.name == torch.autograd.grad.__name__:
            raise UnsupportedError(
                f"torch.autograd.grad() was called ({user_line()}): a device makes "
                "its own backward pass, once, from the loss, so gradients can't be "
                "part of what is computed, as in a gradient penalty. Compute with "
                "outputs and weights alone."
            )
        if _is_autocast():
            raise UnsupportedError(
                f"torch.autocast('cpu') is on in forward ({user_line()}): PopTorch "
                "has no autocast and would compute in the types that the tensors have. "
                "Turn it off (enabled=False), and choose half precision with "
                "IPUConfig(precision='float16') or layer.half()."
            )
        if torch.is_inference_mode_enabled() and not self._was_inference_mode:
            raise UnsupportedError(
                f"torch.inference_mode() is on in forward ({user_line()}): its "
                "tensors can't be traced. Use torch.no_grad(), or nothing: evaluate() "
                "and predict() compute no gradients."
            )
        if self._is_training and any(
            isinstance(tensor.grad_fn, BackwardCFunction) and tensor.numel()
            for tensor in operation.tensors
        ):
            raise UnsupportedError(
                f"forward uses a torch.autograd.Function ({user_line()}): a device "
                "never runs its backward. Compose it of ordinary functions, for "
                "example `x + (f(x) - x).detach()`, or checkpoint with "
                "use_reentrant=False."
            )

    def after(self, operation: Operation, result: Any) -> Any:
        """Detach what was computed without gradients."""
        if not self._is_training or torch.is_grad_enabled():
            return result
        return _detached(result, {id(given) for given in operation.tensors})


def _detached(result: Any, given: set[int]) -> Any:
    """The tensors of a result, but for those that are arguments, without gradients."""
    if isinstance(result, Tensor):
        return result if id(result) in given else result.detach()
    if type(result) in (tuple, list):
        return type(result)(_detached(element, given) for element in result)
    return result


def _is_autocast() -> bool:
    """Whether torch on this host would compute in other types: a device never does."""
    try:
        return torch.is_autocast_enabled("cpu")  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # torch before 2.4
        return torch.is_autocast_cpu_enabled()


def user_line(error: BaseException | None = None) -> str:
    """File, number and text of the line of the user's code that is running.

    Args:
        error: Its origin, if it isn't what is running.
    """
    stack = traceback.extract_stack()
    if error is not None:
        stack = traceback.extract_tb(error.__traceback__)
    for frame in reversed(stack):
        path = Path(frame.filename)
        if not any(library in path.parents for library in _LIBRARIES):
            return f"{path.name}:{frame.lineno}: {frame.line}"
    return "somewhere"
