# SPDX-License-Identifier: Apache-2.0
"""Label smoothing: a part of each target is spread over all classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from ipufit.errors import ConfigError, UnsupportedError
from ipufit.types import LossFunction

from .loss import Loss


def check_smoothing(amount: object) -> None:
    """Refuse an invalid amount of label smoothing.

    Raises:
        ConfigError: It is no number from 0 up to 1, without 1.

    Example:
        >>> check_smoothing(0.1)
        >>> check_smoothing(10)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: label_smoothing=10 is not a number from 0 up to ...
    """
    is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not is_number or not 0 <= amount < 1:  # type: ignore[operator]
        raise ConfigError(
            f"label_smoothing={amount!r} is not a number from 0 up to 1 (without 1): "
            "0.1 makes a target of 1 about 0.9."
        )


@dataclass(frozen=True)
class _Smoothed:
    """A loss of smoothed targets, with one value per sample or element.

    A loss of classes is linear in the targets. So its value for smoothed targets is the
    weighted mean of the values for the targets and for equal shares of all classes.

    Attributes:
        each: The loss of the original targets, per sample or element.
        of_all_classes: The loss of equal shares of all classes, given the outputs.
        amount: Part of the targets that all classes share.
        ignore_index: Class index of targets that are ignored; None for none.
    """

    each: LossFunction
    of_all_classes: Callable[[Tensor], Tensor]
    amount: float
    ignore_index: int | None

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        own = self.each(outputs, targets)
        rest = self.of_all_classes(outputs).reshape(own.shape)
        are_indices = targets.numel() == own.numel() and not targets.is_floating_point()
        if self.ignore_index is not None and are_indices:
            is_real = targets.reshape(own.shape).ne(self.ignore_index)
            rest = rest.mul(is_real.to(rest.dtype))
        smoothed: Tensor = own.mul(1 - self.amount) + rest.mul(self.amount)
        return smoothed


@dataclass(frozen=True)
class _Summed:
    """A loss summed over samples and elements."""

    each: LossFunction

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return torch.sum(self.each(outputs, targets))


def smoothed(loss: Loss, amount: float) -> Loss:
    """Return a loss with label smoothing.

    Classes get `(1 - amount) * target + amount / classes`, as in Szegedy et al.,
    "Rethinking the Inception Architecture" (2016), and as torch's and Keras's
    `label_smoothing` have it; a binary target gets `amount / 2`.

    Args:
        loss: A cross-entropy, binary or of classes, or torch's NLLLoss.
        amount: From 0 up to 1.

    Raises:
        ConfigError: The loss smooths its labels itself.
        UnsupportedError: The loss is another one.

    Example:
        >>> from ipufit.losses import resolve_loss
        >>> outputs, targets = torch.tensor([[3.0, 0.0]]), torch.tensor([0])
        >>> plain = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(outputs, targets)
        >>> mine = smoothed(resolve_loss("cross_entropy"), 0.1)
        >>> torch.allclose(mine.terms(outputs, targets, 1).value, plain)
        True
    """
    if not amount:
        return loss
    if getattr(loss.function, "label_smoothing", 0.0):
        raise ConfigError(
            f"label_smoothing={amount!r} was given, but the loss {loss.name!r} "
            "has label smoothing of its own. Give one of them."
        )
    of_all_classes = _of_all_classes(loss)
    is_weighted = getattr(loss.function, "pos_weight", None) is not None
    if of_all_classes is None or loss.each is None or is_weighted:
        is_own = not isinstance(loss.function, torch.nn.Module)
        is_own = is_own and not loss.is_per_output
        raise UnsupportedError(
            f"label_smoothing={amount!r} needs a loss of classes, 'cross_entropy', "
            "'binary_cross_entropy', 'nll' or torch's and Keras's names of these, and "
            f"the loss is {'the function ' if is_own else ''}{loss.name!r}"
            f"{' with pos_weight' if is_weighted else ''}. Smooth the targets in a "
            "loss of your own."
        )
    each = _Smoothed(loss.each, of_all_classes, amount, loss.ignore_index)
    function = _Summed(each) if loss.is_sum else each
    summed = None if loss.summed is None else _Summed(each)
    return replace(loss, function=function, each=each, summed=summed)


def _of_all_classes(loss: Loss) -> Callable[[Tensor], Tensor] | None:
    """Return the loss of equal shares of all classes; None without classes."""
    known = _BY_MODULE.get(type(loss.function))
    key = loss.name.lower().replace("_", "")
    key = key[: -len("loss")] if key.endswith("loss") else key
    is_named = not isinstance(loss.function, torch.nn.Module) and loss.is_per_output
    return _BY_KEY.get(key) if known is None and is_named else known


def _of_logits(outputs: Tensor) -> Tensor:
    values: Tensor = F.log_softmax(outputs, dim=1).mean(dim=1).neg()
    return values


def _of_last_logits(outputs: Tensor) -> Tensor:
    values: Tensor = F.log_softmax(outputs, dim=-1).mean(dim=-1).neg()
    return values


def _of_log_probabilities(outputs: Tensor) -> Tensor:
    values: Tensor = outputs.mean(dim=1).neg()
    return values


def _of_binary_logits(outputs: Tensor) -> Tensor:
    values: Tensor = F.softplus(outputs) - outputs.mul(0.5)
    return values


_BY_MODULE: dict[type, Callable[[Tensor], Tensor]] = {
    torch.nn.BCEWithLogitsLoss: _of_binary_logits,
    torch.nn.CrossEntropyLoss: _of_logits,
    torch.nn.NLLLoss: _of_log_probabilities,
}
_BY_KEY = {
    "bce": _of_binary_logits,
    "bcewithlogits": _of_binary_logits,
    "binarycrossentropy": _of_binary_logits,
    "binarycrossentropywithlogits": _of_binary_logits,
    "categoricalcrossentropy": _of_last_logits,
    "ce": _of_logits,
    "crossentropy": _of_logits,
    "nll": _of_log_probabilities,
    "sparsecategoricalcrossentropy": _of_last_logits,
}
"""Names of the losses of classes, without capitals, underscores and `loss`."""
