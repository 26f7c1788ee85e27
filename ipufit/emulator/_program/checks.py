# SPDX-License-Identifier: Apache-2.0
"""Refuse traced programs that PopTorch doesn't compile, or computes otherwise.

Tracing refuses operations for their own arguments (`_tracing/refusals.py`). The checks
here need to know where the arguments come from, and which blocks operators run in.
Where it is certain that a device computes something else than torch, the program does
the same; where it is likely wrong or refused by a later compiler, the emulator refuses
it. Constants are computed by torch (PopTorch, `EvaluateConstexprs.cpp`).
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Iterator

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


def check_graph(graph: Graph, constants: set[Node]) -> None:
    """Refuse a traced program that doesn't compile.

    Args:
        graph: The traced program.
        constants: Nodes that are computed while the program is compiled.

    Raises:
        Error: `torch.triu` or the offsets of an embedding bag aren't of constants, or
            elements that aren't adjacent are changed in place.

    Example:
        >>> import torch
        >>> graph = Graph()
        >>> _ = graph.call_function(torch.triu, (graph.placeholder("x"),))
        >>> check_graph(graph, constants=set())
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: ... torch.triu is only supported within ...
    """
    for node in graph.nodes:
        if node not in constants:
            check_node(node, constants)


def check_node(node: Node, constants: set[Node]) -> None:
    """Refuse a node that doesn't compile, as `check_graph` does.

    Args:
        node: A node that isn't constant.
        constants: Nodes that are computed while the program is compiled.

    Raises:
        Error: As from `check_graph`.
    """
    name = function_name(node)
    if name in ("triu", "triu_"):
        raise createPoptorchError(
            "torch.triu is only supported within constant expressions: multiply by "
            "the triangle of a constant, torch.triu(torch.ones(n, n))."
        )
    if name == "embedding_bag":
        _check_offsets(node, constants)
    if is_in_place(node):
        _check_steps(node)


def _check_offsets(node: Node, constants: set[Node]) -> None:
    positional = node.args[2] if len(node.args) > 2 else None
    offsets = node.kwargs.get("offsets", positional)
    if isinstance(offsets, Node) and offsets not in constants:
        raise createPoptorchError(
            "Unsupported aten::embedding_bag operation: offsets tensor must be a "
            "constant, made in `forward` with torch.tensor or torch.arange."
        )


def _check_steps(node: Node) -> None:
    """Refuse a write to slices (also slices of slices) with a step other than 1."""
    indices = [node.args[1]] if function_name(node) == "__setitem__" else []
    base = node.args[0] if node.args else None
    while isinstance(base, Node) and function_name(base) == "__getitem__":
        indices.append(base.args[1])
        base = base.args[0]
    if any(_step(part) not in (None, 1) for index in indices for part in _parts(index)):
        raise createPoptorchError(
            "In-place modification of slices with step size other than 1 is not "
            "supported. Use torch.where with a constant mask."
        )


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _step(part: Any) -> Any:
    return part.step if isinstance(part, slice) else None


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
_SPREADS = frozenset({"std", "std_mean", "var", "var_mean"})


def compute_as_device(graph: Graph, constants: Collection[Node]) -> None:
    """Refuse operations a device likely gets wrong; replace those known to differ.

    Args:
        graph: A traced program, which is changed.
        constants: Its constant nodes; torch computes those.

    Raises:
        Error: The program divides whole numbers, divides with a rounding mode, or takes
            the mean of whole numbers.

    Example:
        >>> graph = Graph()
        >>> node = graph.call_function(torch.trunc, (graph.placeholder("x"),))
        >>> compute_as_device(graph, constants=())
        >>> node.target(torch.tensor([2.7, 1e10]))
        tensor([ 2.0000e+00, -2.1475e+09])
    """
    for node in graph.nodes:
        if node in constants or node.op not in ("call_function", "call_method"):
            continue
        check_numbers(node)
        name = function_name(node)
        if name in _SPREADS:
            _correct_by_one(node)
        elif name in _THROUGH_INT32:
            node.op, node.target = "call_function", _THROUGH_INT32[name]


def check_numbers(node: Node) -> None:
    """Refuse a node of which a device likely computes something else.

    Args:
        node: A node that isn't constant.

    Raises:
        Error: As from `compute_as_device`.
    """
    name = function_name(node)
    if name in _DIVISIONS or name in _FLOOR_DIVISIONS:
        _check_division(node, name)
    elif name == "mean" and node.meta.get("is_whole"):
        raise _whole("the mean of whole numbers", "x.float().mean()")


def other_numbers(node: Node) -> str:
    """The difference between a device's numbers and torch's, in words; "" for none.

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


def _check_division(node: Node, name: str) -> None:
    if name in _FLOOR_DIVISIONS:
        if node.meta.get("is_whole"):
            raise _whole("`//` of whole numbers", "torch.floor(x.float() / y)")
        return
    rounding = node.kwargs.get("rounding_mode")
    if rounding is not None:
        raise createPoptorchError(
            f"torch.div with rounding_mode={rounding!r}: PopTorch ignores the mode "
            f"(`AtenHandlers.gen.cpp`). Write torch.{rounding}(x.float() / y)."
        )
    if node.meta.get("is_whole"):
        raise _whole("division of whole numbers", "x.float() / y")


def _whole(what: str, way: str) -> Exception:
    return createPoptorchError(
        f"{what[:1].upper()}{what[1:]}: the device computes it in int32, truncated, or "
        "refuses to, where torch computes in floats. Convert first, for example "
        f"{way}; a share of matches is `(a == b).float().mean()`."
    )


def _correct_by_one(node: Node) -> None:
    """Take a correction for a truth value, as PopTorch does (`calculateVarMean`)."""
    correction = node.kwargs.get("correction")
    if correction is not None:
        node.kwargs = {**node.kwargs, "correction": int(bool(correction))}


def trunc(x: Tensor) -> Tensor:
    """torch.trunc through int32, as PopTorch's `truncHandler` computes it."""
    through_int32 = x.detach().to(torch.int32).to(x.dtype)
    return torch.where(x.abs() < 2.0**31, torch.trunc(x), through_int32)


def frac(x: Tensor) -> Tensor:
    """torch.frac through int32, as PopTorch's `fracHandler` computes it."""
    result: Tensor = x - x.detach().to(torch.int32).to(x.dtype)
    return result


_THROUGH_INT32: dict[str, Callable[[Tensor], Tensor]] = {
    "fix": trunc,
    "frac": frac,
    "trunc": trunc,
}
