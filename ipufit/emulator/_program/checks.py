# SPDX-License-Identifier: Apache-2.0
"""Refuse traced programs that PopTorch doesn't compile, or computes otherwise.

Tracing refuses operations for their own arguments (`_tracing/refusals.py`). The checks
here need to know which nodes are constant, and which blocks operators run in. Where a
device certainly computes other numbers than torch, the program computes the device's.
Where it probably computes wrong numbers, or a later compiler refuses the program, the
emulator refuses it. Constants are computed by torch (PopTorch,
`EvaluateConstexprs.cpp`).
"""

from __future__ import annotations

from typing import Callable, Collection

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node

from ipufit.emulator._options.strategies import BlockPlacement
from ipufit.emulator._tracing.nodes import (
    constant_nodes,
    effects_of,
    error_about,
    function_name,
    is_in_place,
)
from ipufit.emulator.errors import createPoptorchError


def check_node(node: Node, constants: set[Node]) -> None:
    """Refuse a node that PopTorch doesn't compile.

    Args:
        node: A node that isn't constant.
        constants: Nodes that are computed while the program is compiled.

    Raises:
        Error: The argument of `torch.triu`, or the offsets of an embedding bag, aren't
            constant; or a slice with a step is changed in place.
    """
    name = function_name(node)
    if name in ("triu", "triu_"):
        raise createPoptorchError(
            "torch.triu is only supported within constant expressions: multiply by "
            "the triangle of a constant, torch.triu(torch.ones(n, n))."
        )
    if name == "embedding_bag":
        offsets = node.kwargs.get("offsets", (*node.args, None, None, None)[2])
        if isinstance(offsets, Node) and offsets not in constants:
            raise createPoptorchError(
                "Unsupported aten::embedding_bag operation: offsets tensor must be a "
                "constant, made in `forward` with torch.tensor or torch.arange."
            )
    if is_in_place(node):
        indices = [node.args[1]] if name == "__setitem__" else []
        base = node.args[0] if node.args else None
        while isinstance(base, Node) and function_name(base) == "__getitem__":
            indices.append(base.args[1])  # a slice of a slice
            base = base.args[0]
        parts = [p for i in indices for p in (i if isinstance(i, tuple) else (i,))]
        if any(isinstance(p, slice) and p.step not in (None, 1) for p in parts):
            raise createPoptorchError(
                "In-place modification of slices with step size other than 1 is not "
                "supported. Use torch.where with a constant mask."
            )


def check_numbers(node: Node) -> None:
    """Refuse a node for which a device probably computes other numbers.

    Args:
        node: A node that isn't constant.

    Raises:
        Error: It divides whole numbers, divides with a rounding mode, or takes the mean
            of whole numbers.
    """
    name = function_name(node)
    rounding = node.kwargs.get("rounding_mode")
    if name in _DIVISIONS and rounding is not None:
        raise createPoptorchError(
            f"torch.div with rounding_mode={rounding!r}: PopTorch ignores the mode "
            f"(`AtenHandlers.gen.cpp`). Write torch.{rounding}(x.float() / y)."
        )
    for names, what, way in _OF_WHOLE_NUMBERS:
        if name in names and node.meta.get("is_whole"):
            raise createPoptorchError(
                f"{what} of whole numbers: the device computes it in int32, truncated, "
                "or refuses to, where torch computes in floats. Convert first, for "
                f"example {way}; a share of matches is `(a == b).float().mean()`."
            )


def other_numbers(node: Node) -> str:
    """Describe how a device's numbers differ from torch's; "" if they don't.

    Args:
        node: A node that isn't constant and compiles.
    """
    name = function_name(node)
    correction = node.kwargs.get("correction")
    if name in _SPREADS and correction not in (None, 0, 1, True, False):
        return (
            f"{name}(correction={correction}) is computed with a correction of 1: "
            "PopTorch takes the number for a truth value (`calculateVarMean`)."
        )
    if name in _THROUGH_INT32:
        return (
            f"torch.{name} goes through int32 (`truncHandler`): values of 2**31 and "
            "more come out wrong."
        )
    return ""


def compute_as_device(graph: Graph, constants: set[Node]) -> None:
    """Refuse a program that doesn't compile; replace functions by the device's.

    Args:
        graph: A traced program, which is changed.
        constants: Its constant nodes, which torch computes.

    Raises:
        Error: As from `check_node` and `check_numbers`.

    Example:
        >>> graph = Graph()
        >>> node = graph.call_function(torch.trunc, (graph.placeholder("x"),))
        >>> compute_as_device(graph, constants=set())
        >>> node.target(torch.tensor([2.7, 1e10]))
        tensor([ 2.0000e+00, -2.1475e+09])
    """
    nodes = [node for node in graph.nodes if node not in constants]
    for node in nodes:
        check_node(node, constants)
    for node in nodes:
        check_numbers(node)
        name, correction = function_name(node), node.kwargs.get("correction")
        if name in _SPREADS and correction is not None:
            node.kwargs = {**node.kwargs, "correction": int(bool(correction))}
        elif name in _THROUGH_INT32:
            node.op, node.target = "call_function", _THROUGH_INT32[name]


def _trunc(x: Tensor) -> Tensor:
    """Compute torch.trunc through int32, as PopTorch's `truncHandler` does."""
    through_int32 = x.detach().to(torch.int32).to(x.dtype)
    return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)


def _frac(x: Tensor) -> Tensor:
    """Compute torch.frac through int32, as PopTorch's `fracHandler` does."""
    result: Tensor = x - x.detach().to(torch.int32).to(x.dtype)
    return result


_THROUGH_INT32: dict[str, Callable[[Tensor], Tensor]] = {
    "fix": _trunc,
    "frac": _frac,
    "trunc": _trunc,
}
_SPREADS = frozenset({"std", "std_mean", "var", "var_mean"})
_DIVISIONS = frozenset(
    """
    __idiv__ __itruediv__ __truediv__ div div_ divide divide_ true_divide true_divide_
    """.split()  # noqa: SIM905 - one per line would be a page
)
_FLOOR_DIVISIONS = frozenset(
    """
    __floordiv__ __ifloordiv__ __rfloordiv__ floor_divide floor_divide_
    """.split()  # noqa: SIM905
)
_OF_WHOLE_NUMBERS = (
    (_DIVISIONS, "Division", "x.float() / y"),
    (_FLOOR_DIVISIONS, "`//`", "torch.floor(x.float() / y)"),
    (frozenset({"mean"}), "The mean", "x.float().mean()"),
)


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
    """
    ipus: dict[int, None] = {}
    for graph in graphs:
        constants = constant_nodes(graph, constant_inputs)
        for node in graph.nodes:
            users = [user for user in node.users if user.op != "output"]
            is_constant = node in constants and constants.issuperset(users)
            if is_constant or not effects_of(node).is_operator:
                continue
            block: BlockPlacement | None = node.meta.get("block")
            if block is None:
                raise error_about(
                    "No active Block, all the ops must belong to a Block: "
                    f"`{function_name(node)}` runs after a block was closed and before "
                    "another one begins. This counts for views, casts and constants, "
                    "and for the copy of an input that is returned as it is. Put it "
                    "inside `with poptorch.Block(...)`.",
                    node,
                )
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
            raise error_about(
                f"Block '{block.block_id}' is in stage {block.stage} of the pipeline "
                f"but needs results of stage {latest}: stages must increase along the "
                "data. poptorch.AutoStage.AutoIncrement gives each block a stage of "
                "its own, several on one IPU if need be.",
                node,
            )
        if ipus.setdefault(block.stage, block.ipu) != block.ipu:
            raise error_about(
                f"Stage {block.stage} of the pipeline is on IPU {ipus[block.stage]} "
                f"and, with `{function_name(node)}`, on IPU {block.ipu}. All ops with "
                "the same pipeline stage must also have the same virtual graph id "
                "(PopART, `ir.cpp`). What runs before the first block is in stage 0 "
                "on IPU 0: move it into the block, or put the first stage on IPU 0.",
                node,
            )
