# SPDX-License-Identifier: Apache-2.0
"""Losses: by name, torch's modules, users' functions, and label smoothing.

`compile(loss="cross_entropy")` takes a name, modules of torch such as `nn.MSELoss()`,
and functions of outputs and targets. The error of an unknown name lists all names.

Named losses are torch's losses, and means of functions that metrics use, too. All take
logits, as torch's losses do, even if the name means probabilities in Keras. The class
axis is the second, as in torch, and the last for Keras's `..._crossentropy`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Union

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from ipufit._arguments import ArgumentRepr, check_number, shown
from ipufit._tree import tree_map
from ipufit.errors import (
    ConfigError,
    DataError,
    UnknownNameError,
    UnsupportedError,
    refuse_foreign,
    unknown_attribute,
)
from ipufit.metrics.base import (
    IGNORED_INDEX,
    call_by_rows,
    dense_targets,
    in_float32,
    outputs_first,
    spread_weights,
    weighted,
)
from ipufit.metrics.classification import categorical_hinge, hinge, squared_hinge
from ipufit.metrics.probabilistic import EPSILON, kl_divergence
from ipufit.metrics.regression import (
    absolute_percentage_error,
    log_cosh_error,
    squared_logarithmic_error,
)
from ipufit.metrics.target_means import TargetMeans
from ipufit.types import LossFunction

__all__ = [
    "Loss",
    "LossLike",
    "LossTerms",
    "binary_focal_crossentropy",
    "categorical_focal_crossentropy",
    "check_smoothing",
    "resolve_loss",
    "smoothed",
    "tversky",
]


class LossTerms(NamedTuple):
    """The loss of a micro-batch.

    Attributes:
        value: The value to minimize, 0-d.
        total: The loss summed over the samples, 0-d; `[parts]` if the loss is a sum of
            means over different numbers.
        divisor: The divisor of the mean: the number of samples without padding, or of
            targets that aren't ignored. NaN if targets were ignored whose number in the
            update is unknown. It has the shape of `total`.
    """

    value: Tensor
    total: Tensor
    divisor: Tensor


@dataclass(frozen=True, repr=False)
class Loss(ArgumentRepr):
    """A loss as the engine uses it.

    Attributes:
        name: Name for messages.
        function: Function of outputs and targets. Returns a scalar, or values per
            sample or element, which are averaged.
        is_sum: Whether the function sums over samples instead of averaging, so that the
            gradients of micro-batches must be summed too.
        each: The same loss with one value per sample or element; None to use
            `function`.
        is_per_output: Whether the loss is applied to each of several outputs. A user's
            function gets the nested outputs and targets instead.
        ignore_index: Class index of targets that are ignored; None if no index is
            ignored, and for a user's function.
        indices: Class indices of targets that a user's function ignores, as far as its
            calls have shown.
        refuses_probabilities: Whether the loss takes logits, though its name means a
            loss of probabilities in Keras or torch. Then probabilities raise an error
            instead of a warning.
        takes_probabilities: Whether outputs are probabilities of 0s and 1s, as for
            torch's BCELoss.
        is_binary: Whether each output is a problem of its own, with a target of 0 or 1.
        class_axis: Axis of the outputs that has the classes; None if the loss isn't
            over classes.
        is_of_rows: Whether torch's loss takes outputs `[N]` for the classes or labels
            of one sample.
        of_all_classes: Function of outputs: the loss for equal shares of all classes,
            which smooths labels. None for losses that are neither over classes nor
            binary.
    """

    name: str
    function: LossFunction
    is_sum: bool = False
    each: LossFunction | None = None
    is_per_output: bool = False
    ignore_index: int | None = None
    indices: set[int] = field(default_factory=set, compare=False, repr=False)
    refuses_probabilities: bool = False
    takes_probabilities: bool = False
    is_binary: bool = False
    class_axis: int | None = None
    is_of_rows: bool = False
    of_all_classes: Callable[[Tensor], Tensor] | None = None

    @property
    def ignored(self) -> set[int]:
        """Class indices of targets that are ignored."""
        return self.indices if self.ignore_index is None else {self.ignore_index}

    @property
    def has_binary_targets(self) -> bool | None:
        """Whether targets are 0 or 1; None if the loss doesn't determine that."""
        return self.is_binary if self.is_binary or self.ignored else None

    @property
    def is_function(self) -> bool:
        """Whether the loss is a user's function, whose reduction is unknown."""
        return not (self.is_per_output or self.is_sum)

    def terms(
        self,
        outputs: Any,
        targets: Any,
        rows: int,
        weights: Tensor | None = None,
        share: Tensor | None = None,
        counted: Mapping[int, Any] | None = None,
    ) -> LossTerms:
        """Compute the loss of a micro-batch.

        =================  ======================  =====================  ============
        Loss               value                   total                  divisor
        =================  ======================  =====================  ============
        mean               mean of all values      sum of rows' means     rows
        sum (`is_sum`)     sum of all values       the same               rows
        of classes with    sum of all values,      sum of all values      targets that
        an `ignore_index`  divided by the targets                         count
                           that count
        function of a      what it gives, or the   value * rows, or       rows, or
        user               mean of that            sums of the means      targets that
                                                   over targets in it     count
        =================  ======================  =====================  ============

        Totals and divisors exclude padding; the value weights each row by its share.
        With sample weights the loss is Keras's: weighted values, divided by the number
        of samples and not by the sum of weights. Shares and weights need a value per
        row (`per_row`, then `reduce`); without them the function itself reduces.

        Args:
            outputs: Outputs of the model, one row per sample.
            targets: Targets, one row per sample.
            rows: Number of samples.
            weights: Weights of samples, `[rows]`, or of positions, `[rows, ...]`.
            share: Weight of each row in the mean of its update, `[rows]`; 0 for
                padding.
            counted: For each index that is ignored the divisor, the same in each row:
                the number of the update's targets that aren't ignored, divided by its
                micro-batches. None if this micro-batch is an update.

        Raises:
            UnsupportedError: There are weights or shares, but no values per sample.

        Example:
            >>> outputs, targets = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
            >>> loss = Loss("mse", torch.nn.functional.mse_loss)
            >>> loss.terms(outputs, targets, 2)
            LossTerms(value=tensor(5.), total=tensor(10.), divisor=tensor(2.))
        """
        self._check_shape(outputs, targets)
        index = None
        if not self.is_sum and self._are_indices(outputs, targets):
            index = self.ignore_index
        if weights is not None or share is not None:
            values = self.per_row(outputs, targets, rows, weights)
            if index is None:
                return self.reduce(values, share)
            return _mean_of_valid(values, targets.ne(index), share, index, counted)
        if self.is_function:
            return self._terms_of_function(outputs, targets, rows, counted)
        if index is not None:
            return self._terms_of_classes(outputs, targets, index, counted)
        loss = self._checked(call_by_rows(self.function, outputs, targets))
        return self._terms_of_value(_scalar(loss, is_added=self.is_sum), rows)

    def per_row(
        self, outputs: Any, targets: Any, rows: int, weights: Tensor | None
    ) -> Tensor:
        """Return weighted values per sample or element, `[rows, elements]`."""
        if weights is not None:
            outputs = tree_map(partial(_without_gradients, weights=weights), outputs)
            targets = tree_map(partial(_without_missing, weights=weights), targets)
        function = self.each or self.function
        with TargetMeans() as target_means:
            values = self._checked(call_by_rows(function, outputs, targets))
        self.indices.update(target_means.ignored)
        if values.dim() == 0 or len(values) != rows:
            raise UnsupportedError(
                f"The loss {self.name!r} gives a value of shape {tuple(values.shape)} "
                f"for {rows} samples, so they can't be weighted (augment, "
                "sample_weight, a third part of the data, class_weight, "
                "drop_last='pad', masks). Let it return one value per sample."
            )
        if weights is not None:
            values = weighted(values, spread_weights(weights, values).to(values.dtype))
        return values.reshape(rows, -1)

    def reduce(self, values: Tensor, share: Tensor | None) -> LossTerms:
        """Reduce values per row to a mean over the rows, or to a sum.

        Args:
            values: `[rows, elements]`.
            share: As for `terms`.
        """
        each = values.sum(dim=1) if self.is_sum else values.mean(dim=1)
        if share is None:
            is_real = torch.ones_like(each)
            total = shared = torch.sum(each)
        else:
            is_real = share.gt(0).to(values.dtype)
            total, shared = torch.sum(each.mul(is_real)), torch.sum(each.mul(share))
        value = total if self.is_sum else torch.div(shared, float(len(values)))
        return LossTerms(value, total.detach(), torch.sum(is_real))

    def _check_shape(self, outputs: Any, targets: Any) -> None:
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            return
        if self.is_of_rows and targets.dim() < 2:
            _rows(outputs)
        shape, has_indices = tuple(outputs.shape), outputs.dim() != targets.dim()
        if self.class_axis is None or has_indices or len(shape) < 2:
            return
        if shape[self.class_axis] == 1:
            raise DataError(
                f"outputs of shape {shape} have one class, of which nothing can be "
                "learnt. For two classes in one output use 'binary_cross_entropy'"
            )

    def _terms_of_value(self, value: Tensor, rows: int) -> LossTerms:
        """Return the terms of a mean or sum over all rows."""
        total = value.detach()
        total = total if self.is_sum else total.mul(rows)
        count = torch.full_like(total, float(rows), device=total.device)
        return LossTerms(value, total, count)

    def _terms_of_classes(
        self, outputs: Any, targets: Any, index: int, counted: Mapping[int, Any] | None
    ) -> LossTerms:
        """Compute a mean over the class indices that aren't ignored."""
        with TargetMeans(targets, counted) as target_means:
            value = self._checked(call_by_rows(self.function, outputs, targets))
            if value.dim() or target_means.origin_of(value) is None:
                value = _scalar(value, is_added=True)
        mean = target_means.origin_of(value)
        if mean is None:  # of smoothed labels
            count = torch.sum(targets.ne(index).to(value.dtype))
            return _mean_of_counted(value, count, index, counted)
        count = mean.num_targets
        if counted is not None:
            count = target_means.checked(count)
        return LossTerms(value, mean.total, count)

    def _terms_of_function(
        self, outputs: Any, targets: Any, rows: int, counted: Mapping[int, Any] | None
    ) -> LossTerms:
        """Compute the terms of a user's function, which may ignore targets."""
        # On the host it is a sum of parts, each with a divisor of its own.
        has_parts = not torch.is_grad_enabled()
        target_means = TargetMeans(targets, counted, is_derived=has_parts)
        with contextlib.ExitStack() as stack:
            if has_parts:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.enable_grad())
            stack.enter_context(target_means)
            loss = self._checked(call_by_rows(self.function, outputs, targets))
            value = _scalar(loss, is_added=False)
        self.indices.update(target_means.ignored)
        _, total, count = self._terms_of_value(value, rows)
        mean = target_means.origin_of(value)
        if mean is not None:
            total, count = mean.total, mean.num_targets
        elif has_parts and target_means.means:
            parts = list(zip(target_means.slopes(value), target_means.means))
            rest = total - rows * sum(slope * mean.value for slope, mean in parts)
            totals = [rest, *(slope * mean.total for slope, mean in parts)]
            total = torch.stack(totals).detach()
            count = torch.stack([count, *(mean.num_targets for _, mean in parts)])
        if counted is not None:
            count = target_means.checked(count)
        return LossTerms(value, total, count)

    def _are_indices(self, outputs: Any, targets: Any) -> bool:
        """Return whether targets are class indices, by their shape."""
        return (
            isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.shape != getattr(outputs, "shape", None)
        )

    def marked(self, outputs: Any, targets: Any) -> Any:
        """Return targets with -100, which metrics ignore, for all ignored indices.

        Example:
            >>> loss = Loss("mine", torch.nn.functional.cross_entropy, ignore_index=255)
            >>> loss.marked(torch.zeros(2, 3), torch.tensor([1, 255]))
            tensor([   1, -100])
        """
        if self._are_indices(outputs, targets):
            for index in self.ignored - {IGNORED_INDEX}:
                targets = targets.masked_fill(targets.eq(index), IGNORED_INDEX)
        return targets

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"The loss {self.name!r} gives {loss!r}, which isn't a tensor: compute "
                "it from outputs and targets with torch's operations."
            )
        if not loss.is_floating_point():
            raise ConfigError(
                f"The loss {self.name!r} gives whole numbers ({loss.dtype}), which "
                "have no gradient. Compute it from the outputs themselves, and use "
                "what counts, such as argmax(), as a metric."
            )
        return loss


def _scalar(loss: Tensor, *, is_added: bool) -> Tensor:
    """Reduce the result of a loss function to a scalar, if it isn't a scalar yet."""
    if loss.dim():
        return torch.sum(loss) if is_added else torch.mean(loss)
    # PopTorch gives a built-in loss inside the final one the shape [1].
    return loss.reshape(())


def _mean_of_valid(
    values: Tensor,
    valid: Tensor,
    share: Tensor | None,
    index: int,
    counted: Mapping[int, Any] | None,
) -> LossTerms:
    """Average values per row over the targets that aren't ignored.

    Args:
        values: `[rows, elements]`.
        valid: Which targets aren't ignored, of the targets' shape.
        share: As for `Loss.terms`, like the other arguments.
    """
    numbers = valid.reshape(len(values), -1).to(values.dtype)
    each, counts = values.sum(dim=1), numbers.sum(dim=1)
    if share is not None:
        is_real = share.gt(0).to(values.dtype)
        each, counts = each.mul(is_real), counts.mul(is_real)
    return _mean_of_counted(torch.sum(each), torch.sum(counts), index, counted)


def _mean_of_counted(
    total: Tensor, count: Tensor, index: int, counted: Mapping[int, Any] | None
) -> LossTerms:
    """Average over targets that aren't ignored; 0 if all are ignored.

    Args:
        total: The sum over the targets of a micro-batch.
        count: Number of targets that aren't ignored.
        index: Class index of the ignored targets.
        counted: As for `Loss.terms`.
    """
    divisor = None if counted is None else counted.get(index)
    whole = count.clamp(min=1) if divisor is None else divisor[0]
    return LossTerms(total / whole, total.detach(), count)


def _without_gradients(tensor: Any, weights: Tensor) -> Any:
    """Detach values of weight 0, as 0 times a NaN gradient would be NaN."""
    counts = _counts(tensor, weights)
    return tensor if counts is None else torch.where(counts, tensor, tensor.detach())


def _without_missing(tensor: Any, weights: Tensor) -> Any:
    """Replace NaN and integers of weight 0 by 0, as the integers may not be classes.

    The gradient of `torch.where` is multiplied by the mask on a device, so that there a
    NaN gradient of a loss goes through it (PopART, `WhereOp`).
    """
    counts = _counts(tensor, weights)
    if counts is None or tensor.dtype == torch.bool:
        return tensor
    is_kept = counts
    if tensor.is_floating_point():
        is_kept = counts.logical_or(torch.isnan(tensor).logical_not())
    return torch.where(is_kept, tensor, torch.zeros_like(tensor, device=tensor.device))


def _counts(tensor: Any, weights: Tensor) -> Tensor | None:
    """Return which elements have a weight other than 0; None without weights."""
    if not isinstance(tensor, Tensor) or tensor.shape[:1] != weights.shape[:1]:
        return None
    if tensor.shape[: weights.dim()] != weights.shape:
        weights = weights.abs().flatten(1).sum(dim=1)
    missing = tensor.dim() - weights.dim()
    return weights.ne(0).reshape(weights.shape + (1,) * missing)


# By name ----------------------------------------------------------------------------

ReducedLoss = Callable[[Any, Any, str], Tensor]
"""A function of outputs, targets and torch's `reduction`."""


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    classes = _classes(targets, outputs)
    return F.cross_entropy(_rows(outputs), classes, reduction=reduction)


def _nll(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(_rows(outputs), _classes(targets, outputs), reduction=reduction)


def _classes(targets: Tensor, outputs: Tensor) -> Tensor:
    """Remove a class axis of size 1, which Keras's class indices `[N, 1]` have."""
    if targets.dtype == torch.bool:
        targets = targets.to(torch.int64)
    if targets.shape == outputs.shape[:-1] != outputs.shape[:1] + outputs.shape[2:]:
        raise DataError(
            f"targets of shape {tuple(targets.shape)} fit outputs of shape "
            f"{tuple(outputs.shape)} with classes on the last axis, and this loss has "
            "them on axis 1, as torch's. Use 'sparse_categorical_crossentropy'"
        )
    has_axis = targets.dim() == outputs.dim() > 1 and targets.shape[1] == 1
    if not has_axis or targets.is_floating_point():
        return targets
    return targets.squeeze(1)


def _per_element(function: Callable[..., Tensor]) -> ReducedLoss:
    """Make a loss of torch accept targets whose shape differs in axes of size 1."""

    def loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return function(outputs, _like(targets, outputs), reduction=reduction)

    return loss


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    """Reshape targets to the outputs' shape; only axes of size 1 may differ."""
    wide = [size for size in outputs.shape if size != 1]
    if [size for size in targets.shape if size != 1] != wide:
        is_of_classes = not targets.is_floating_point()
        advice = ". For numbers of classes use 'cross_entropy'" if is_of_classes else ""
        raise DataError(
            f"targets of shape {tuple(targets.shape)} don't fit outputs of shape "
            f"{tuple(outputs.shape)}: this loss compares them one by one, so only axes "
            f"of size 1 may differ{advice}."
        )
    return targets.to(outputs.dtype).reshape(outputs.shape)


def _rows(outputs: Tensor) -> Tensor:
    """Refuse outputs of one value per sample, which torch would read as classes."""
    if outputs.dim() < 2:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} have one value per sample; this "
            "loss is over several, such as those of classes"
        )
    return outputs


def _sparse(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Compute Keras's cross-entropy of class indices: the class axis is the last."""
    if targets.dim() == outputs.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    rows = _rows(_classes_second(outputs))
    return F.cross_entropy(rows, targets, reduction=reduction)


def _categorical(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Compute Keras's cross-entropy of one-hot targets: the class axis is the last."""
    if targets.dim() < outputs.dim():
        return _sparse(outputs, targets, reduction)
    outputs, targets = _rows(_classes_second(outputs)), _classes_second(targets)
    return F.cross_entropy(outputs, targets.to(outputs.dtype), reduction=reduction)


def _classes_second(values: Tensor) -> Tensor:
    return values if values.dim() < 3 else values.movedim(-1, 1)


def _reduce(function: Callable[[Tensor, Tensor], Tensor]) -> ReducedLoss:
    """Add a reduction to a function that returns one value per sample or element."""

    def loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        values = function(outputs, targets)
        if reduction == "none":
            return values
        return torch.sum(values) if reduction == "sum" else torch.mean(values)

    return loss


def _opposite_direction(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute Keras's `cosine_similarity`: -1 for outputs in the targets' direction."""
    like = _like(targets, _rows(outputs))
    return F.cosine_similarity(outputs, like, dim=-1).neg()


def binary_focal_crossentropy(
    outputs: Tensor, targets: Tensor, gamma: float = 2.0, alpha: float | None = None
) -> Tensor:
    """Return binary cross-entropies, small where outputs are right already.

    They are multiplied by `(1 - p) ** gamma`, where p is the probability of the target,
    as in Lin et al., "Focal Loss for Dense Object Detection" (2017). The name is a loss
    with the defaults; for others pass `functools.partial(binary_focal_crossentropy,
    gamma=1.0)`.

    Args:
        outputs: Logits of any shape.
        targets: 0s and 1s of the same shape, up to axes of size 1.
        gamma: Exponent; 0 for the plain cross-entropy.
        alpha: Weight of the 1s; that of the 0s is `1 - alpha`. None weights both alike.

    Returns:
        Tensor of the outputs' shape, in nats.

    Example:
        >>> binary_focal_crossentropy(torch.tensor([0.0, 2.0]), torch.tensor([1, 1]))
        tensor([0.1733, 0.0018])
    """
    outputs = in_float32(outputs)
    truths, likely = _like(targets, outputs), torch.sigmoid(outputs)
    wrong = likely * (1.0 - truths) + (1.0 - likely) * truths
    wrong = wrong.clamp(min=EPSILON)  # the slope of a root of 0 isn't finite
    values = (F.softplus(outputs) - outputs * truths) * wrong.pow(gamma)
    if alpha is None:
        return values
    return values * (alpha * truths + (1.0 - alpha) * (1.0 - truths))


def categorical_focal_crossentropy(
    outputs: Tensor, targets: Tensor, alpha: float = 0.25, gamma: float = 2.0
) -> Tensor:
    """Return cross-entropies of classes, small where outputs are right already.

    They are multiplied by `alpha * (1 - p) ** gamma`, where p is the probability of the
    class, as in `binary_focal_crossentropy`.

    Args:
        outputs: Logits `[..., C]`.
        targets: One-hot or probabilities `[..., C]`.
        alpha: Factor of all values.
        gamma: Exponent.

    Returns:
        One value per sample, in nats.

    Example:
        >>> categorical_focal_crossentropy(torch.zeros(1, 2), torch.tensor([[0, 1]]))
        tensor([0.0433])
    """
    outputs, dense = dense_targets(outputs, targets)
    logs = F.log_softmax(in_float32(outputs), dim=-1)
    wrong = (1.0 - logs.exp()).clamp(min=EPSILON)  # as in binary_focal_crossentropy
    return -alpha * (dense * logs * wrong.pow(gamma)).sum(dim=-1)


def tversky(
    outputs: Tensor, targets: Tensor, alpha: float = 0.5, beta: float = 0.5
) -> Tensor:
    """Return what outputs and targets don't have in common, as a share, per sample.

    It is `1 - tp / (tp + alpha * fp + beta * fn)`, with sums of probabilities for
    counts: Salehi et al., "Tversky loss function for image segmentation using 3D fully
    convolutional deep networks" (2017). Halves make it the Dice loss.

    Args:
        outputs: Logits `[rows, ...]`.
        targets: 0s and 1s of the same shape, up to axes of size 1.
        alpha: Weight of the false positives.
        beta: Weight of the false negatives.

    Returns:
        One value per sample.

    Example:
        >>> tversky(torch.tensor([[0.0, 0.0]]), torch.tensor([[1, 0]]))
        tensor([0.5000])
    """
    shares = torch.sigmoid(in_float32(outputs))
    truths = _like(targets, shares).reshape(len(shares), -1)
    shares = shares.reshape(truths.shape)
    tp = (shares * truths).sum(dim=1)
    fp, fn = shares.sum(dim=1) - tp, truths.sum(dim=1) - tp
    return 1.0 - tp / (tp + alpha * fp + beta * fn + EPSILON)


# The loss of equal shares of all classes, for label smoothing.


def _uniform_loss_of_logits(outputs: Tensor) -> Tensor:
    return F.log_softmax(outputs, dim=1).mean(dim=1).neg()


def _uniform_loss_of_last_logits(outputs: Tensor) -> Tensor:
    return F.log_softmax(outputs, dim=-1).mean(dim=-1).neg()


def _uniform_loss_of_log_probabilities(outputs: Tensor) -> Tensor:
    return outputs.mean(dim=1).neg()


def _uniform_loss_of_binary_logits(outputs: Tensor) -> Tensor:
    return F.softplus(outputs) - outputs.mul(0.5)


def _over_classes(
    axis: int, of_all_classes: Callable[[Tensor], Tensor]
) -> Mapping[str, Any]:
    """Return the fields of a loss of logits or log-probabilities of classes."""
    return {
        "class_axis": axis,
        "ignore_index": IGNORED_INDEX,
        "of_all_classes": of_all_classes,
    }


_BINARY: Mapping[str, Any] = {"is_binary": True}
_SMOOTHED_BINARY = {**_BINARY, "of_all_classes": _uniform_loss_of_binary_logits}


class _NamedLoss(NamedTuple):
    """A built-in loss and its names.

    Attributes:
        names: Its names, which an error lists.
        function: The loss.
        fields: Fields of its `Loss`.
        aliases: Other names in Keras, torch and the metrics.
        means_probabilities: Normalized names (`_key`) that mean a loss of probabilities
            in Keras or torch.
    """

    names: str
    function: ReducedLoss
    fields: Mapping[str, Any] = {}
    aliases: str = ""
    means_probabilities: str = ""


_NAMED = (
    _NamedLoss(
        "bce binary_cross_entropy binary_crossentropy",
        _per_element(F.binary_cross_entropy_with_logits),
        _SMOOTHED_BINARY,
        aliases="bce_with_logits binary_cross_entropy_with_logits",
        means_probabilities="bce binarycrossentropy",
    ),
    _NamedLoss(
        "binary_focal_crossentropy",
        _reduce(binary_focal_crossentropy),
        _BINARY,
        means_probabilities="binaryfocalcrossentropy",
    ),
    _NamedLoss(
        "categorical_crossentropy",
        _categorical,
        _over_classes(-1, _uniform_loss_of_last_logits),
        means_probabilities="categoricalcrossentropy",
    ),
    _NamedLoss(
        "categorical_focal_crossentropy",
        _reduce(categorical_focal_crossentropy),
        {"class_axis": -1},
        means_probabilities="categoricalfocalcrossentropy",
    ),
    _NamedLoss("categorical_hinge", _reduce(categorical_hinge), {"class_axis": -1}),
    _NamedLoss("cosine_similarity", _reduce(_opposite_direction)),
    _NamedLoss(
        "cross_entropy",
        _cross_entropy,
        _over_classes(1, _uniform_loss_of_logits),
        aliases="ce",
    ),
    _NamedLoss(
        "dice tversky",
        _reduce(tversky),
        _BINARY,
        means_probabilities="dice tversky",
    ),
    _NamedLoss("hinge", _reduce(hinge), _BINARY),
    _NamedLoss("huber smooth_l1", _per_element(F.smooth_l1_loss)),
    _NamedLoss(
        "kl_div kl_divergence",
        _reduce(kl_divergence),
        aliases="kld kullback_leibler_divergence",
        means_probabilities="kld kldivergence kullbackleiblerdivergence",
    ),
    _NamedLoss("l1 mae mean_absolute_error", _per_element(F.l1_loss)),
    _NamedLoss("log_cosh", _reduce(log_cosh_error)),
    _NamedLoss(
        "mape mean_absolute_percentage_error", _reduce(absolute_percentage_error)
    ),
    _NamedLoss("mean_squared_error mse", _per_element(F.mse_loss)),
    _NamedLoss(
        "mean_squared_logarithmic_error msle", _reduce(squared_logarithmic_error)
    ),
    _NamedLoss(
        "nll nll_loss", _nll, _over_classes(1, _uniform_loss_of_log_probabilities)
    ),
    _NamedLoss("poisson", _per_element(F.poisson_nll_loss), aliases="poisson_nll"),
    _NamedLoss(
        "sparse_categorical_crossentropy",
        _sparse,
        _over_classes(-1, _uniform_loss_of_last_logits),
        means_probabilities="sparsecategoricalcrossentropy",
    ),
    _NamedLoss("squared_hinge", _reduce(squared_hinge), _BINARY),
)

_OF_ROWS: Mapping[str, Any] = {"is_of_rows": True}
TO_PROBABILITIES = (
    "end the module in a sigmoid; or in none, with loss='bce', which is safer"
)
"""What to do if the outputs aren't the probabilities that BCELoss takes."""
_OF_PROBABILITIES = {**_BINARY, "takes_probabilities": True}
_OF_TORCH: dict[Any, Mapping[str, Any]] = {
    F.binary_cross_entropy: _OF_PROBABILITIES,
    F.binary_cross_entropy_with_logits: _BINARY,
    torch.nn.BCELoss: _OF_PROBABILITIES,
    torch.nn.BCEWithLogitsLoss: _SMOOTHED_BINARY,
    torch.nn.CrossEntropyLoss: {**_OF_ROWS, "of_all_classes": _uniform_loss_of_logits},
    torch.nn.MultiLabelMarginLoss: _OF_ROWS,
    torch.nn.MultiLabelSoftMarginLoss: {**_BINARY, **_OF_ROWS},
    torch.nn.MultiMarginLoss: _OF_ROWS,
    torch.nn.NLLLoss: {
        **_OF_ROWS,
        "of_all_classes": _uniform_loss_of_log_probabilities,
    },
    torch.nn.SoftMarginLoss: _BINARY,
}
"""Fields of the `Loss` of torch's functions, modules and their subclasses."""


def _fields_of(loss: Any) -> Mapping[str, Any]:
    """Return the fields of the `Loss` of one of torch's functions or modules."""
    if isinstance(loss, torch.nn.Module):
        kinds = (_OF_TORCH[kind] for kind in type(loss).__mro__ if kind in _OF_TORCH)
        return next(kinds, {})
    return _OF_TORCH.get(loss, {}) if isinstance(loss, FunctionType) else {}


CTC_FUNCTION = (
    "a function of the outputs [N, T, C], log-probabilities, and of a pair of targets "
    "and their lengths: lambda x, y: torch.nn.functional.ctc_loss(x.transpose(0, 1), "
    "y[0], lengths_of_x, y[1])"
)

_MEAN_OTHERWISE = {
    "bceloss": "torch's BCELoss takes probabilities, and 'binary_cross_entropy' takes "
    "logits, what comes before the sigmoid. Leave the sigmoid out and use that, or "
    "pass torch.nn.BCELoss() itself.",
    "kldivloss": "torch's KLDivLoss divides by classes too, and 'kl_divergence' by "
    "samples only, of outputs that are logits or log-probabilities. Use that, or pass "
    "torch.nn.KLDivLoss(reduction='batchmean') itself.",
    **dict.fromkeys(("ctc", "ctcloss"), f"CTC needs lengths too. Pass {CTC_FUNCTION}."),
}
"""Names of losses in torch and Keras that ipufit lacks, and what to do instead."""


def _key(name: str) -> str:
    """Normalize a name: lowercase, without underscores and a final `loss`."""
    key = name.lower().replace("_", "")
    return key[: -len("loss")] if key.endswith("loss") else key


_NAMES = " ".join(loss.names for loss in _NAMED).split()
_BY_KEY = {
    _key(name): loss
    for loss in _NAMED
    for name in f"{loss.names} {loss.aliases}".split()
}


@functools.lru_cache(maxsize=None)
def named_loss(name: str) -> Loss:
    """Return a loss by name; capitals, underscores and a final `loss` don't matter.

    Raises:
        ConfigError: The name means another loss in torch or Keras.
        UnknownNameError: The name is unknown.

    Example:
        >>> named_loss("MSE").terms(torch.ones(1, 1), torch.zeros(1, 1), 1).value
        tensor(1.)
    """
    squashed = name.lower().replace("_", "")
    if squashed in _MEAN_OTHERWISE:
        raise ConfigError(f"loss={name!r}: {_MEAN_OTHERWISE[squashed]}")
    key = _key(name)
    loss = _BY_KEY.get(key)
    if loss is None:
        if name.endswith("Loss") and hasattr(torch.nn, name):
            raise ConfigError(_unnamed_class_message(name))
        raise UnknownNameError("loss", name, sorted(_NAMES))

    def reduced(reduction: str) -> LossFunction:
        return lambda outputs, targets: loss.function(outputs, targets, reduction)

    return Loss(
        name=name,
        function=reduced("mean"),
        each=reduced("none"),
        is_per_output=True,
        refuses_probabilities=key in loss.means_probabilities.split(),
        **loss.fields,
    )


def _unnamed_class_message(name: str) -> str:
    """Return the message about a loss class of torch that has no name in ipufit."""
    kind = getattr(torch.nn, name)
    parameters = inspect.signature(kind).parameters.values()
    advice = f"pass torch.nn.{name}() itself."
    if any(parameter.default is parameter.empty for parameter in parameters):
        advice = "make one a part of the module, which then returns the loss."
    else:
        _refuse_unsupported(kind())
    return f"loss={name!r} is a class of torch without a name here: {advice}"


LossLike = Union[str, torch.nn.Module, LossFunction]
"""A name, a loss module of torch, or a function of outputs and targets."""


def resolve_loss(loss: LossLike) -> Loss:
    """Return the loss for a name, a module or a function.

    Binary losses and regression losses take targets of the outputs' shape, except for
    axes of size 1: `[N]` labels fit `[N, 1]` outputs. All losses take logits, as
    torch's do, even if the name means probabilities in Keras. The class axis is the
    second, as in torch. For Keras's `..._crossentropy` it is the last, and class
    indices may have one of size 1 there. Capitals, underscores and a final `loss` don't
    matter, so the names of torch's classes work. A name that means another loss in
    torch or Keras is refused.

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
    instead = "a loss of torch (those of classes take logits)"
    refuse_foreign("loss", loss, instead, _NAMES)
    if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
        name = loss.__name__  # type: ignore[attr-defined,unused-ignore]
        raise ConfigError(f"loss is the class {name}: give an object of it.")
    loss = _as_module(loss)
    if isinstance(loss, (dict, list, tuple)):
        raise ConfigError(
            f"loss has {loss!r} for one output, which takes one loss. Return the "
            "tensors of a nested output as outputs of their own, in one tuple or dict "
            "without others inside, or pass a function of this output and its targets."
        )
    if not callable(loss) or isinstance(loss, type):
        raise ConfigError(
            f"loss={shown(loss)} is neither a name, a torch loss module nor a "
            "function loss(outputs, targets)."
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
        class_axis=None if ignore_index is None else 1,
        **_fields_of(loss),
    )


_MODULES: dict[Any, Any] = {
    F.cross_entropy: torch.nn.CrossEntropyLoss,
    F.nll_loss: torch.nn.NLLLoss,
}


def _as_module(loss: Any) -> Any:
    """Convert `torch.nn.functional`'s cross-entropy, or a partial of it, to a module.

    Example:
        >>> _as_module(partial(F.cross_entropy, ignore_index=255)).ignore_index
        255
    """
    function = loss.func if isinstance(loss, partial) else loss
    is_known = isinstance(function, FunctionType) and function in _MODULES
    return _module_of(loss) if is_known and not getattr(loss, "args", ()) else loss


@functools.lru_cache(maxsize=16)  # an equal loss makes an equal program
def _module_of(loss: Any) -> Any:
    call: Any = loss if isinstance(loss, partial) else partial(loss)
    return _MODULES[call.func](**call.keywords)


def _refuse_unsupported(loss: Any) -> None:
    if isinstance(loss, torch.nn.CTCLoss):
        raise UnsupportedError(
            "torch.nn.CTCLoss takes four arguments, and with outputs [T, N, C]. Pass "
            f"{CTC_FUNCTION}."
        )
    names = list(inspect.signature(loss.forward).parameters) if _is_torchs(loss) else []
    if len(names) > 2:
        outputs = [name for name in names if name != "target"]
        passed = [
            "targets" if name == "target" else f"outputs[{outputs.index(name)}]"
            for name in names
        ]
        zeros = "" if "targets" in passed else " As y give zeros, one per sample."
        raise UnsupportedError(
            f"torch.nn.{type(loss).__name__} takes {', '.join(names)}, and a loss here "
            "takes all outputs and the targets. Wrap it: compile(loss=lambda outputs, "
            f"targets: module_loss({', '.join(passed)})).{zeros}"
        )
    has_weight = getattr(loss, "weight", None) is not None
    if _is_torchs(loss) and has_weight and not _fields_of(loss).get("is_binary"):
        raise UnsupportedError(
            f"{type(loss).__name__}(weight=...) can't run on an IPU: PopTorch has no "
            "class weights in losses. Leave it out and use fit(class_weight=...); or, "
            "for a class at each position, a loss module that has the weights as a "
            "buffer and returns `self.weight[targets] * torch.nn.functional."
            "cross_entropy(outputs, targets, reduction='none')`."
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
    """Return whether a loss is a module of torch, or a subclass with its `forward`."""
    return isinstance(loss, torch.nn.Module) and str(
        type(loss).forward.__module__
    ).startswith("torch.nn.")


def _unreduced(loss: Any) -> LossFunction | None:
    """Return a copy of a loss module that doesn't reduce; None for CTC."""
    if not _is_torchs(loss) or isinstance(loss, torch.nn.CTCLoss):
        return None
    if not hasattr(loss, "reduction"):
        return None
    each: Any = copy.copy(loss)
    each.reduction = "none"
    if loss.reduction == "batchmean":  # a sum over all but the samples
        return lambda outputs, targets: (
            call_by_rows(each, outputs, targets).reshape(len(outputs), -1).sum(dim=1)
        )
    unreduced: LossFunction = each
    return unreduced


# Label smoothing --------------------------------------------------------------------


def check_smoothing(amount: object) -> None:
    """Refuse an invalid amount of label smoothing.

    Raises:
        ConfigError: `amount` isn't a number of at least 0 and below 1.

    Example:
        >>> check_smoothing(0.1)
        >>> check_smoothing(10)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: label_smoothing=10: use a number of 0 or more and ...
    """
    check_number("label_smoothing", amount, least=0, below=1)


@dataclass(frozen=True)
class _SmoothedLoss:
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
        values = call_by_rows(self.each, outputs, targets)
        rest = self.of_all_classes(outputs).reshape(values.shape)
        is_whole = not targets.is_floating_point()
        are_indices = targets.numel() == values.numel() and is_whole
        if self.ignore_index is not None and are_indices:
            is_real = targets.reshape(values.shape).ne(self.ignore_index)
            rest = rest.mul(is_real.to(rest.dtype))
        return values.mul(1 - self.amount) + rest.mul(self.amount)


@dataclass(frozen=True)
class _SumLoss:
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
        UnsupportedError: The loss isn't over classes.

    Example:
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
    weights = [
        name
        for name in ("weight", "pos_weight")
        if getattr(loss.function, name, None) is not None
    ]
    if loss.of_all_classes is None or loss.each is None or weights:
        is_own = not isinstance(loss.function, torch.nn.Module)
        is_own = is_own and not loss.is_per_output
        raise UnsupportedError(
            f"label_smoothing={amount!r} needs a loss of classes, 'cross_entropy', "
            "'binary_cross_entropy', 'nll' or torch's and Keras's names of these, and "
            f"the loss is {'the function ' if is_own else ''}{loss.name!r}"
            f"{f' with {weights[0]}' if weights else ''}. Smooth the targets in a "
            "loss of your own."
        )
    each = _SmoothedLoss(loss.each, loss.of_all_classes, amount, loss.ignore_index)
    function = _SumLoss(each) if loss.is_sum else each
    return replace(loss, function=function, each=each)


if not TYPE_CHECKING:  # checkers find unknown names by themselves

    def __getattr__(name: str) -> Any:
        what, otherwise = f"module {__name__!r}", _MEAN_OTHERWISE.get(name.lower())
        if otherwise is not None:
            raise AttributeError(f"{what} has no attribute {name!r}. {otherwise}")
        way = f'compile(loss="{name}")' if _key(name) in _BY_KEY else ""
        raise unknown_attribute(what, "loss", name, globals(), way)
