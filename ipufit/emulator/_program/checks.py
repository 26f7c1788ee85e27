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

from typing import Any, Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node, map_aggregate

from ipufit.emulator._options.strategies import BlockPlacement
from ipufit.emulator._tracing.nodes import (
    constant_nodes,
    effects_of,
    error_about,
    function_name,
    is_in_place,
)
from ipufit.emulator._tracing.operation import tensors_in
from ipufit.emulator.errors import Error, createPoptorchError


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


# Floating-point exceptions -------------------------------------------------------
#
# With `Options.Precision.enableFloatingPointExceptions(True)` a device stops at a
# division by zero, an invalid operation, a comparison with NaN, or an overflow. The
# emulator checks each operation of the forward pass for results that are not finite
# although its arguments are. It checks the backward pass by gradients of weights.

_COMPARISONS = frozenset(
    form
    for name in ("eq", "ge", "gt", "le", "lt", "ne")
    for form in (name, f"__{name}__")
)


def check_operations(program: GraphModule) -> None:
    """Insert a check for exceptions after every operation of a program.

    Example:
        >>> import torch
        >>> program = torch.fx.symbolic_trace(lambda x: 1.0 / x)
        >>> check_operations(program)
        >>> program(torch.zeros(1))
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': Floating point exception...
    """
    for node in program.graph.nodes:
        is_uninitialised = function_name(node).startswith(("empty", "new_empty"))
        if node.op in ("call_function", "call_method") and not is_uninitialised:
            node.target, node.op = _checking(node), "call_function"
    program.recompile()


def refuse_bad_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise if a gradient is not finite.

    Raises:
        Error: A gradient is NaN or infinite; the message names its weight.

    Example:
        >>> import torch
        >>> refuse_bad_gradients({"weight": torch.ones(2), "bias": None})
    """
    for name, gradient in gradients.items():
        if gradient is not None and not gradient.isfinite().all():
            raise _exception(f"the gradient of {name} is not finite")


def _checking(node: Node) -> Callable[..., Any]:
    target: Any = node.target
    is_method = node.op == "call_method"
    name = function_name(node)

    def check(*args: Any, **kwargs: Any) -> Any:
        had_nan, had_infinity = _has_nan_and_infinity((args, kwargs))
        call = getattr(args[0], target) if is_method else target
        result = call(*(args[1:] if is_method else args), **kwargs)
        has_nan, has_infinity = _has_nan_and_infinity(result)
        if has_nan and not had_nan:
            raise _exception(f"`{name}` gave NaN (an invalid operation)")
        if has_infinity and not (had_infinity or had_nan):
            raise _exception(
                f"`{name}` gave infinity (an overflow or a division by zero)"
            )
        if name in _COMPARISONS and had_nan:
            raise _exception(f"`{name}` compared a NaN")
        return result

    check.__name__ = check.__qualname__ = f"checked_{name}"
    return check


def _has_nan_and_infinity(value: Any) -> tuple[bool, bool]:
    """Return whether nested values contain NaN, and whether infinities."""
    tensors = [t for t in tensors_in(value) if t.is_floating_point()]
    numbers: list[Any] = []
    map_aggregate(value, lambda v: numbers.append(v) if isinstance(v, float) else v)
    tensors += [torch.tensor(number, dtype=torch.float64) for number in numbers]
    return (
        any(bool(tensor.isnan().any()) for tensor in tensors),
        any(bool(tensor.isinf().any()) for tensor in tensors),
    )


def _exception(what: str) -> Error:
    return createPoptorchError(
        f"Floating point exception: {what}. "
        "Options.Precision.enableFloatingPointExceptions(True) asks to stop here."
    )
