# SPDX-License-Identifier: Apache-2.0
"""Strict mode: refuse the operators that PopTorch doesn't compile.

The emulator computes with all of torch. With `IPUFIT_EMULATOR_STRICT=1` a model with
operators that no IPU has fails when it is compiled, as on a pod.

As in PopTorch's dispatcher, the ATen operators count into which torch splits a
function: one that torch composes of supported operators compiles. So do functions of
constants, which are computed while the model is compiled, and unused results.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, Collection, Iterator, NamedTuple

from torch import Tensor
from torch.fx.graph import Graph
from torch.fx.node import Node
from torch.overrides import resolve_name

from ipufit.emulator._ground.switches import STRICT_VARIABLE
from ipufit.emulator._ground.without_compiler import DispatchMode
from ipufit.emulator._program.supported_ops import SUPPORTED_OPERATORS
from ipufit.emulator._tracing.constant_nodes import constant_nodes
from ipufit.emulator._tracing.operands import tensors_in
from ipufit.emulator._tracing.operation import recorded
from ipufit.emulator._tracing.recording import Recording
from ipufit.emulator._tracing.tracer import Tracer
from ipufit.emulator.errors import createPoptorchError

_OPERATION = "strict_operation"
_EMULATOR = "ipufit.emulator"
_ALTERNATIVES = {
    "diag": "x[i, i] with i = torch.arange(n)",
    "diagonal": "x[i, i] with i = torch.arange(n)",
    "histc": "torch.bucketize and torch.bincount",
    "huber_loss": "torch.nn.SmoothL1Loss",
    "index_add": "torch.scatter_add",
    "index_copy": "torch.scatter, or poptorch.dynamic_update",
    "isin": "(x[..., None] == values).any(-1)",
    "kthvalue": "torch.topk",
    "lerp": "start + weight * (end - start)",
    "logaddexp": "torch.logsumexp of torch.stack",
    "logical_xor": "x != y, of bools",
    "nan_to_num": "torch.where(torch.isnan(x), value, x)",
    "quantile": "torch.sort",
    "searchsorted": "torch.bucketize",
    "take": "x.flatten()[index]",
    "trace": "(x * torch.eye(n)).sum()",
    "tril": "x * torch.ones(n, n).tril()",
    "xlogy": "x * torch.log(y)",
}
"""Unsupported functions, and a replacement that PopTorch compiles."""


class _Operation(NamedTuple):
    """A call of a torch function, and the ATen operators that torch ran for it."""

    function: Callable[..., Any]
    operators: frozenset[str]


class OperatorWatch(DispatchMode):
    """Collects names of the ATen operators that torch runs for one operation.

    Operators on constants that were made during the operation don't count.

    Args:
        recording: Recording of the trace; only operators of its operations count.

    Attributes:
        operators: Names without overloads.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._recording = recording
        self.operators: set[str] = set()
        self._constants: dict[int, Tensor] = {}  # by id; kept alive: ids are reused

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and collect its name."""
        if not self._recording.is_running_operation:
            return func(*args, **(kwargs or {}))
        touched = [id(tensor) for tensor in tensors_in((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        results = {id(tensor): tensor for tensor in tensors_in(result)}
        if all(tensor in self._constants for tensor in touched):
            self._constants.update(results)
            return result
        for changed in self._constants.keys() & results.keys():
            del self._constants[changed]
        library, _, name = func._schema.name.partition("::")
        if library == "prim":  # what fake tensors are asked about themselves
            return result
        self.operators.add(_bare(name) if library == "aten" else f"{library}::{name}")
        return result


class StrictTracer(Tracer):
    """A tracer that keeps the ATen operators of each operation."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record an operation with its operators."""
        before = last_node(self.recording)
        with OperatorWatch(self.recording) as watch:
            result = super().__torch_function__(func, types, args, kwargs)
        note_operators(self.recording, before, recorded(func), watch)
        return result


def last_node(recording: Recording) -> Node | None:
    """The newest node of a recording; None if there is none."""
    return next(iter(reversed(recording.graph.nodes)), None)


def note_operators(
    recording: Recording,
    before: Node | None,
    function: Callable[..., Any],
    watch: OperatorWatch,
) -> None:
    """Keep the ATen operators of a function with the nodes that it has added.

    Args:
        recording: Recording of the trace.
        before: The newest node from before the function ran.
        function: The function.
        watch: Watch that it ran under.
    """
    operation = _Operation(function, frozenset(watch.operators))
    for node in reversed(recording.graph.nodes):
        if node is before:
            break
        node.meta.setdefault(_OPERATION, operation)


def refuse_unsupported_operators(
    graphs: Collection[Graph], constant_inputs: Collection[str]
) -> None:
    """Refuse a program with operators that PopTorch doesn't compile.

    Args:
        graphs: Recorded by a `StrictTracer`, without dead operations.
        constant_inputs: Names of inputs that are compiled in.

    Raises:
        Error: There are such operators; the message lists them all.
    """
    unsupported: dict[str, set[str]] = {}
    for graph in graphs:
        for _, name, operators in unsupported_nodes(graph, constant_inputs):
            unsupported[name] = unsupported.get(name, set()) | operators
    if unsupported:
        names = ", ".join(sorted(set().union(*unsupported.values())))
        sources = "; ".join(_advice(function) for function in sorted(unsupported))
        raise createPoptorchError(
            f"Unsupported ops found in compiled model: [{names}]. They come from "
            f"{sources}. Not all operations of torch run on an IPU (PopTorch user "
            'guide, "IPU supported operations"): compose them of those that do, or let '
            "the host compute them before or after the model. This is the emulator's "
            f"strict mode: without {STRICT_VARIABLE} it computes them all."
        )


def unsupported_nodes(
    graph: Graph, constant_inputs: Collection[str]
) -> Iterator[tuple[Node, str, set[str]]]:
    """Find the nodes of a graph with operators that PopTorch doesn't compile.

    Args:
        graph: Recorded with the operators of each operation.
        constant_inputs: Names of inputs that are compiled in.

    Yields:
        A node, the name of its function as users write it, and such operators.
    """
    constants = constant_nodes(graph, constant_inputs)
    for node in graph.nodes:
        operation = node.meta.get(_OPERATION)
        if operation is None or node in constants:
            continue
        operators = _unsupported(operation)
        if operators:
            yield node, _written(operation.function), operators


def alternative_to(function: str) -> str:
    """A way to write a function that PopTorch doesn't have; "" if none is known.

    Example:
        >>> alternative_to("torch.searchsorted")
        'torch.bucketize'
    """
    return _ALTERNATIVES.get(_bare(function.rpartition(".")[2]), "")


def _unsupported(operation: _Operation) -> set[str]:
    module = getattr(operation.function, "__module__", None) or ""
    name = getattr(operation.function, "__name__", "")
    if module.startswith(_EMULATOR) or _bare(name) in SUPPORTED_OPERATORS:
        return set()
    return {_qualified(name) for name in operation.operators - SUPPORTED_OPERATORS}


def _advice(function: str) -> str:
    way = alternative_to(function)
    return f"{function} (try {way})" if way else function


def _bare(name: str) -> str:
    """Remove the underscore at the end of the names of in-place functions."""
    return name if name.endswith("__") else name.rstrip("_")


def _qualified(operator: str) -> str:
    return operator if "::" in operator else f"aten::{operator}"


def _written(function: Callable[..., Any]) -> str:
    """A function's name as users write it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks at what is deprecated too
        name: str | None = resolve_name(function)  # type: ignore[no-untyped-call,unused-ignore]
    name = name or str(getattr(function, "__name__", function))
    name = name.replace(".__get__", "")  # a property
    return name.replace("torch.functional.", "torch.")
