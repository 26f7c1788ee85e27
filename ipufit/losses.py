# SPDX-License-Identifier: Apache-2.0
"""From what users call a loss to one function of outputs and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Union

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from .errors import ConfigError, UnknownNameError
from .types import LossFunction

LossLike = Union[str, torch.nn.Module, LossFunction]
"""A name, a loss module of torch, or a function of outputs and targets."""


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def _nll(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(outputs, targets)


def _binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs, targets.to(outputs.dtype).reshape(outputs.shape)
    )


def _mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))


def _mae(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.l1_loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))


def _smooth_l1(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.smooth_l1_loss(outputs, targets.to(outputs.dtype).reshape(outputs.shape))


_NAMED: dict[str, Callable[[Any, Any], Tensor]] = {
    "binary_cross_entropy": _binary_cross_entropy,
    "binary_crossentropy": _binary_cross_entropy,
    "cross_entropy": _cross_entropy,
    "mae": _mae,
    "mean_absolute_error": _mae,
    "mean_squared_error": _mse,
    "mse": _mse,
    "nll": _nll,
    "nll_loss": _nll,
    "smooth_l1": _smooth_l1,
    "sparse_categorical_crossentropy": _cross_entropy,
}


@dataclass(frozen=True)
class Loss:
    """A loss as the engine uses it.

    Attributes:
        name: For messages.
        function: Of outputs and targets; gives a scalar, or one value per sample or
            element, which are averaged.
        is_sum: Whether the function adds over samples instead of averaging, so that
            the gradients of micro-batches must be added too.
    """

    name: str
    function: LossFunction
    is_sum: bool = False

    def value(self, outputs: Any, targets: Any) -> Tensor:
        """The loss of a batch: the mean per sample, or the sum; 0-d.

        Example:
            >>> outputs, targets = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
            >>> resolve_loss("mse").value(outputs, targets)
            tensor(5.)
        """
        loss = self.function(outputs, targets)
        if loss.dim() == 0:
            return loss
        return torch.sum(loss) if self.is_sum else torch.mean(loss)

    def total(self, value: Tensor, rows: int) -> Tensor:
        """What `value` of `rows` samples adds to a sum over samples."""
        return value if self.is_sum else value.mul(rows)


def resolve_loss(loss: LossLike) -> Loss:
    """Find the function behind a name, a module or a function.

    Binary losses and those of errors take targets of the outputs' number of
    elements, in any shape: `[N]` labels fit `[N, 1]` outputs. Names that mean a
    probability loss take logits, as torch's do.

    Args:
        loss: A name, a torch loss module, or `loss(outputs, targets)`.

    Returns:
        The loss.

    Raises:
        UnknownNameError: The name is unknown.
        ConfigError: It can't be called.

    Example:
        >>> resolve_loss(torch.nn.CrossEntropyLoss(reduction="sum")).is_sum
        True
    """
    if isinstance(loss, str):
        if loss not in _NAMED:
            raise UnknownNameError("loss", loss, _NAMED)
        return Loss(loss, _NAMED[loss])
    if not callable(loss):
        raise ConfigError(
            f"loss={loss!r} is neither a name, a torch loss module nor a function "
            "loss(outputs, targets)."
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    return Loss(name, loss, is_sum=getattr(loss, "reduction", None) == "sum")
