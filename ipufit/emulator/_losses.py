# SPDX-License-Identifier: Apache-2.0
"""Which value of a traced training model is *the* loss.

The built-in loss functions and `identity_loss` mark their result. A marker from
which another marker is computed is only a step on the way; exactly one marker must
remain (PopTorch, `RemoveSurplusIdentityLosses.cpp`).
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch._C import _nn
from torch.fx.graph import Graph
from torch.fx.node import Node

from ._half import original
from .errors import createPoptorchError
from .ops import identity_loss

_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "cross_entropy_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "nll_loss_nd",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)

_BUILT_IN: frozenset[Callable[..., object]] = frozenset(
    getattr(home, name)
    for home in (F, torch, _nn)
    for name in _NAMES
    if hasattr(home, name)
)

_IN_PLACE_WRITES = ("__setitem__",)


def is_loss(node: Node) -> bool:
    """Whether `node` marks a loss."""
    function = original(node.target)
    return node.op == "call_function" and (
        function is identity_loss or function in _BUILT_IN
    )


def final_loss(graph: Graph) -> Node:
    """The one marker that no other marker is computed from.

    Raises:
        Error: There is no marker, or more than one that is final.
    """
    markers = [node for node in graph.nodes if is_loss(node)]
    if not markers:
        raise createPoptorchError(
            "Couldn't find a loss in graph! A training model must compute a loss with "
            "one of torch's loss functions or mark it with poptorch.identity_loss."
        )
    final = [node for node in markers if not _leads_to_another(node, markers)]
    if len(final) > 1:
        raise createPoptorchError(
            "Multiple independent losses found in graph. Graph must have one final "
            "loss. Wrap final graph loss in poptorch.identity_loss. "
            f"Found: {', '.join(str(node) for node in final)}."
        )
    loss: Node = final[0]
    return loss


def _leads_to_another(marker: Node, markers: list[Node]) -> bool:
    seen: set[Node] = {marker}
    waiting = [marker]
    while waiting:
        for user in waiting.pop().users:
            reached = [user, *_written_by(user)]
            if user in markers:
                return True
            new = [node for node in reached if node not in seen]
            seen.update(new)
            waiting.extend(new)
    return False


def _written_by(node: Node) -> list[Node]:
    """The node that `node` changes in place, if it returns nothing itself."""
    if node.op == "call_method" and node.target in _IN_PLACE_WRITES:
        target = node.args[0]
        return [target] if isinstance(target, Node) else []
    return []
