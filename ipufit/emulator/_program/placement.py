# SPDX-License-Identifier: Apache-2.0
"""The blocks, stages and IPUs that the operators of a program run in."""

from __future__ import annotations

from typing import Collection, Iterator

from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._options.strategies import BlockPlacement
from ipufit.emulator._tracing.blame import blaming
from ipufit.emulator._tracing.constant_nodes import constant_nodes, function_name
from ipufit.emulator._tracing.liveness import effects_of
from ipufit.emulator.errors import createPoptorchError


def used_ipus(
    graphs: Collection[Graph], constant_inputs: Collection[str]
) -> tuple[int, ...]:
    """List the IPUs that operators run on, in the order of first use.

    Args:
        graphs: Graphs of a program, and of the bodies of its loops and branches.
        constant_inputs: Names of inputs that are compiled in.

    Returns:
        Numbers of IPUs; 0 alone if there is no operator.

    Raises:
        Error: An operator runs when no block is active. PopTorch sets the active IPU
            to none when a `with Block` ends (PopTorch, `Compiler.cpp` and
            `CompilerImpl.cpp`).

    Example:
        >>> used_ipus([Graph()], ())
        (0,)
    """
    ipus: dict[int, None] = {}
    for graph in graphs:
        for node in _lowered(graph, constant_inputs):
            block: BlockPlacement | None = node.meta.get("block")
            if block is None:
                error = createPoptorchError(
                    "No active Block, all the ops must belong to a Block: "
                    f"`{function_name(node)}` runs after a block was closed and before "
                    "another one begins. This counts for views, casts and constants, "
                    "and for the copy of an input that is returned as it is. Put it "
                    "inside `with poptorch.Block(...)`."
                )
                raise blaming(error, node)
            ipus[block.ipu] = None
    return tuple(ipus) or (0,)


def check_stages(graph: Graph) -> None:
    """Refuse a program that can't be pipelined over its IPUs.

    Raises:
        Error: A stage needs results of a later one, or is on two IPUs.
    """
    stages: dict[Node, int] = {}
    ipus: dict[int, int] = {}
    for node in graph.nodes:
        latest = max((stages[source] for source in node.all_input_nodes), default=0)
        block: BlockPlacement | None = node.meta.get("block")
        if block is None or not effects_of(node).is_operator:
            stages[node] = latest
            continue
        stages[node] = block.stage
        if latest > block.stage:
            error = createPoptorchError(
                f"Block '{block.block_id}' is in stage {block.stage} of the pipeline "
                f"but needs results of stage {latest}: stages must increase along the "
                "data. poptorch.AutoStage.AutoIncrement gives each block a stage of "
                "its own, several on one IPU if need be."
            )
            raise blaming(error, node)
        if ipus.setdefault(block.stage, block.ipu) != block.ipu:
            error = createPoptorchError(
                f"Stage {block.stage} of the pipeline is on IPU {ipus[block.stage]} "
                f"and, with `{function_name(node)}`, on IPU {block.ipu}. All ops with "
                "the same pipeline stage must also have the same virtual graph id "
                "(PopART, `ir.cpp`). What runs before the first block is in stage 0 "
                "on IPU 0: move it into the block, or put the first stage on IPU 0."
            )
            raise blaming(error, node)


def _lowered(graph: Graph, constant_inputs: Collection[str]) -> Iterator[Node]:
    """Yield the operators of a graph, and the constants that operators take."""
    constants = constant_nodes(graph, constant_inputs)
    for node in graph.nodes:
        is_constant = node in constants
        if effects_of(node).is_operator and (
            not is_constant or any(_computes(user, constants) for user in node.users)
        ):
            yield node


def _computes(user: Node, constants: Collection[Node]) -> bool:
    return user.op != "output" and user not in constants
