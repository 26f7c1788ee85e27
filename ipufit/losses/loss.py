# SPDX-License-Identifier: Apache-2.0
"""A loss as the engine uses it, computed for each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ipufit._tree import tree_map
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.metrics.base import weighed
from ipufit.types import LossFunction


class LossTerms(NamedTuple):
    """The loss of a micro-batch, in 0-d tensors.

    Attributes:
        value: The value to minimise.
        total: The loss summed over the samples.
        divisor: The divisor of the mean: the number of samples without padding, or of
            targets that aren't ignored.
    """

    value: Tensor
    total: Tensor
    divisor: Tensor


@dataclass(frozen=True)
class Loss:
    """A loss as the engine uses it.

    Attributes:
        name: Name for messages.
        function: Function of outputs and targets. Returns a scalar, or values per
            sample or element, which are averaged.
        is_sum: Whether the function sums over samples instead of averaging, so that the
            gradients of micro-batches must be summed too.
        each: The same loss with one value per sample or element; None to use
            `function`.
        is_per_output: Whether a model of several outputs has one such loss for each. A
            user's function gets the nested outputs and targets.
        ignore_index: Class index of targets that are ignored; None for none.
        summed: The same loss as a sum, for a loss that ignores targets.
        takes_logits: Whether the loss takes logits, though its name means probabilities
            in Keras.
        is_binary: Whether each output is a problem of its own, with a target of 0 or 1.
    """

    name: str
    function: LossFunction
    is_sum: bool = False
    each: LossFunction | None = None
    is_per_output: bool = False
    ignore_index: int | None = None
    summed: LossFunction | None = None
    takes_logits: bool = False
    is_binary: bool = False

    def terms(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        weights: Tensor | None = None,
        share: Tensor | None = None,
    ) -> LossTerms:
        """Compute the loss of a micro-batch.

        With weights it is Keras's: weighted values, divided by the number of samples
        and not by the sum of weights.

        Args:
            outputs: Outputs of the model, one row per sample.
            targets: Targets, one row per sample.
            rows: Number of samples.
            weights: Weights of samples, `[rows]`, or of positions, `[rows, ...]`.
            share: Weight of each row in the mean of its update, `[rows]`; 0 for
                padding.

        Raises:
            UnsupportedError: There are weights or shares, but no values per sample.

        Example:
            >>> outputs, targets = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
            >>> loss = Loss("mse", torch.nn.functional.mse_loss)
            >>> loss.terms(outputs, targets, 2)
            LossTerms(value=tensor(5.), total=tensor(10.), divisor=tensor(2.))
        """
        is_plain = weights is None and share is None
        if self._ignores(outputs, targets):
            if is_plain and self.summed is not None:
                return self._counted(self.summed(outputs, targets), targets)
        elif is_plain:
            loss = self._checked(self.function(outputs, targets))
            if loss.dim():
                loss = torch.sum(loss) if self.is_sum else torch.mean(loss)
            else:  # PopTorch gives a loss inside the final one the shape [1]
                loss = loss.reshape(())
            total = loss.detach()
            total = total if self.is_sum else total.mul(rows)
            count = torch.full_like(total, float(rows), device=total.device)
            return LossTerms(loss, total, count)
        values = self._values(outputs, targets, rows, weights).reshape(rows, -1)
        counts = torch.ones_like(values[:, 0])
        whole: Tensor | float
        if self._ignores(outputs, targets):
            valid = targets.ne(self.ignore_index).reshape(rows, -1).to(values.dtype)
            counts = valid.sum(dim=1)
            each, whole = values.sum(dim=1), counts.sum().clamp(min=1)
        elif self.is_sum:
            each, whole = values.sum(dim=1), 1.0
        else:
            each, whole = values.mean(dim=1), float(rows)
        if share is None:
            total = torch.sum(each)
            value = total if self.is_sum else torch.div(total, whole)
            return LossTerms(value, total.detach(), counts.sum())
        is_real = share.gt(0).to(values.dtype)
        total = torch.sum(each.mul(is_real))
        value = total if self.is_sum else torch.div(torch.sum(each.mul(share)), whole)
        return LossTerms(value, total.detach(), torch.sum(counts.mul(is_real)))

    def _ignores(self, outputs: Any, targets: Any) -> bool:
        """Return whether targets may contain the ignored index.

        Targets of the outputs' shape are no class indices.
        """
        return (
            self.ignore_index is not None
            and not self.is_sum
            and isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.shape != getattr(outputs, "shape", None)
        )

    def _counted(self, total: Tensor, targets: Tensor) -> LossTerms:
        """Average over targets that aren't ignored; 0 if all are ignored."""
        total = total.reshape(())
        count = torch.sum(targets.ne(self.ignore_index).to(total.dtype))
        return LossTerms(total / count.clamp(min=1), total.detach(), count)

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"The loss {self.name!r} gives {loss!r}, which is no tensor: compute "
                "it from outputs and targets with torch's operations."
            )
        if not loss.is_floating_point():
            raise ConfigError(
                f"The loss {self.name!r} gives whole numbers ({loss.dtype}), which "
                "have no gradient. Compute it from the outputs themselves, and use "
                "what counts, such as argmax(), as a metric."
            )
        return loss

    def _values(
        self, outputs: Any, targets: Any, rows: int, weights: Tensor | None
    ) -> Tensor:
        """Return weighted values per sample or element, `[rows, ...]`."""
        if weights is not None:
            cut = partial(_without_gradients, weights=weights)
            outputs = tree_map(cut, outputs)
        values = self._checked((self.each or self.function)(outputs, targets))
        if values.dim() == 0 or len(values) != rows:
            raise UnsupportedError(
                f"The loss {self.name!r} gives a value of shape {tuple(values.shape)} "
                f"for {rows} samples, so they can't be weighted (augment, "
                "sample_weight, class_weight, drop_last='pad'). Let it return "
                "one value per sample."
            )
        if weights is not None:
            if weights.dim() > values.dim() and weights.shape[-1] == 1:
                weights = torch.squeeze(weights, -1)  # [rows, 1], as Keras takes it
            missing = values.dim() - weights.dim()
            if missing < 0 or values.shape[: weights.dim()] != weights.shape:
                raise ConfigError(
                    f"Sample weights of shape {tuple(weights.shape)} don't fit the "
                    f"loss {self.name!r}, whose values have shape "
                    f"{tuple(values.shape)}: give one weight per sample."
                )
            shaped = weights.reshape(weights.shape + (1,) * missing)
            values = weighed(values, shaped.expand(values.shape).to(values.dtype))
        return values


def _without_gradients(tensor: Any, weights: Tensor) -> Any:
    """Detach values of weight 0, as 0 times a NaN gradient would be NaN."""
    if not isinstance(tensor, Tensor) or tensor.shape[:1] != weights.shape[:1]:
        return tensor
    if tensor.shape[: weights.dim()] != weights.shape:
        weights = weights.abs().flatten(1).sum(dim=1)
    missing = tensor.dim() - weights.dim()
    counts = weights.ne(0).reshape(weights.shape + (1,) * missing)
    return torch.where(counts, tensor, tensor.detach())
