# SPDX-License-Identifier: Apache-2.0
"""Find losses by name, and convert torch's modules and functions to losses."""

from __future__ import annotations

import copy
from typing import Any, Union

import torch

from ipufit.errors import ConfigError, UnsupportedError
from ipufit.metrics.base import outputs_first
from ipufit.types import LossFunction

from .loss import Loss
from .named import CTC_FUNCTION, named_loss

LossLike = Union[str, torch.nn.Module, LossFunction]
"""A name, a loss module of torch, or a function of outputs and targets."""


def resolve_loss(loss: LossLike) -> Loss:
    """Return the loss for a name, a module or a function.

    Binary losses and those of errors take targets of the outputs' shape, except for
    axes of size 1: `[N]` labels fit `[N, 1]` outputs. All losses take logits, as
    torch's do, even if the name means probabilities in Keras. The class axis is the
    second, as in torch. For Keras's `..._crossentropy` it is the last; class indices
    may have one of size 1. Capitals, underscores and a final `loss` don't matter, so
    the names of torch's classes work. A name that means another loss in torch or Keras
    is refused.

    Args:
        loss: A name, a torch loss module, or `loss(outputs, targets)`; or a function
            whose parameters are named in Keras's order, `loss(y_true, y_pred)`.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: `loss` can't be called, or its name means another loss in torch or
            Keras.

    Example:
        >>> resolve_loss(torch.nn.CrossEntropyLoss(reduction="sum")).is_sum
        True
    """
    if isinstance(loss, str):
        return named_loss(loss)
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(
            f"loss={loss!r} is neither a name, a torch loss module nor a function "
            "loss(outputs, targets)."
        )
    _refuse_unsupported(loss)
    is_torchs = _is_torchs(loss)
    ignore_index = getattr(loss, "ignore_index", None) if is_torchs else None
    return Loss(
        name=getattr(loss, "__name__", type(loss).__name__),
        function=outputs_first(loss),
        is_sum=getattr(loss, "reduction", None) == "sum",
        each=_unreduced(loss),
        is_per_output=is_torchs,
        ignore_index=ignore_index,
        summed=None if ignore_index is None else _with_reduction(loss, "sum"),
    )


def _refuse_unsupported(loss: Any) -> None:
    if isinstance(loss, torch.nn.CTCLoss):
        raise UnsupportedError(
            "torch.nn.CTCLoss takes four arguments, and with outputs [T, N, C]. Pass "
            f"{CTC_FUNCTION}."
        )
    if _is_torchs(loss) and getattr(loss, "weight", None) is not None:
        raise UnsupportedError(
            f"{type(loss).__name__}(weight=...) can't run on an IPU: PopTorch has no "
            "class weights in losses. Leave it out and use fit(class_weight=...)."
        )
    is_module = isinstance(loss, torch.nn.Module)
    forward = loss.forward if is_module else None
    if forward is not None and outputs_first(forward) is not forward:
        raise ConfigError(
            f"{type(loss).__name__}.forward takes the targets first, as the names of "
            "its parameters say. A loss module is called with outputs and targets, as "
            "torch's are: let forward take them in this order."
        )
    parameters = loss.named_parameters() if is_module else ()
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    if trained:
        raise ConfigError(
            f"The loss {type(loss).__name__} has parameters that would be trained "
            f"with the optimizer's defaults: {', '.join(trained)}. Freeze them with "
            "requires_grad_(False), or make the loss a part of the module, which then "
            "returns it."
        )


def _is_torchs(loss: Any) -> bool:
    return isinstance(loss, torch.nn.Module) and type(loss).__module__.startswith(
        "torch.nn."
    )


def _unreduced(loss: Any) -> LossFunction | None:
    """Return a copy of a loss module without reduction; None for CTC."""
    if not _is_torchs(loss) or isinstance(loss, torch.nn.CTCLoss):
        return None
    if not hasattr(loss, "reduction"):
        return None
    each = _with_reduction(loss, "none")
    if loss.reduction == "batchmean":  # a sum over all but the samples
        return lambda outputs, targets: each(outputs, targets).flatten(1).sum(dim=1)
    return each


def _with_reduction(loss: Any, reduction: str) -> LossFunction:
    twin: Any = copy.copy(loss)
    twin.reduction = reduction
    function: LossFunction = twin
    return function
