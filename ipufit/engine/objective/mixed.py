# SPDX-License-Identifier: Apache-2.0
"""Targets and losses of samples that are mixed with others (`ipufit.Mixing`)."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch import Tensor

from ipufit._tree import tree_map
from ipufit.data import Labels
from ipufit.losses import LossTerms
from ipufit.mixing import Coefficients, rolled

from .objective import Objective

TermsByOutput = Dict[str, Tuple[LossTerms, float]]
"""Terms and weight of each loss, by the name of its output."""


def mixed_loss_terms(
    objective: Objective, outputs: Any, labels: Labels, rows: int, mixing: Tensor
) -> TermsByOutput:
    """Compute the losses of mixed samples, against both targets of each; traceable.

    A weight of a sample goes with its target, wherever that counts.

    Args:
        objective: Losses and their weights.
        outputs: Everything that the module returned.
        labels: Targets, weights and shares of a micro-batch.
        rows: Number of samples, padding included.
        mixing: `[rows, 1 or 6]`, of `Mixing.coefficients`.

    Raises:
        UnsupportedError: A loss gives no value per sample.
    """
    share = Coefficients.of(mixing).share
    own = _weighed(labels, share)
    others = _weighed(_rolled(labels, None), 1.0 - share)
    terms = objective.loss_terms(outputs, own, rows)
    more = objective.loss_terms(outputs, others, rows)
    return {
        name: (_added(term, more[name][0]), weight)
        for name, (term, weight) in terms.items()
    }


def dominant_labels(
    labels: Labels, mixing: Tensor, micro_batch_size: int | None = None
) -> Labels:
    """The labels that metrics see: of each pair of samples the one with more share.

    Args:
        labels: Targets, weights and shares of rows.
        mixing: As for `mixed_loss_terms`.
        micro_batch_size: Rows of a micro-batch; None if the rows are one.

    Example:
        >>> labels = Labels(torch.tensor([5, 6]))
        >>> dominant_labels(labels, torch.tensor([[0.9], [0.3]])).targets
        tensor([5, 5])
    """
    is_own = Coefficients.of(mixing).share.ge(0.5)
    others = _rolled(labels, micro_batch_size)

    def chosen(own: Any, other: Any) -> Any:
        if not isinstance(own, Tensor):
            return own
        shape = (-1, *(1,) * (own.dim() - 1))
        return torch.where(is_own.reshape(shape).expand(own.shape), own, other)

    return Labels(
        _zipped(chosen, labels.targets, others.targets),
        _zipped(chosen, labels.weights, others.weights),
        labels.share,
    )


def _rolled(labels: Labels, micro_batch_size: int | None) -> Labels:
    """The targets and weights of the other samples; each row keeps its share."""

    def roll(leaf: Any) -> Any:
        return rolled(leaf, micro_batch_size) if isinstance(leaf, Tensor) else leaf

    targets, weights = tree_map(roll, (labels.targets, labels.weights))
    return Labels(targets, weights, labels.share)


def _weighed(labels: Labels, share: Tensor) -> Labels:
    """The labels with weights times parts of the loss, `[rows]`."""

    def weigh(weights: Any) -> Any:
        if not isinstance(weights, Tensor):
            return weights
        shape = (-1, *(1,) * (weights.dim() - 1))
        return weights.to(torch.float32).mul(share.reshape(shape))

    weights = share if labels.weights is None else tree_map(weigh, labels.weights)
    return labels._replace(weights=weights)


def _added(own: LossTerms, other: LossTerms) -> LossTerms:
    """The terms of both targets; each sample counts once."""
    return LossTerms(own.value + other.value, own.total + other.total, own.divisor)


def _zipped(function: Any, nested: Any, like: Any) -> Any:
    """Apply a function to the leaves of two values that nest alike."""
    rest = iter(_leaves(like))
    return tree_map(lambda leaf: function(leaf, next(rest)), nested)


def _leaves(nested: Any) -> list[Any]:
    found: list[Any] = []
    tree_map(found.append, nested)
    return found
