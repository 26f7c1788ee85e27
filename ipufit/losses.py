# SPDX-License-Identifier: Apache-2.0
"""From what users call a loss to one function of outputs and targets."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Union

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from .errors import ConfigError, UnknownNameError, UnsupportedError
from .types import LossFunction

LossLike = Union[str, torch.nn.Module, LossFunction]
"""A name, a loss module of torch, or a function of outputs and targets."""


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction=reduction)


def _nll(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(outputs, targets, reduction=reduction)


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs, _like(targets, outputs), reduction=reduction
    )


def _mse(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(outputs, _like(targets, outputs), reduction=reduction)


def _mae(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.l1_loss(outputs, _like(targets, outputs), reduction=reduction)


def _smooth_l1(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.smooth_l1_loss(outputs, _like(targets, outputs), reduction=reduction)


def _poisson(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.poisson_nll_loss(outputs, _like(targets, outputs), reduction=reduction)


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    like: Tensor = targets.to(outputs.dtype).reshape(outputs.shape)
    return like


_NAMED: dict[str, Callable[[Any, Any, str], Tensor]] = {
    "binary_cross_entropy": _binary_cross_entropy,
    "binary_crossentropy": _binary_cross_entropy,
    "categorical_crossentropy": _cross_entropy,
    "cross_entropy": _cross_entropy,
    "huber": _smooth_l1,
    "l1": _mae,
    "mae": _mae,
    "mean_absolute_error": _mae,
    "mean_squared_error": _mse,
    "mse": _mse,
    "nll": _nll,
    "nll_loss": _nll,
    "poisson": _poisson,
    "smooth_l1": _smooth_l1,
    "sparse_categorical_crossentropy": _cross_entropy,
}


class LossTerms(NamedTuple):
    """What a micro-batch adds.

    Attributes:
        value: To be minimised, 0-d.
        total: The loss added up over the samples, 0-d; what figures are made of.
    """

    value: Tensor
    total: Tensor


@dataclass(frozen=True)
class Loss:
    """A loss as the engine uses it.

    Attributes:
        name: For messages.
        function: Of outputs and targets; gives a scalar, or one value per sample or
            element, which are averaged.
        is_sum: Whether the function adds over samples instead of averaging, so that
            the gradients of micro-batches must be added too.
        each: The same with one value per sample or element; None if `function` must
            do.
        is_per_output: Whether it is about one output: with several it is taken for
            each. A function of the user's gets all outputs and targets as they nest.
    """

    name: str
    function: LossFunction
    is_sum: bool = False
    each: LossFunction | None = None
    is_per_output: bool = False

    def terms(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        weights: Tensor | None = None,
        share: Tensor | None = None,
    ) -> LossTerms:
        """The loss of a micro-batch.

        With weights it is Keras's: weighted values, divided by the number of samples
        and not by the weights' sum.

        Args:
            outputs: The model's.
            targets: Theirs.
            rows: Samples in it.
            weights: Of samples, `[rows]`, or of positions, `[rows, ...]`.
            share: What each row counts in the mean of its update, `[rows]`; 0 for
                padding.

        Returns:
            What to minimise, and the sum over real samples.

        Raises:
            UnsupportedError: There are weights or shares, but no values per sample.

        Example:
            >>> outputs, targets = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
            >>> resolve_loss("mse").terms(outputs, targets, 2)
            LossTerms(value=tensor(5.), total=tensor(10.))
        """
        if weights is None and share is None:
            loss = self._checked(self.function(outputs, targets))
            if loss.dim():
                loss = torch.sum(loss) if self.is_sum else torch.mean(loss)
            total = loss.detach()
            return LossTerms(loss, total if self.is_sum else total.mul(rows))
        values = self._rows(outputs, targets, rows, weights)
        if share is None:
            total = torch.sum(values)
            value = total if self.is_sum else torch.mean(values)
            return LossTerms(value, total.detach())
        total = torch.sum(values.mul(share.gt(0).to(values.dtype)))
        value = total if self.is_sum else torch.mean(values.mul(share))
        return LossTerms(value, total.detach())

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"The loss {self.name!r} gives {loss!r}, which is no tensor: compute "
                "it from outputs and targets with torch's operations."
            )
        return loss

    def _rows(
        self, outputs: Any, targets: Any, rows: int, weights: Tensor | None
    ) -> Tensor:
        """One weighted value per sample, `[rows]`."""
        values = self._checked((self.each or self.function)(outputs, targets))
        if values.dim() == 0 or len(values) != rows:
            raise UnsupportedError(
                f"The loss {self.name!r} gives a value of shape {tuple(values.shape)} "
                f"for {rows} samples, so they can't be weighted (sample_weight, "
                "class_weight, drop_last='pad'). Let it return one value per sample."
            )
        if weights is not None:
            missing = values.dim() - weights.dim()
            if missing < 0 or values.shape[: weights.dim()] != weights.shape:
                raise ConfigError(
                    f"Sample weights of shape {tuple(weights.shape)} don't fit the "
                    f"loss {self.name!r}, whose values have shape "
                    f"{tuple(values.shape)}: give one weight per sample."
                )
            shaped = weights.reshape(weights.shape + (1,) * missing)
            values = values.mul(shaped.to(values.dtype))
        flat = values.reshape(rows, -1)
        each: Tensor = flat.sum(dim=1) if self.is_sum else flat.mean(dim=1)
        return each


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
        return Loss(loss, _reduced(loss, "mean"), False, _reduced(loss, "none"), True)
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(
            f"loss={loss!r} is neither a name, a torch loss module nor a function "
            "loss(outputs, targets)."
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    is_sum = getattr(loss, "reduction", None) == "sum"
    return Loss(name, loss, is_sum, _unreduced(loss), _is_torchs(loss))


def _reduced(name: str, reduction: str) -> LossFunction:
    function = _NAMED[name]
    return lambda outputs, targets: function(outputs, targets, reduction)


def _is_torchs(loss: Any) -> bool:
    return isinstance(loss, torch.nn.Module) and type(loss).__module__.startswith(
        "torch.nn."
    )


def _unreduced(loss: Any) -> LossFunction | None:
    """The same loss module with a value per sample; CTC has none on an IPU."""
    if not _is_torchs(loss) or isinstance(loss, torch.nn.CTCLoss):
        return None
    if not hasattr(loss, "reduction"):
        return None
    each: LossFunction = copy.copy(loss)
    each.reduction = "none"  # type: ignore[attr-defined]
    if loss.reduction == "batchmean":  # a sum over all but the samples
        return lambda outputs, targets: each(outputs, targets).flatten(1).sum(dim=1)
    return each
