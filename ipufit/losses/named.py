# SPDX-License-Identifier: Apache-2.0
"""Losses by name: torch's, and means of functions that metrics use too.

All take logits, as torch's losses do, even if the name means probabilities in Keras.
The class axis is the second, as in torch, and the last for Keras's `..._crossentropy`.
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
"""A function of outputs, targets and torch's `reduction`."""


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    classes = _classes(targets, outputs)
    return F.cross_entropy(_rows(outputs), classes, reduction=reduction)


def _nll(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.nll_loss(_rows(outputs), _classes(targets, outputs), reduction=reduction)


def _classes(targets: Tensor, outputs: Tensor) -> Tensor:
    """Remove a class axis of size 1, which Keras's class indices `[N, 1]` have."""
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


def _per_element(function: Callable[..., Tensor]) -> ReducedLoss:
    """Let a loss of torch take targets whose shape differs in axes of size 1."""

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
            f"of size 1 may differ{advice}"
        )
    like: Tensor = targets.to(outputs.dtype).reshape(outputs.shape)
    return like


def _rows(outputs: Tensor) -> Tensor:
    """Refuse outputs of one value per sample, whose rows torch takes for classes."""
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


def _reduced(function: Callable[[Tensor, Tensor], Tensor]) -> ReducedLoss:
    """Add a reduction to a function of one value per sample or element."""

    def loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        values = function(outputs, targets)
        if reduction == "none":
            return values
        return torch.sum(values) if reduction == "sum" else torch.mean(values)

    return loss


def _opposite_direction(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute Keras's `cosine_similarity`: -1 for outputs in the targets' direction."""
    like = _like(targets, _rows(outputs))
    opposite: Tensor = F.cosine_similarity(outputs, like, dim=-1).neg()
    return opposite


_LOSSES: dict[str, ReducedLoss] = {
    "bce binary_cross_entropy binary_crossentropy": _per_element(
        F.binary_cross_entropy_with_logits
    ),
    "categorical_crossentropy": _categorical,
    "cosine_similarity": _reduced(_opposite_direction),
    "cross_entropy": _cross_entropy,
    "hinge": _reduced(hinge),
    "huber smooth_l1": _per_element(F.smooth_l1_loss),
    "kl_div kl_divergence": _reduced(kl_divergence),
    "l1 mae mean_absolute_error": _per_element(F.l1_loss),
    "log_cosh": _reduced(log_cosh_error),
    "mape mean_absolute_percentage_error": _reduced(absolute_percentage_error),
    "mean_squared_error mse": _per_element(F.mse_loss),
    "mean_squared_logarithmic_error msle": _reduced(squared_logarithmic_error),
    "nll nll_loss": _nll,
    "poisson": _per_element(F.poisson_nll_loss),
    "sparse_categorical_crossentropy": _sparse,
    "squared_hinge": _reduced(squared_hinge),
}
"""The losses by their names, which an error lists."""

_ALIASES = {
    "bcewithlogits": "bce",
    "binarycrossentropywithlogits": "bce",
    "ce": "crossentropy",
    "kld": "kldiv",
    "kullbackleiblerdivergence": "kldiv",
    "poissonnll": "poisson",
}
"""Keys of other names in Keras, torch and the metrics, to those of names above."""

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
"""Names of losses in torch and Keras that no loss here computes, and what to do."""

_LOGITS = (
    "bce",
    "binarycrossentropy",
    "categoricalcrossentropy",
    "kld",
    "kldivergence",
    "kullbackleiblerdivergence",
    "sparsecategoricalcrossentropy",
)
"""Names, as keys, that mean a loss of probabilities in Keras or torch."""

_IGNORED = -100
_IGNORING = (_categorical, _cross_entropy, _nll, _sparse)


def _key(name: str) -> str:
    """Normalise a name: remove underscores, capitals and a final `loss`."""
    key = name.lower().replace("_", "")
    return key[: -len("loss")] if key.endswith("loss") else key


_BY_KEY = {_key(n): loss for names, loss in _LOSSES.items() for n in names.split()}


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
    function = _BY_KEY.get(_ALIASES.get(key, key))
    if function is None:
        if name.endswith("Loss") and hasattr(torch.nn, name):
            raise ConfigError(
                f"loss={name!r} is a class of torch without a name here: pass "
                f"torch.nn.{name}() itself."
            )
        raise UnknownNameError("loss", name, sorted(" ".join(_LOSSES).split()))

    def reduced(reduction: str) -> LossFunction:
        return lambda outputs, targets: function(outputs, targets, reduction)

    return Loss(
        name=name,
        function=reduced("mean"),
        each=reduced("none"),
        is_per_output=True,
        ignore_index=_IGNORED if function in _IGNORING else None,
        summed=reduced("sum"),
        takes_logits=key in _LOGITS,
    )
