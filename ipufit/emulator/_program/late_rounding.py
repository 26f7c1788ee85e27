# SPDX-License-Identifier: Apache-2.0
"""Rounds results of half precision after ReLU and max-pooling, not before.

A layer computes in float32 and rounds to float16. What ReLU and max-pooling return are
some of the numbers that they get, or zeros. On the device they widen numbers first and
round what they return, which changes nothing. Rounding to the nearest never turns the
order of two numbers round. So a program may leave a layer's result in float32, let ReLU
and pooling choose there, and round what they return: the same numbers, in fewer passes
over less memory. Of zeros of both signs either may come out. Where numbers are rounded
at random, every result is rounded by itself, as before.
"""

from __future__ import annotations

from typing import Any

from torch.fx.graph_module import GraphModule
from torch.fx.node import Node

from ipufit.emulator._ground.rewriting import rewritten
from ipufit.emulator._tracing.constant_nodes import function_name
from ipufit.emulator._tracing.half import is_rounded, left_wide, rounded_late

_LAYERS = frozenset(
    """
    __add__ __radd__ add conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d group_norm layer_norm linear
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions before ReLU and pooling in networks; they change no argument."""

_POOLING = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})


def with_late_rounding(graph: GraphModule) -> GraphModule:
    """Round the results of a program's layers after what picks of them.

    Args:
        graph: A program that isn't differentiated.

    Returns:
        An equal program; `graph` itself if there is nothing to rewrite.

    Example:
        >>> import torch
        >>> program = torch.fx.symbolic_trace(torch.nn.Identity())
        >>> with_late_rounding(program) is program
        True
    """
    return rewritten(graph, _rounds_again, _round_late)


def _round_late(node: Node) -> None:
    given: Any = node.args[0]
    given.target = left_wide(given.target)
    node.target = rounded_late(node.target)


def _rounds_again(node: Node) -> bool:
    """Whether a node picks of a rounded result that no other node takes.

    Views of it and results of the program are nodes that take it, too.
    """
    if not is_rounded(node.target) or not _picks(node):
        return False
    given = node.args[0] if node.args else None
    return (
        isinstance(given, Node)
        and is_rounded(given.target)
        and len(given.users) == 1
        and (_is_layer(given) or _picks_apart(given))
    )


def _picks(node: Node) -> bool:
    """Whether a node returns some of its argument's numbers, the larger ones."""
    return function_name(node) in ("relu", "relu_", *_POOLING)


def _picks_apart(node: Node) -> bool:
    """Whether a node picks, and changes no argument that another node takes."""
    if not _picks(node):
        return False
    is_pooling = function_name(node) in _POOLING
    is_plain = function_name(node) == "relu" and len(node.args) == 1
    is_new = is_pooling or (is_plain and not node.kwargs.get("inplace"))
    return is_new or _rounds_again(node)


def _is_layer(node: Node) -> bool:
    name = function_name(node)
    if name == "batch_norm":  # in training it changes its statistics
        given = [*node.args[5:6], node.kwargs.get("training", False)]
        return given[0] is False
    return name in _LAYERS and "out" not in node.kwargs
