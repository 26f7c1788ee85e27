# SPDX-License-Identifier: Apache-2.0
"""Calls of torch's kernels without the Python functions around them.

Those look at their arguments in every call. In a program arguments don't change, so
looking at them once is enough: that is a part in thirty of a small network's update.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch.fx.graph import Graph
from torch.fx.node import Node

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def make_direct(graph: Graph) -> None:
    """Replace calls of torch's Python functions by what these call.

    Args:
        graph: Changed in place.

    Example:
        >>> graph = Graph()
        >>> x = graph.placeholder("x")
        >>> result = graph.output(graph.call_function(F.relu, (x,), {"inplace": False}))
        >>> make_direct(graph)
        >>> [node.target is torch.relu for node in graph.nodes]
        [False, True, False]
    """
    for node in graph.nodes:
        rewrite = _DIRECT.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(node)


def _relu(node: Node) -> None:
    if len(node.args) == 1 and not node.kwargs.get("inplace"):
        node.target, node.kwargs = torch.relu, {}


def _cross_entropy(node: Node) -> None:
    internals: Any = getattr(torch, "_C", None)
    kernel = getattr(getattr(internals, "_nn", None), "cross_entropy_loss", None)
    given: dict[str, Any] = dict(node.kwargs)
    is_old = given.pop("size_average", None) is not None
    is_old = given.pop("reduce", None) is not None or is_old
    weight = given.pop("weight", None)
    reduction = _REDUCTIONS.get(given.pop("reduction", "mean"))
    ignored = given.pop("ignore_index", -100)
    smoothing = given.pop("label_smoothing", 0.0)
    is_known = len(node.args) == 2 and not given and reduction is not None
    if kernel is not None and is_known and not is_old:
        node.target, node.kwargs = kernel, {}
        node.args = (*node.args, weight, reduction, ignored, smoothing)


_DIRECT: dict[Callable[..., Any], Callable[[Node], None]] = {
    F.relu: _relu,
    F.cross_entropy: _cross_entropy,
}
