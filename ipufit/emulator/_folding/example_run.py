# SPDX-License-Identifier: Apache-2.0
"""Run a program once, to see what each node does with which memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Sequence

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph_module import GraphModule
from torch.fx.node import Node, map_arg

from ipufit.emulator._ground.torch_extras import DispatchMode
from ipufit.emulator._tracing.operation import tensors_in


@dataclass(frozen=True)
class NodeRecord:
    """A record of one node of a program that ran.

    Attributes:
        value: Result of the node.
        touched: The memory of its arguments and results.
        written: The memory of arguments that it changed.
        passed_on: The memory of arguments that results have too: they are views.
        results: The memory of its results.
        is_random: Whether it drew random numbers.
        is_grad_enabled: Whether the program has gradients recorded here.
        new_bytes: The memory of the tensors made while it ran.
    """

    value: Any
    touched: frozenset[int]
    written: frozenset[int]
    passed_on: frozenset[int]
    results: frozenset[int]
    is_random: bool
    is_grad_enabled: bool
    new_bytes: int


def run_example(
    graph: GraphModule,
    arguments: Sequence[Tensor],
    *,
    is_grad_enabled: bool,
    unchanged: Collection[int] = (),
) -> dict[Node, NodeRecord]:
    """Run every node once, without gradients.

    Neither the arguments nor torch's random state change.

    Args:
        graph: The graph of a program.
        arguments: The weights and inputs of the program, in order.
        is_grad_enabled: Whether it starts with gradients recorded.
        unchanged: Indices of arguments that the program only reads, each in memory of
            its own. They aren't copied: weights may be most of what memory holds.

    Returns:
        A record of each node but the output. All values stay in memory as long as the
        records do.

    Example:
        >>> program = torch.fx.symbolic_trace(lambda x: x.add_(1) * 2)
        >>> records = run_example(program, [torch.ones(3)], is_grad_enabled=False)
        >>> [bool(record.written) for record in records.values()]
        [False, True, False]
    """
    rng_state = torch.random.get_rng_state()
    try:
        with torch.no_grad():
            plain = [tensor.detach() for tensor in arguments]
            copies = (
                tensor if index in unchanged else tensor.clone()
                for index, tensor in enumerate(plain)
            )
            return _run(graph, copies, is_grad_enabled)
    finally:
        torch.random.set_rng_state(rng_state)


def _run(
    graph: GraphModule, arguments: Any, is_grad_enabled: bool
) -> dict[Node, NodeRecord]:
    records: dict[Node, NodeRecord] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        if node.target is _set_grad_enabled:
            is_grad_enabled = bool(node.args[0])
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: records[n].value)
        versions = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        rng_state = torch.random.get_rng_state()
        with _NewMemory() as memory:
            value = _value(graph, node, arguments, args, kwargs)
        written = {_memory(t) for t, version in versions if t._version != version}
        given = frozenset(map(_memory, tensors_in((args, kwargs)))) - {0}
        results = frozenset(map(_memory, tensors_in(value))) - {0}
        records[node] = NodeRecord(
            value,
            given | results,
            frozenset(written) - {0},
            given & results,
            results,
            not torch.equal(rng_state, torch.random.get_rng_state()),
            is_grad_enabled,
            memory.total_bytes,
        )
    return records


def _value(
    graph: GraphModule, node: Node, arguments: Any, args: Any, kwargs: Any
) -> Any:
    target: Any = node.target
    if node.op == "placeholder":
        return next(arguments)
    if node.op == "get_attr":
        return getattr(graph, target)
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


class _NewMemory(DispatchMode):
    """Adds up the sizes of the tensors that are made while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.total_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {_memory(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if _memory(tensor) not in old:
                self.total_bytes += tensor.untyped_storage().nbytes()
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_sparse else id(tensor)
