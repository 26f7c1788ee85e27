# SPDX-License-Identifier: Apache-2.0
"""The nodes of a graph that an error is about, whose source lines a survey shows."""

from __future__ import annotations

from torch.fx.node import Node

from ipufit.emulator.errors import Error

_NODES = "_blamed_nodes"


def blaming(error: Error, *nodes: Node) -> Error:
    """Note the nodes that an error is about.

    Example:
        >>> from torch.fx.graph import Graph
        >>> node = Graph().placeholder("x")
        >>> blamed_nodes(blaming(Error("wrong"), node)) == (node,)
        True
    """
    vars(error)[_NODES] = nodes
    return error


def blamed_nodes(error: Error) -> tuple[Node, ...]:
    """The nodes that an error is about; none if nobody has noted any."""
    nodes: tuple[Node, ...] = vars(error).get(_NODES, ())
    return nodes
