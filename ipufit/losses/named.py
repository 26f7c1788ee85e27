# SPDX-License-Identifier: Apache-2.0
"""Losses by name: torch's, and means of what metrics compute per sample.

Names that mean a probability loss take logits, as torch's do. The class axis is the
second, as torch has it, and the last for Keras's `..._crossentropy`.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from ipufit.errors import ConfigError, DataError, UnknownNameError
from ipufit.metrics.hinge import hinge, squared_hinge
from ipufit.metrics.probabilistic import kl_divergence
from ipufit.metrics.regression import (
    absolute_percentage_error,
    log_cosh_error,
    squared_logarithmic_error,
)
from ipufit.types import LossFunction

from .loss import Loss

ReducedLoss = Callable[[Any, Any, str], Tensor]
"""Of outputs, targets and torch's reduction."""


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    classes = _classes(targets, outputs)
    return F.cross_entropy(_rows(outputs), classes, reduction=reduction)


def _nll(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(_rows(outputs), _classes(targets, outputs), reduction=reduction)


def _classes(targets: Tensor, outputs: Tensor) -> Tensor:
    """Class indices without a class axis of one element, `[N, 1]` as in Keras."""
    has_axis = targets.dim() == outputs.dim() > 1 and targets.shape[1] == 1
    if not has_axis or targets.is_floating_point():
        return targets
    if outputs.shape[1] == 1:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} have one class, of which nothing "
            "can be learnt. For two classes in one output use 'binary_cross_entropy'"
        )
    classes: Tensor = targets.squeeze(1)
    return classes


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
    """Targets in the outputs' shape; only axes of one element may differ."""
    wide = [size for size in outputs.shape if size != 1]
    if [size for size in targets.shape if size != 1] != wide:
        raise DataError(
            f"the shapes {tuple(outputs.shape)} and {tuple(targets.shape)} differ in "
            "more than axes of size 1"
        )
    like: Tensor = targets.to(outputs.dtype).reshape(outputs.shape)
    return like


def _rows(outputs: Tensor) -> Tensor:
    """Outputs of several values per sample; torch would take rows for them."""
    if outputs.dim() < 2:
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} have one value per sample; this "
            "loss is over several, such as those of classes"
        )
    return outputs


def _sparse(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Keras's: the class axis is the last, and targets may keep it with one element."""
    if targets.dim() == outputs.dim() and targets.shape[-1] == 1:
        targets = targets.squeeze(-1)
    rows = _rows(_classes_second(outputs))
    return F.cross_entropy(rows, targets, reduction=reduction)


def _categorical(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Keras's: the class axis is the last, of one-hot targets too."""
    if targets.dim() < outputs.dim():
        return _sparse(outputs, targets, reduction)
    outputs, targets = _rows(_classes_second(outputs)), _classes_second(targets)
    return F.cross_entropy(outputs, targets.to(outputs.dtype), reduction=reduction)


def _classes_second(values: Tensor) -> Tensor:
    return values if values.dim() < 3 else values.movedim(-1, 1)


def _reduced(function: Callable[[Tensor, Tensor], Tensor]) -> ReducedLoss:
    """A loss from a function that gives one value per sample or element."""

    def loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        values = function(outputs, targets)
        if reduction == "none":
            return values
        return torch.sum(values) if reduction == "sum" else torch.mean(values)

    return loss


def _opposite_direction(outputs: Tensor, targets: Tensor) -> Tensor:
    """Keras's loss of that name: -1 for outputs in the targets' direction."""
    like = _like(targets, _rows(outputs))
    opposite: Tensor = F.cosine_similarity(outputs, like, dim=-1).neg()
    return opposite


_NAMED: dict[str, ReducedLoss] = {
    "binarycrossentropy": _binary_cross_entropy,
    "categoricalcrossentropy": _categorical,
    "crossentropy": _cross_entropy,
    "cosinesimilarity": _reduced(_opposite_direction),
    "hinge": _reduced(hinge),
    "huber": _smooth_l1,
    "kldivergence": _reduced(kl_divergence),
    "logcosh": _reduced(log_cosh_error),
    "mape": _reduced(absolute_percentage_error),
    "meanabsolutepercentageerror": _reduced(absolute_percentage_error),
    "meansquaredlogarithmicerror": _reduced(squared_logarithmic_error),
    "msle": _reduced(squared_logarithmic_error),
    "squaredhinge": _reduced(squared_hinge),
    "l1": _mae,
    "mae": _mae,
    "meanabsoluteerror": _mae,
    "meansquarederror": _mse,
    "mse": _mse,
    "nll": _nll,
    "poisson": _poisson,
    "smoothl1": _smooth_l1,
    "sparsecategoricalcrossentropy": _sparse,
}
"""By their names without underscores, capitals and `loss` at the end."""

_ALIASES = {
    "bce": "binarycrossentropy",
    "bcewithlogits": "binarycrossentropy",
    "binarycrossentropywithlogits": "binarycrossentropy",
    "ce": "crossentropy",
    "kld": "kldivergence",
    "kldiv": "kldivergence",
    "kullbackleiblerdivergence": "kldivergence",
    "poissonnll": "poisson",
}
"""What else Keras, torch and the metrics call them."""

NAMES = (
    "bce",
    "binary_cross_entropy",
    "binary_crossentropy",
    "categorical_crossentropy",
    "cosine_similarity",
    "cross_entropy",
    "hinge",
    "huber",
    "kl_div",
    "kl_divergence",
    "l1",
    "log_cosh",
    "mae",
    "mape",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "mse",
    "msle",
    "nll",
    "nll_loss",
    "poisson",
    "smooth_l1",
    "sparse_categorical_crossentropy",
    "squared_hinge",
)
"""The names as people write them."""

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
"""Names that are understood, but not as a loss of ours."""

_LOGITS = (
    "bce",
    "binarycrossentropy",
    "categoricalcrossentropy",
    "kld",
    "kldivergence",
    "kullbackleiblerdivergence",
    "sparsecategoricalcrossentropy",
)
"""Names of which Keras or torch has a loss of probabilities."""

_IGNORED = -100
_IGNORING = (_categorical, _cross_entropy, _nll, _sparse)


@functools.lru_cache(maxsize=None)
def named_loss(name: str) -> Loss:
    """The loss of that name, the same each time; capitals and underscores don't matter.

    Raises:
        ConfigError: It means something else elsewhere than a loss of ours.
        UnknownNameError: There is none.

    Example:
        >>> named_loss("MSE").terms(torch.ones(1, 1), torch.zeros(1, 1), 1).value
        tensor(1.)
    """
    key = name.lower().replace("_", "")
    if key in _MEAN_OTHERWISE:
        raise ConfigError(f"loss={name!r}: {_MEAN_OTHERWISE[key]}")
    short = key[: -len("loss")] if key.endswith("loss") else key
    function = _NAMED.get(_ALIASES.get(short, short))
    if function is None:
        if name.endswith("Loss") and hasattr(torch.nn, name):
            raise ConfigError(
                f"loss={name!r} is a class of torch without a name here: pass "
                f"torch.nn.{name}() itself."
            )
        raise UnknownNameError("loss", name, NAMES)

    def reduced(reduction: str) -> LossFunction:
        return lambda outputs, targets: function(outputs, targets, reduction)

    return Loss(
        name=name,
        function=reduced("mean"),
        each=reduced("none"),
        is_per_output=True,
        ignore_index=_IGNORED if function in _IGNORING else None,
        summed=reduced("sum"),
        takes_logits=short in _LOGITS,
    )
