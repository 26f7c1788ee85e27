# SPDX-License-Identifier: Apache-2.0
"""Run several micro-batches at once, where the results are those of the loop.

A group of micro-batches that run at once is a fold. The choice depends only on the
program, its options and two environment variables, never on measured times: two runs of
a script give the same numbers bit for bit.

`torch.func.vmap` runs the graph of a program once, on the rows of several micro-
batches. The torch operations that it calls are recorded, and later calls replay them:
`vmap` itself takes longer than a small kernel.
"""

from __future__ import annotations

import functools
import logging
import operator
from time import perf_counter
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch._C import _functorch as _vmap_of_torch
from torch._C import _set_grad_enabled
from torch.autograd.function import Function
from torch.func import vmap  # type: ignore[attr-defined,unused-ignore]
from torch.fx.graph import Graph
from torch.fx.interpreter import Interpreter
from torch.fx.node import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy, nll_loss

from .._logging import logger
from .._printing import print_tensor
from .._switches import FOLD_VARIABLE, fold_bytes, is_on
from ..ops import call_on_host, run_branch, run_custom_op, run_loop
from ..options import Settings
from .autograd_grad import function_of
from .device import Collect, DeviceCall, Results, Runner
from .float16 import ROUNDING
from .graph import (
    DispatchMode,
    GraphModule,
    effects_of,
    function_name,
    map_tensors,
    storage_of,
    tensors_in,
)
from .layout import Layout, ReplicaGroups
from .program import Program

Forward = Callable[..., Tuple[Tensor, ...]]

_functorch: Any = _vmap_of_torch


def fold(
    program: GraphModule,
    arguments: Sequence[Tensor],
    num_weights: int,
    count: int,
    *,
    is_stacked: bool = False,
) -> Forward:
    """Return a function that runs a program on several micro-batches at once.

    Args:
        program: A graph that writes to no argument and draws no random numbers.
        arguments: The weights, then for each input the rows of all micro-batches.
        num_weights: The number of weights.
        count: The number of micro-batches.
        is_stacked: Whether the inputs have a first dimension of the micro-batches, and
            not their rows one after the other.

    Returns:
        A function of the same arguments. Its results have a new first dimension, one
        entry for each micro-batch.

    Example:
        >>> program = torch.fx.symbolic_trace(lambda weight, x: ((weight * x).sum(),))
        >>> given = torch.tensor(2.0), torch.arange(6.0)
        >>> fold(program, given, 1, 3)(*given)
        (tensor([ 2., 10., 18.]),)
    """
    recorder = _Recorder()
    given = [recorder.placeholder(tensor) for tensor in arguments]
    dims = (*[None] * num_weights, *[0] * (len(arguments) - num_weights))
    run = vmap(_Interpreter(program, recorder).run, dims)
    is_fallback_enabled = _functorch._is_vmap_fallback_enabled()
    with recorder:
        rows = given[num_weights:]
        if not is_stacked:
            rows = [_cut(tensor, count, 0) for tensor in rows]
        _functorch._set_vmap_fallback_enabled(False)  # it would loop inside
        try:
            results = run(*given[:num_weights], *rows)
        finally:
            _functorch._set_vmap_fallback_enabled(is_fallback_enabled)
    return recorder.finish(program, results)


class _Recorder(DispatchMode):
    """Records operations on plain tensors as nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._graph = Graph()
        self._is_paused = False

    def placeholder(self, tensor: Tensor) -> Tensor:
        """Add an argument to the graph, and return the tensor to compute with."""
        return _with_node(
            tensor, self._graph.placeholder(f"argument_{len(self._graph.nodes)}")
        )

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        """Add a tensor that the program stores as an attribute."""
        self._is_paused = True
        try:
            return _with_node(tensor, self._graph.get_attr(name))
        finally:
            self._is_paused = False

    def set_grad_enabled(self, is_enabled: bool) -> None:
        """Record that gradients are on or off from here on."""
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
            node.target = function_of(func)  # called in half the time
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
        """Return a function of the graph without its dead operations."""
        self._graph.output(tuple(_node(result) for result in results))
        for node in reversed(list(self._graph.nodes)):
            has_effects = node.target is _set_grad_enabled or node.meta.get("writes")
            if node.op.startswith("call") and not (node.users or has_effects):
                self._graph.erase_node(node)
        return GraphModule(program, self._graph).forward


def _with_node(tensor: Tensor, node: Node) -> Tensor:
    alias = tensor.detach()
    # `vmap` refuses requires_grad_(), even with False as for its constants.
    alias = alias.requires_grad_() if tensor.requires_grad else alias
    alias._node = node  # type: ignore[attr-defined,unused-ignore]
    return alias


def _node(tensor: Tensor) -> Node:
    node = getattr(tensor, "_node", None)
    if not isinstance(node, Node):  # its value would be compiled in
        raise RuntimeError("a tensor comes from outside of the program")
    return node


class _Interpreter(Interpreter):
    """Runs the graph of a program under `vmap`."""

    def __init__(self, program: GraphModule, recorder: _Recorder) -> None:
        super().__init__(program)  # type: ignore[no-untyped-call,unused-ignore]
        self._recorder = recorder

    def run_node(self, n: Node) -> Any:
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
        """Run an operation once, on the rows of all micro-batches side by side.

        Args:
            count: The number of micro-batches.
            batch_dims: For each of `tensors` the dimension of the micro-batches; None
                if it has none.
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
    """Split a dimension of rows into micro-batches and the rows of each."""
    cut: Tensor = tensor.unflatten(dim, (count, -1))  # type: ignore[no-untyped-call,unused-ignore]
    cut._joined = dim, tensor  # type: ignore[attr-defined,unused-ignore]
    return cut


def _joined(tensor: Tensor, at: int, dim: int) -> Tensor:
    """Join dimension `at`, the micro-batches, with dimension `dim`, their rows."""
    known = getattr(tensor, "_joined", None)
    if known is not None and known[0] == at == dim:
        return known[1]
    moved = tensor if at == dim else tensor.movedim(at, dim)
    return moved.flatten(dim, dim + 1)


class _Whole(Function):
    """Runs an operation on joined rows, where `vmap` must not split it."""

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
    """The arguments of an operation whose rows are independent of each other.

    Attributes:
        tensors: These arguments. No other argument depends on the micro-batch.
        dims: Dimension of the rows of each; None if further dimensions are allowed.
        results: Dimension of the rows of each result.
    """

    tensors: tuple[Tensor, ...]
    dims: tuple[int | None, ...]
    results: tuple[int | None, ...]


def _reduction_of_rows(node: Node, kwargs: Any) -> Callable[..., Tensor] | None:
    """Return the reduction of a loss over the rows of a micro-batch, or None.

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
"""Number of dimensions of the input of these operations."""


def _find_rows(name: str, args: Any, kwargs: Any) -> _Rows | None:
    """Return the rows of an operation to run on joined rows; None to let `vmap` run it.

    `vmap` would split recurrent layers and attention into small operations, and would
    run more operations than needed for convolutions and products.
    """
    x: Any = args[0] if args else None
    if not isinstance(x, Tensor):
        return None
    rank = x.dim()
    found: list[tuple[Any, int | None]] = []
    results: tuple[int | None, ...] = (0,)
    learns = args[5] if len(args) > 5 else kwargs.get("training")  # of batch norm
    if name == "linear" and rank > 1:
        found, results = [(x, None)], (None,)
    elif (
        _OF_IMAGES.get(name) == rank
        or (name == "to" and kwargs.get("memory_format") is torch.channels_last)
        or (name == "batch_norm" and rank > 1 and not learns)
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


_RELATIVE = 1e-4
"""How far folds and loop may differ, as a share of a tensor's largest element."""

_RELATIVE_OF_HALF = 0.05
"""The same where values are rounded to float16 on the way.

A sum that is made in another order may be rounded to the next number: a step of 0.001,
which all that follows carries on.
"""

_SHARE_OF_LARGEST = 1e-6
"""The difference allowed besides, as a share of the largest element of all tensors.

Gradients that are 0 but for rounding, such as those of the keys' biases in attention,
have no size of their own.
"""

_LOOPED = "Micro-batches run one after the other: %s"
_LOOPED_OPERATIONS = {
    run_custom_op: "it runs what stands in for a custom operation",
    call_on_host: "it calls the host (poptorch.CPU)",
    print_tensor: "it prints a tensor (poptorch.ipu_print_tensor)",
    run_branch: "it branches (poptorch.cond)",
    run_loop: "it loops (poptorch.for_loop)",
}
"""Operations that must run as often as a device runs them, in the same order."""


def choose_runner(
    program: Program,
    layout: Layout,
    settings: Settings,
    groups: Mapping[str, ReplicaGroups],
) -> Runner:
    """Return the runner of a program: in folds where they are allowed, else in a loop.

    `groups` are the weights that differ between groups of replicas.
    """
    writes = program.updated_weights or program.volatile_weights
    reasons: dict[str, object] = {
        "folds are turned off": not is_on(FOLD_VARIABLE, default=True),
        "there is one only": len(layout.micro_batches) == 1,
        "replicas have weights of their own": groups,
        "replicas share inputs": layout.input_groups != layout.replicas,
        "rounding is stochastic": settings.rounds_at_random,
        "it is to stop at floating-point exceptions": settings.stops_at_exceptions,
        "the program draws random numbers": program.is_random,
        "the program writes to its buffers or inputs": writes or program.written_inputs,
        "the program reads memory by strides of its own": program.reads_memory,
        "there are no inputs": program.num_inputs == 0,
    }
    for node in program.graph.graph.nodes:
        reason = _LOOPED_OPERATIONS.get(node.target)
        if reason is not None:
            reasons[reason] = True
    for reason, is_given in reasons.items():
        if is_given:
            logger.debug(_LOOPED, reason)
            return Runner()
    if program.has_loss and layout.micro_batches_per_update == 1:
        return SplitRunner(program)
    return FoldRunner(program)


class FoldRunner(Runner):
    """Runs several micro-batches at once where that gives the results of the loop.

    The first fold of a new size runs beside the loop. If it fails, or its results
    differ, all later micro-batches run in the loop.
    """

    def __init__(self, program: Program) -> None:
        self._max_bytes = fold_bytes(is_training=program.has_loss)
        self._sizes: tuple[int, ...] | None = None  # of folds; empty to run in a loop
        self._folds: dict[int, Forward] = {}
        self._is_verified = False

    def run_micro_batches(
        self, call: DeviceCall, indices: range, collect: Collect
    ) -> None:
        """Run the micro-batches of an update, or of an inference call."""
        if self._sizes is None and call.watch is None:
            self._sizes = self._choose_sizes(call, len(indices))
        # Only the loop has the gradients of each micro-batch.
        if not self._sizes or call.watch is not None:
            super().run_micro_batches(call, indices, collect)
        elif self._is_verified:
            for first, results in self._run_folds(call, self._sizes, indices):
                _give(call, first, results, collect)
        else:
            self._verify(call, self._sizes, indices, collect)

    def _choose_sizes(self, call: DeviceCall, count: int) -> tuple[int, ...]:
        """Return the sizes of the folds, in micro-batches; none for the loop."""
        if any(t.dtype == torch.float16 for t in call.device.weights.trained.values()):
            logger.debug(_LOOPED, "one backward pass would add up in float16")
            return ()
        rows = call.inputs.joined(0, 1)
        memory = _Memory()
        with torch.no_grad(), memory:
            call.device.program.run(*call.device.weights.arguments[0], *rows)
        # The backward pass needs all values.
        has_loss = call.device.program.has_loss
        of_one = max(1, memory.total if has_loss else memory.most)
        most = self._max_bytes // of_one
        if most < 2:
            return ()
        num_folds = -(-count // min(count, most))
        size, longer = divmod(count, num_folds)
        return (size + 1,) * longer + (size,) * (num_folds - longer)

    def _run_folds(
        self,
        call: DeviceCall,
        sizes: Sequence[int],
        indices: range,
    ) -> Iterator[tuple[int, Results]]:
        """Yield the first index of each fold, and its stacked results."""
        first = indices.start
        for size in sizes:
            started = perf_counter()
            rows = [row.contiguous() for row in call.inputs.joined(first, size)]
            replica = first % call.device.layout.replicas
            arguments = [*call.device.weights.arguments[replica], *rows]
            with torch.set_grad_enabled(call.device.gradients is not None):
                if size not in self._folds:
                    module: Any = call.device.program.run
                    count = len(call.device.program.weight_names)
                    self._folds[size] = fold(module.__self__, arguments, count, size)
                results = self._folds[size](*arguments)
            if call.device.gradients is not None:
                results = call.device.gradients.add(results)
            call.inputs.note_fold(started, size)
            yield first, tuple(result.detach() for result in results)
            first += size

    def _verify(
        self,
        call: DeviceCall,
        sizes: Sequence[int],
        indices: range,
        collect: Collect,
    ) -> None:
        """Run micro-batches in folds and in the loop, and compare the results."""
        trained, taken = call.device.weights.trained.values(), call.inputs.taken
        num_taken = len(taken)
        looped = self._run_loop(call, indices)
        gradients = [_sample(tensor.grad) for tensor in trained]
        _drop_gradients(trained)
        del taken[num_taken:]
        folded: list[tuple[int, Results]] = []
        level = logging.WARNING
        try:
            folded.extend(self._run_folds(call, sizes, indices))
            columns = zip(*(results for _, results in folded))
            nodes = call.device.program.graph.graph.nodes
            is_half = any(node.meta.get(ROUNDING) for node in nodes)
            relative = _RELATIVE_OF_HALF if is_half else _RELATIVE
            reason = _difference(
                "results",
                [torch.stack(column) for column in zip(*looped)],
                [torch.cat(column) for column in columns],
                relative,
            ) or _difference(
                "gradients", gradients, [_sample(t.grad) for t in trained], relative
            )
        except Exception as error:  # noqa: BLE001 - torch raises all kinds of them
            level, reason = logging.DEBUG, str(error).partition("\n")[0]
        if reason is None:
            logger.debug("Up to %d micro-batches run in one pass", max(sizes))
            self._is_verified = True
            for first, results in folded:
                _give(call, first, results, collect)
            return
        self._sizes = ()
        self._folds.clear()
        logger.log(
            level,
            "Micro-batches run one after the other, not folded into one pass: %s",
            reason,
        )
        _drop_gradients(trained)
        del taken[num_taken:]
        for index, of_one in zip(indices, self._run_loop(call, indices)):
            collect(index, of_one)

    def _run_loop(self, call: DeviceCall, indices: range) -> list[Results]:
        """Run micro-batches one after the other, and return their results."""
        looped: list[Results] = []
        super().run_micro_batches(
            call,
            indices,
            lambda _, results: looped.append(tuple(r.detach() for r in results)),
        )
        return looped


class SplitRunner(Runner):
    """Runs what no update changes for many micro-batches at once.

    An update comes after each micro-batch, so what leads from the weights to the loss
    runs in the loop. What the loss needs from the inputs alone, such as the number of
    targets that count, runs before it, for all micro-batches of a call. What no update
    depends on, such as metrics, runs after it.

    The first fold of each part runs beside the loop. If it fails, or its results
    differ, that part runs in the loop, too.
    """

    def __init__(self, program: Program) -> None:
        module: Any = program.run
        self._max_bytes = fold_bytes(is_training=False)
        self._num_weights = len(program.weight_names)
        self._parts = _split(module.__self__, self._num_weights)
        self._folds: dict[tuple[GraphModule, int], Forward] = {}
        self._looped: set[GraphModule] = set()  # parts that can't be folded
        self._is_ahead = False  # whether the first part runs before the loop
        self._given: list[Results] = []  # its results
        self._most = 0  # micro-batches of the last part; 0 until the first one has run
        self._kept: list[Results] = []  # of micro-batches that wait for it

    def run_micro_batches(
        self, call: DeviceCall, indices: range, collect: Collect
    ) -> None:
        """Run the micro-batch of an update, and the other parts where it is time."""
        if self._parts is None or call.watch is not None:
            super().run_micro_batches(call, indices, collect)
            return
        before, loop, after = self._parts
        index, count = indices.start, len(call.device.layout.micro_batches)
        if index == 0:
            self._kept = []
            rows = [_cut(row, count, 0) for row in call.inputs.joined(0, count)]
            if self._most == 0:
                size = count * _size(before(*(row[0] for row in rows)))
                self._is_ahead = 0 < size <= self._max_bytes
            if self._is_ahead:
                self._given = list(zip(*map(torch.unbind, self._run(before, rows))))

        def run(*given: Tensor) -> Results:
            if self._is_ahead:
                return loop.forward(*given, *self._given[index])
            return loop.forward(*given, *before.forward(*given[self._num_weights :]))

        self._loop(call, indices, lambda _, results: self._kept.append(results), run)
        if self._most == 0:
            of_one = list(tensors_in(self._kept[0]))
            self._most = max(1, self._max_bytes // max(1, _size(of_one)))
            weights = set(map(storage_of, call.device.weights.trained.values()))
            if not weights.isdisjoint(map(storage_of, of_one)):
                self._most = 1  # the next update would change what waits
        if indices.stop == count or len(self._kept) == self._most:
            kept, self._kept = self._kept, []
            results = self._run(after, list(map(torch.stack, zip(*kept))))
            _give(call, indices.stop - len(kept), results, collect)

    @torch.no_grad()
    def _run(self, part: GraphModule, rows: Sequence[Tensor]) -> Results:
        """Return the results of a part, stacked as the rows that it takes."""
        key = part, len(rows[0])
        if key in self._folds:
            return self._folds[key](*rows)
        looped = tuple(map(torch.stack, zip(*(part(*row) for row in zip(*rows)))))
        if part in self._looped:
            return looped
        level = logging.WARNING
        try:
            run = fold(part, rows, 0, len(rows[0]), is_stacked=True)
            folded = run(*rows)
            reason = _difference("results", looped, folded, _RELATIVE)
        except Exception as error:  # noqa: BLE001 - torch raises all kinds of them
            level, reason = logging.DEBUG, str(error).partition("\n")[0]
        if reason is None:
            self._folds[key] = run
            logger.debug("Parts of %d micro-batches run in one pass", len(rows[0]))
            return folded
        self._looped.add(part)
        logger.log(level, "Parts run one after the other, not folded: %s", reason)
        return looped


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _split(
    program: GraphModule, num_weights: int
) -> tuple[GraphModule, GraphModule, GraphModule] | None:
    """Split a training program into what depends on inputs alone, the loss, the rest.

    Returns:
        The first part takes the inputs. The second one takes what the program takes,
        then the results of the first one, and returns what the third one takes, then
        the loss. None if there is no third part, or all must run in its order.
    """
    *nodes, output = program.graph.nodes
    *results, loss = output.args[0]
    places = [node for node in nodes if node.op == "placeholder"]
    weights, inputs = places[:num_weights], places[num_weights:]
    of_loss = {loss, *places}
    for node in reversed(nodes):
        if node in of_loss:
            of_loss.update(node.all_input_nodes)
    for node in nodes:  # an operation's results stay with it
        if node.target is operator.getitem and node.args[0] in of_loss:
            of_loss.add(node)
    rest = [node for node in nodes if node not in of_loss]
    taken = dict.fromkeys([n for node in rest for n in node.all_input_nodes] + results)
    kept = [node for node in taken if node in of_loss]
    if (
        not any(node.op.startswith("call") for node in rest)
        or not set(weights).isdisjoint(kept)
        or any(n.target is _set_grad_enabled or effects_of(n).writes for n in nodes)
    ):
        return None
    early = set(inputs)
    for node in nodes:
        needed = node.all_input_nodes
        is_layout = "memory_format" in node.kwargs  # which a fold doesn't keep
        if node in of_loss and needed and early.issuperset(needed) and not is_layout:
            early.add(node)
    early.difference_update(inputs)
    given = [
        node for node in nodes if node in early and not early.issuperset(node.users)
    ]

    def part(
        taken: Sequence[Node], inside: set[Node], returned: Sequence[Node]
    ) -> GraphModule:
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in taken}
        for node in nodes:
            if node in inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in returned))
        return GraphModule(program, graph)

    return (
        part(inputs, early, given),
        part([*places, *given], of_loss - early - set(places), [*kept, loss]),
        part(kept, set(rest), results),
    )


def _sample(gradient: Tensor | None) -> Tensor | None:
    """Copy a gradient, or evenly spread elements of a large one, to compare it later.

    A copy of all gradients would be the largest thing in memory, for the first call.
    """
    if gradient is None:
        return None
    return gradient.flatten()[:: 1 + gradient.numel() // 65_536].clone()


def _drop_gradients(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        weight.grad = None


def _difference(
    what: str,
    looped: Sequence[Tensor | None],
    folded: Sequence[Tensor | None],
    relative: float,
) -> str | None:
    """Describe a difference of two ways, beyond that of sums in another order."""
    floor = _SHARE_OF_LARGEST * max(map(_largest, looped), default=0.0)
    for index, (one, other) in enumerate(zip(looped, folded)):
        if one is None or other is None:
            if one is not other:
                return f"{what}: tensor {index} is missing in one way"
            continue
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{what}: tensor {index} has another shape or type"
        allowed = relative * _largest(one) + floor if one.is_floating_point() else 0.0
        if not torch.allclose(other, one, 0.0, allowed, equal_nan=True):
            gap = (one.double() - other.double()).abs().max()
            return (
                f"{what}: tensor {index} differs by {gap:.3g}, and its largest "
                f"element is {_largest(one):.3g}"
            )
    return None


def _give(call: DeviceCall, first: int, results: Results, collect: Collect) -> None:
    """Pass the results of a fold to the outputs, whole if all are returned."""
    if call.outputs.takes_whole:
        call.outputs.add_whole([r.flatten(0, 1) if r.dim() > 1 else r for r in results])
        return
    for index, of_one in enumerate(zip(*(r.unbind() for r in results)), first):
        collect(index, of_one)


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0 or not tensor.is_floating_point():
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


class _Memory(DispatchMode):
    """Measures the memory of tensors that are made while it is active.

    Attributes:
        total: Size of all tensors, in bytes.
        most: Largest size of the tensors that existed at the same time, in bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.total = self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        old = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in old:
                self.total += storage.nbytes()
                alive = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                self._alive[storage.data_ptr()] = alive
        self._alive = {p: a for p, a in self._alive.items() if not a[0].expired()}  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result
