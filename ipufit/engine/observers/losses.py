# SPDX-License-Identifier: Apache-2.0
"""Loss functions of torch's and PopTorch's that traced code calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .observing import Observer, Operation

_NAMES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss
cross_entropy cross_entropy_loss ctc_loss hinge_embedding_loss identity_loss kl_div
l1_loss margin_ranking_loss mse_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss
smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_LOSSES = frozenset(_NAMES.split())
"""Functions whose results PopTorch marks as losses."""


class LossObserver(Observer):
    """Notes whether a built-in loss function is called, and what is marked as a loss.

    PopTorch marks the results of these as losses, whatever they are for. A marker that
    isn't a part of the final loss is an error ("Multiple independent losses").

    Attributes:
        has_losses: Whether a built-in loss function was called.
        marked: Results of `identity_loss`, in order.
        sums: Results of loss functions that were asked for a sum.

    Example:
        >>> import torch
        >>> from ipufit.engine.observers.observing import Observing
        >>> losses = LossObserver()
        >>> with Observing(losses):
        ...     _ = torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2))
        >>> losses.has_losses
        True
    """

    def __init__(self) -> None:
        self.has_losses = False
        self.marked: list[Tensor] = []
        self.sums: list[Tensor] = []

    def after(self, operation: Operation, result: Any) -> Any:
        """Note the result of a loss function."""
        name, args, kwargs = operation
        if name in _LOSSES:
            self.has_losses = True
            is_marker = name == "identity_loss"
            if is_marker:
                self.marked.append(result)
            settings = (*args[1:], *kwargs.values())
            if any(_is_sum(value, is_marker=is_marker) for value in settings):
                self.sums.append(result)
        return result


def _is_sum(setting: Any, *, is_marker: bool) -> bool:
    """Whether a setting asks for a sum; PopTorch's own marker has numbers for them."""
    if isinstance(setting, str):
        return setting == "sum"
    return is_marker and isinstance(setting, int) and setting == 0
