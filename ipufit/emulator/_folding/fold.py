# SPDX-License-Identifier: Apache-2.0
"""Make one program of several micro-batches with `torch.func.vmap`.

`vmap` runs the graph of a program once, on the rows of several micro-batches. What it
calls is recorded, and later calls replay that. So the work of `vmap`, which takes
longer than a small kernel, is done once.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor
from torch._C import _functorch as _vmap_of_torch
from torch._C import _nn, _set_grad_enabled, _VariableFunctions
from torch.autograd.function import Function
from torch.func import vmap  # type: ignore[attr-defined,unused-ignore]
from torch.fx.graph import Graph
from torch.fx.graph_module import GraphModule
from torch.fx.interpreter import Interpreter
from torch.fx.node import Node
from torch.nn.functional import cross_entropy, nll_loss

from ipufit.emulator._ground.torch_extras import DispatchMode
from ipufit.emulator._tracing.nodes import function_name
from ipufit.emulator._tracing.operation import map_tensors, tensors_in

Forward = Callable[..., Tuple[Tensor, ...]]

_functorch: Any = _vmap_of_torch
_BINDINGS = (_VariableFunctions, _nn, Tensor.__base__)
"""Where torch has functions of Python for its operators."""


def fold(
    program: GraphModule,
    arguments: Sequence[Tensor],
    num_weights: int,
    count: int,
) -> Forward:
    """Make a function that computes what a program does for several micro-batches.

    Args:
        program: It writes to no argument and draws no random numbers.
        arguments: The weights, then for each input the rows of all micro-batches.
        num_weights: The number of weights.
        count: The number of micro-batches.

    Returns:
        A function of the same arguments. Its results have a first dimension more than
        those of the program, for the micro-batches.

    Example:
        >>> program = torch.fx.symbolic_trace(lambda weight, x: ((weight * x).sum(),))
        >>> given = torch.tensor(2.0), torch.arange(6.0)
        >>> fold(program, given, 1, 3)(*given)
        (tensor([ 2., 10., 18.]),)
    """
    recorder = _Recorder()
    given = [recorder.placeholder(tensor) for tensor in arguments]
    run = vmap(_Interpreter(program, recorder).run, _dims(arguments, num_weights))
    is_fallback_enabled = _functorch._is_vmap_fallback_enabled()
    with recorder:
        rows = [_cut(tensor, count, 0) for tensor in given[num_weights:]]
        _functorch._set_vmap_fallback_enabled(False)  # it would loop inside
        try:
            results = run(*given[:num_weights], *rows)
        finally:
            _functorch._set_vmap_fallback_enabled(is_fallback_enabled)
    return recorder.finish(program, results)


def _dims(arguments: Sequence[Tensor], num_weights: int) -> tuple[int | None, ...]:
    return (*[None] * num_weights, *[0] * (len(arguments) - num_weights))


class _Recorder(DispatchMode):
    """Records the operations that run on plain tensors, each with its node."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._graph = Graph()
        self._is_paused = False

    def placeholder(self, tensor: Tensor) -> Tensor:
        """Add an argument."""
        return _noted(
            tensor, self._graph.placeholder(f"argument_{len(self._graph.nodes)}")
        )

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        """Add a tensor that the program has as an attribute."""
        return _noted(tensor, self._graph.get_attr(name))

    def set_grad_enabled(self, is_enabled: bool) -> None:
        """Record gradients from here on, or stop it."""
        self._graph.call_function(_set_grad_enabled, (is_enabled,))
        _set_grad_enabled(is_enabled)

    def call(self, op: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a function or a method, and record it as one operation."""
        method = op == "call_method"
        function = getattr(type(args[0]), target) if method else target
        self._is_paused = True
        try:
            results = function(*args, **kwargs)
        finally:
            self._is_paused = False
        self._add(op, target, args, kwargs, results)
        return results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not self._is_paused:
            node = self._add("call_function", func, args, kwargs or {}, results)
            node.meta["writes"] = func._schema.is_mutable
            name = func._schema.name.split("::")[1]
            for home in _BINDINGS:  # called in half the time
                if hasattr(home, name):
                    node.target = getattr(home, name)
                    break
        return results

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, results: Any) -> Node:
        args, kwargs = map_tensors(args, _node), map_tensors(kwargs, _node)
        node: Node = self._graph.create_node(op, target, args, kwargs)
        if isinstance(results, Tensor):
            results._node = node  # type: ignore[attr-defined,unused-ignore]
            return node
        for index, result in enumerate(results):
            if isinstance(result, Tensor):
                item = self._graph.call_function(operator.getitem, (node, index))
                result._node = item  # type: ignore[attr-defined,unused-ignore]
        return node

    def finish(self, program: GraphModule, results: Sequence[Tensor]) -> Forward:
        """Make a function of the graph, without operations that nobody needs."""
        self._graph.output(tuple(_node(result) for result in results))
        for node in reversed(list(self._graph.nodes)):
            has_effects = node.target is _set_grad_enabled or node.meta.get("writes")
            if node.op.startswith("call") and not (node.users or has_effects):
                self._graph.erase_node(node)
        forward: Forward = GraphModule(program, self._graph).forward
        return forward


def _noted(tensor: Tensor, node: Node) -> Tensor:
    alias: Tensor = tensor.detach().requires_grad_(tensor.requires_grad)
    alias._node = node  # type: ignore[attr-defined,unused-ignore]
    return alias


def _node(tensor: Tensor) -> Node:
    node = getattr(tensor, "_node", None)
    if not isinstance(node, Node):  # its value would be compiled in
        raise RuntimeError("a tensor comes from outside of the program")
    found: Node = node
    return found


class _Interpreter(Interpreter):
    """Runs the graph of a program under `vmap`."""

    def __init__(self, program: GraphModule, recorder: _Recorder) -> None:
        super().__init__(program)  # type: ignore[no-untyped-call,unused-ignore]
        self._recorder = recorder

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        if n.target is _set_grad_enabled:
            return self._recorder.set_grad_enabled(bool(n.args[0]))
        if n.op == "get_attr":
            value = super().run_node(n)
            is_tensor = isinstance(value, Tensor)
            return self._recorder.constant(str(n.target), value) if is_tensor else value
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not tensors_in((args, kwargs)):
            return self._recorder.call(n.op, n.target, args, kwargs)
        reduced = _reduction_of_rows(n, kwargs)
        if reduced is not None:
            kwargs = {**kwargs, "reduction": "none"}
        rows = _find_rows(function_name(n), args, kwargs)
        if rows is None:
            return super().run_node(n)
        run = functools.partial(self._run_whole, n, args, kwargs, rows)
        result = _Whole.apply(run, *rows.tensors)  # type: ignore[no-untyped-call]
        return result if reduced is None else reduced(result, args[1])

    def _run_whole(
        self,
        node: Node,
        args: Any,
        kwargs: Any,
        rows: _Rows,
        count: int,
        batch_dims: Sequence[int | None],
        tensors: Sequence[Tensor],
    ) -> tuple[Any, Any]:
        """Run an operation on the rows of all micro-batches, side by side.

        Args:
            count: The number of micro-batches.
            batch_dims: The dimension of the micro-batches of each of `tensors`.
            tensors: The tensors of `rows`.
        """
        together: dict[int, Tensor] = {}
        for old, dim, at, tensor in zip(rows.tensors, rows.dims, batch_dims, tensors):
            if at is None:
                at, tensor = 0, tensor.expand(count, *tensor.shape)
            if dim is None:
                together[id(old)] = tensor.movedim(at, 0) if at else tensor
            else:
                together[id(old)] = _joined(tensor, at, dim)
        given = map_tensors((args, kwargs), lambda t: together.get(id(t), t))
        results = self._recorder.call(node.op, node.target, *given)
        if isinstance(results, Tensor):
            dim = rows.results[0]
            return (results, 0) if dim is None else (_cut(results, count, dim), dim)
        cut = [
            result if dim is None else _cut(result, count, dim)
            for result, dim in zip(results, rows.results)
        ]
        return tuple(cut), rows.results


def _cut(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Cut a dimension of rows into one of micro-batches, and one of their rows."""
    cut: Tensor = tensor.unflatten(dim, (count, -1))  # type: ignore[no-untyped-call,unused-ignore]
    cut._joined = dim, tensor  # type: ignore[attr-defined,unused-ignore]
    return cut


def _joined(tensor: Tensor, at: int, dim: int) -> Tensor:
    """Join the dimension `at` of micro-batches with their rows, in dimension `dim`."""
    known = getattr(tensor, "_joined", None)
    if known is not None and known[0] == at == dim:
        joined: Tensor = known[1]
        return joined
    moved = tensor if at == dim else tensor.movedim(at, dim)
    flat: Tensor = moved.flatten(dim, dim + 1)
    return flat


class _Whole(Function):
    """Runs an operation that `vmap` shall not take apart."""

    @staticmethod
    def forward(run: Any, *tensors: Tensor) -> Any:  # type: ignore[override,unused-ignore]
        raise AssertionError("no argument depends on the micro-batch")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, *tensors: Tensor) -> Any:  # type: ignore[override,unused-ignore]
        return run(info.batch_size, in_dims[1:], tensors)


class _Rows(NamedTuple):
    """The arguments of an operation that have rows, each of which counts by itself.

    Attributes:
        tensors: These arguments. No other one depends on the micro-batch.
        dims: The dimension of the rows of each; None if more dimensions don't matter.
        results: The dimension of the rows of each result.
    """

    tensors: tuple[Tensor, ...]
    dims: tuple[int | None, ...]
    results: tuple[int | None, ...]


def _reduction_of_rows(node: Node, kwargs: Any) -> Callable[..., Tensor] | None:
    """A loss that is reduced over the rows of a micro-batch: how; None for others.

    `vmap` has rules for the losses of rows by `cross_entropy` and `nll_loss`, but for
    their mean it imports a compiler.
    """
    if node.target not in (cross_entropy, nll_loss):
        return None
    if any(kwargs.get(n) is not None for n in ("weight", "size_average", "reduce")):
        return None
    reduction = kwargs.get("reduction")
    if reduction not in ("sum", "mean"):
        return None

    def reduced(losses: Tensor, target: Tensor) -> Tensor:
        total: Tensor = losses.sum()
        if reduction == "sum":
            return total
        is_of_classes = not target.is_floating_point()
        known: Tensor = target.ne(kwargs["ignore_index"]).sum()
        return torch.div(total, known if is_of_classes else losses.numel())

    return reduced


_OF_IMAGES = {
    name.format(rank): rank + 2
    for rank in (1, 2, 3)
    for name in (
        *("conv{}d", "conv_transpose{}d", "max_pool{}d", "avg_pool{}d"),
        *("adaptive_max_pool{}d", "adaptive_avg_pool{}d"),
    )
}
"""The number of dimensions of what these operations take."""


def _find_rows(name: str, args: Any, kwargs: Any) -> _Rows | None:
    """Find the rows of an operation that runs as a whole; None if `vmap` runs it.

    `vmap` would take recurrent layers and attention apart, and make more operations of
    convolutions and products than need be.
    """
    x: Any = args[0] if args else None
    if not isinstance(x, Tensor):
        return None
    rank = x.dim()
    found: list[tuple[Any, int | None]] = []
    results: tuple[int | None, ...] = (0,)
    if name == "linear" and rank > 1:
        found, results = [(x, None)], (None,)
    elif (
        _OF_IMAGES.get(name) == rank
        or (name == "to" and kwargs.get("memory_format") is torch.channels_last)
        or (name == "batch_norm" and rank > 1 and not _learns(args, kwargs))
    ):
        found = [(x, 0)]
    elif name in ("cross_entropy", "nll_loss") and rank > 1 and len(args) == 2:
        if kwargs.get("reduction") == "none":
            found = [(x, 0), (args[1], 0)]
    elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and rank == 3:
        dim = 0 if args[8] else 1  # batch_first
        states = list(tensors_in(args[1]))
        found = [(x, dim), *((state, 1) for state in states)]
        results = (dim, *[1] * len(states))
    elif name == "scaled_dot_product_attention" and rank > 2:
        found = [(tensor, 0) for tensor in args[:3]]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if mask is not None and mask.dim() == rank and len(mask) > 1:
            found += [(mask, 0)]
    elif name == "multi_head_attention_forward" and rank == 3 and len(args) < 15:
        mask = kwargs.get("attn_mask")
        if mask is None or mask.dim() == 2:
            found = [(tensor, 1) for tensor in args[:3]]
            padding = kwargs.get("key_padding_mask")
            found += [] if padding is None else [(padding, 0)]
            results = (1, 0 if kwargs.get("need_weights", True) else None)
    own = {id(tensor) for tensor, _ in found}
    batched = [
        id(t) for t in tensors_in((args, kwargs)) if _functorch.is_batchedtensor(t)
    ]
    if not batched or not own.issuperset(batched):
        return None
    tensors, dims = zip(*found)
    return _Rows(tensors, dims, results)


def _learns(args: Any, kwargs: Any) -> bool:
    """Whether batch norm takes statistics of the batch."""
    return bool(args[5] if len(args) > 5 else kwargs.get("training"))
