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

import logging
import operator
from time import perf_counter
from typing import (
    Any,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch._C import _functorch as _vmap_of_torch
from torch._C import _set_grad_enabled
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
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
from .anchors import Anchors
from .autograd_grad import function_of
from .device import DeviceCall, Results, Runner
from .float16 import ROUNDING
from .graph import (
    DispatchMode,
    GraphModule,
    as_list,
    effects_of,
    function_name,
    map_tensors,
    named_arguments,
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
) -> Forward:
    """Return a function that runs a program on several micro-batches at once.

    Args:
        program: A graph that writes to no argument and draws no random numbers.
        arguments: The weights, then the inputs, whose first dimension is that of the
            micro-batches.
        num_weights: The number of weights.
        count: The number of micro-batches.

    Returns:
        A function of the same arguments. Its results have a new first dimension, one
        entry for each micro-batch.

    Example:
        >>> program = torch.fx.symbolic_trace(lambda weight, x: ((weight * x).sum(),))
        >>> arguments = torch.tensor(2.0), torch.arange(6.0).view(3, 2)
        >>> fold(program, arguments, 1, 3)(*arguments)
        (tensor([ 2., 10., 18.]),)
    """
    recorder = _Recorder()
    places = [recorder.placeholder(tensor) for tensor in arguments]
    dims = (*[None] * num_weights, *[0] * (len(arguments) - num_weights))
    run = vmap(_Interpreter(program, recorder, count).run, dims)
    is_fallback_enabled = _functorch._is_vmap_fallback_enabled()
    with recorder:
        _functorch._set_vmap_fallback_enabled(False)  # it would loop inside
        try:
            results = run(*places)
        finally:
            _functorch._set_vmap_fallback_enabled(is_fallback_enabled)
    return recorder.finish(program, results)


class _Recorder(DispatchMode):
    """Records operations on plain tensors as nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.graph = Graph()
        self._is_paused = False

    def placeholder(self, tensor: Tensor) -> Tensor:
        """Add an argument to the graph, and return the tensor to compute with."""
        alias = tensor.detach()
        # `vmap` refuses requires_grad_(), even with False as for its constants.
        alias = alias.requires_grad_() if tensor.requires_grad else alias
        node = self.graph.placeholder(f"argument_{len(self.graph.nodes)}")
        alias._node = node  # type: ignore[attr-defined,unused-ignore]
        return alias

    def record(
        self, node: Node, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run the operation of a program's node, and record it as one operation."""
        self._is_paused = True
        try:
            results = run(node.target, args, kwargs)
        finally:
            self._is_paused = False
        self._add(node.op, node.target, args, kwargs, results)
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
        node: Node = self.graph.create_node(op, target, args, kwargs)
        if isinstance(results, Tensor):
            results._node = node  # type: ignore[attr-defined,unused-ignore]
            return node
        for index, result in enumerate(as_list(results)):
            if isinstance(result, Tensor):
                item = self.graph.call_function(operator.getitem, (node, index))
                result._node = item  # type: ignore[attr-defined,unused-ignore]
        return node

    def finish(self, program: GraphModule, results: Sequence[Tensor]) -> Forward:
        """Return a function of the graph without its dead operations."""
        self.graph.output(tuple(_node(result) for result in results))
        for node in reversed(list(self.graph.nodes)):
            has_effects = node.target is _set_grad_enabled or node.meta.get("writes")
            if node.op.startswith("call") and not (node.users or has_effects):
                self.graph.erase_node(node)
        return GraphModule(program, self.graph).forward


def _node(tensor: Tensor) -> Node:
    node = getattr(tensor, "_node", None)
    if not isinstance(node, Node):  # its value would be compiled in
        raise RuntimeError("a tensor comes from outside of the program")
    return node


class _Interpreter(Interpreter):
    """Runs the graph of a program under `vmap`."""

    def __init__(self, program: GraphModule, recorder: _Recorder, count: int) -> None:
        super().__init__(program)  # type: ignore[no-untyped-call,unused-ignore]
        self._recorder = recorder
        self._count = count

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor):
            value._node = self._recorder.graph.get_attr(target)  # type: ignore[attr-defined,unused-ignore]
        return value

    def run_node(self, n: Node) -> Any:
        if not n.op.startswith("call"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not tensors_in((args, kwargs)):
            return self._recorder.record(n, getattr(self, n.op), args, kwargs)
        is_loss = n.target in (cross_entropy, nll_loss)
        reduction = kwargs.get("reduction") if is_loss else None
        # `vmap` imports a compiler for the mean of these losses.
        has_rule = reduction in ("sum", "mean") and all(
            kwargs.get(name) is None for name in ("weight", "size_average", "reduce")
        )
        if has_rule:
            kwargs = {**kwargs, "reduction": "none"}
        name = function_name(n)
        named = named_arguments(n.target, name, args, kwargs)
        dims, result_dims = _find_rows(name, named) or ({}, ())
        others = [value for key, value in named.items() if key not in dims]
        rows = [
            (tensor, dim)
            for key, dim in dims.items()
            for tensor in tensors_in(named.get(key))
        ]
        levels = {_functorch.maybe_get_level(tensor) for tensor, _ in rows} - {-1}
        if not levels or any(map(_functorch.is_batchedtensor, tensors_in(others))):
            return super().run_node(n)
        result = self._run_whole(n, args, kwargs, rows, result_dims, levels.pop())
        if not has_rule:
            return result
        total = result.sum()
        if reduction == "sum":
            return total
        target = named["target"]
        if target.is_floating_point():
            return torch.div(total, result.numel())
        return torch.div(total, target.ne(named["ignore_index"]).sum())

    def _run_whole(
        self,
        node: Node,
        args: Any,
        kwargs: Any,
        rows: Sequence[tuple[Tensor, int | None]],
        result_dims: Sequence[int | None],
        level: int,
    ) -> Any:
        """Run an operation once, on the rows of all micro-batches side by side.

        Args:
            rows: The tensors among its arguments whose rows are independent of each
                other, and the dimension of the rows; None if further dimensions are
                allowed.
            result_dims: The dimension of the rows of each result.
            level: The number of the transformation by `vmap`.
        """
        together: dict[int, Tensor] = {}
        with retrieve_current_functorch_interpreter().lower():  # type: ignore[no-untyped-call,unused-ignore]
            for tensor, dim in rows:
                at, whole = 0, tensor
                if _functorch.is_batchedtensor(tensor):
                    at = _functorch.maybe_get_bdim(tensor)
                    whole = _functorch.get_unwrapped(tensor)
                else:
                    whole = tensor.expand(self._count, *tensor.shape)
                if dim is None:
                    together[id(tensor)] = whole.movedim(at, 0) if at else whole
                else:
                    together[id(tensor)] = _join(whole, at, dim)
            joined = map_tensors((args, kwargs), lambda t: together.get(id(t), t))
            results = self._recorder.record(node, getattr(self, node.op), *joined)
            cut = [
                result if dim is None else _cut(result, self._count, dim)
                for result, dim in zip(as_list(results), result_dims)
            ]
        wrapped = tuple(
            _functorch._add_batch_dim(result, dim or 0, level)
            if isinstance(result, Tensor)
            else result
            for result, dim in zip(cut, result_dims)
        )
        return wrapped[0] if isinstance(results, Tensor) else wrapped


def _cut(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Split a dimension of rows into micro-batches and the rows of each."""
    cut: Tensor = tensor.unflatten(dim, (count, -1))  # type: ignore[no-untyped-call,unused-ignore]
    cut._joined = dim, tensor  # type: ignore[attr-defined,unused-ignore]
    return cut


def _join(tensor: Tensor, at: int, dim: int) -> Tensor:
    """Join dimension `at`, the micro-batches, with dimension `dim`, their rows."""
    known = getattr(tensor, "_joined", None)
    if known is not None and known[0] == at == dim:
        return known[1]
    moved = tensor if at == dim else tensor.movedim(at, dim)
    return moved.flatten(dim, dim + 1)


_OF_IMAGES = {
    name.format(rank): rank + 2
    for rank in (1, 2, 3)
    for name in (
        *("conv{}d", "conv_transpose{}d", "max_pool{}d", "avg_pool{}d"),
        *("adaptive_max_pool{}d", "adaptive_avg_pool{}d"),
    )
}
"""Number of dimensions of the input of these operations."""

_Dims = Mapping[str, "int | None"]


def _find_rows(
    name: str, named: Mapping[str, Any]
) -> tuple[_Dims, tuple[int | None, ...]] | None:
    """Return the rows of an operation to run on joined rows; None to let `vmap` run it.

    `vmap` would split recurrent layers and attention into small operations, and would
    run more operations than needed for convolutions and products.

    Returns:
        The dimension of the rows of each argument that has such, by its name, and of
        each result. It is None if further dimensions are allowed.
    """
    x = named.get("input", named.get("query"))
    rank = x.dim() if isinstance(x, Tensor) else 0
    if name == "linear" and rank > 1:
        return {"input": None}, (None,)
    if (
        _OF_IMAGES.get(name) == rank
        or (name == "to" and named.get("memory_format") is torch.channels_last)
        or (name == "batch_norm" and rank > 1 and not named.get("training"))
    ):
        return {"input": 0}, (0,)
    if name in ("cross_entropy", "nll_loss") and rank > 1:
        is_of_rows = named.get("reduction") == "none"
        return ({"input": 0, "target": 0}, (0,)) if is_of_rows else None
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and rank == 3:
        dim = 0 if named["batch_first"] else 1
        return {"input": dim, "hx": 1}, (dim, *[1] * len(as_list(named["hx"])))
    mask = named.get("attn_mask")
    if name == "scaled_dot_product_attention" and rank > 2:
        has_rows = mask is not None and mask.dim() == rank and len(mask) > 1
        names = ["query", "key", "value", *["attn_mask"] * has_rows]
        return dict.fromkeys(names, 0), (0,)
    is_equal = mask is None or mask.dim() == 2  # for all rows
    if name == "multi_head_attention_forward" and rank == 3 and is_equal:
        dims = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}
        return dims, (1, 0 if named.get("need_weights", True) else None)
    return None


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
    anchors: Anchors,
) -> Runner:
    """Return the runner of a program: folds, a split program, or the loop.

    A fold may still be given up at the first call of its size: if memory is short, or
    its results differ from those of the loop. `groups` are the weights that differ
    between groups of replicas.
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
        "gradients or updates are anchored": anchors.num_watched,
    }
    for node in program.graph.graph.nodes:
        reason = _LOOPED_OPERATIONS.get(node.target)
        if reason is not None:
            reasons[reason] = True
    for reason, is_given in reasons.items():
        if is_given:
            logger.debug(_LOOPED, reason)
            return Runner()
    if not program.has_loss or layout.micro_batches_per_update > 1:
        return FoldRunner(program)
    parts = _split(program)
    return Runner() if parts is None else SplitRunner(program, parts)


class _Folds:
    """The folds of a program, by their sizes.

    The first fold of each size runs beside the loop. If it fails, or what it computes
    differs, there are no folds of other sizes.

    Args:
        program: The program.
        num_weights: The number of weights among its arguments.
        name: A noun for logs: micro-batches, or parts of them.
    """

    def __init__(self, program: GraphModule, num_weights: int, name: str) -> None:
        self.program, self._num_weights, self._name = program, num_weights, name
        self._forwards: dict[int, Forward] = {}
        self._is_looped = False

    def find(self, weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Forward | None:
        """Return the fold for the stacked rows of micro-batches, if there is one."""
        count = len(rows[0])
        if count in self._forwards or self._is_looped:
            return self._forwards.get(count)
        level, place = logging.DEBUG, ""
        try:
            arguments = [*weights, *rows]
            forward = _keeping_mode(
                fold, self.program, arguments, self._num_weights, count
            )
            folded = list(_keeping_mode(forward, *arguments))
            values = [self.run_loop(weights, rows), folded]
            pairs = {"results": values}
            trained = [weight for weight in weights if weight.requires_grad]
            if trained and values[0][-1].requires_grad:
                losses = [each.pop().sum() for each in values]
                pairs["gradients"] = [
                    list(torch.autograd.grad(loss, trained, allow_unused=True))
                    for loss in losses
                ]
            level = logging.WARNING
            for what, both in pairs.items():
                place = f"{what}: "
                self._compare(*both)
        except Exception as error:  # noqa: BLE001 - torch raises all kinds of them
            message = f"{self._name} run one after the other, not folded into one pass"
            logger.log(level, f"{message}: %s", place + " ".join(str(error).split()))
            self._is_looped = True
            return None
        logger.debug(f"{self._name} run in one pass, %d at a time", count)
        self._forwards[count] = forward
        return forward

    def run_loop(
        self, weights: Sequence[Tensor], rows: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run micro-batches one after the other, and return their stacked results."""
        results = (_keeping_mode(self.program, *weights, *row) for row in zip(*rows))
        return list(map(torch.stack, zip(*results)))

    def _compare(self, looped: Sequence[Any], folded: Sequence[Any]) -> None:
        """Refuse differences beyond those of sums in another order.

        Raises:
            AssertionError: There are such.
        """
        nodes = self.program.graph.nodes
        is_half = any(node.meta.get(ROUNDING) for node in nodes)
        relative = _RELATIVE_OF_HALF if is_half else _RELATIVE
        floor = _SHARE_OF_LARGEST * max(map(_largest, looped), default=0.0)
        for index, (value, other) in enumerate(zip(looped, folded)):
            if value is None or other is None:
                if value is not other:
                    raise AssertionError(f"tensor {index} is missing in one way")
                continue
            largest = _largest(value)
            allowed = relative * largest + floor if value.is_floating_point() else 0.0
            if value.shape != other.shape or not torch.allclose(
                other, value, 0.0, allowed, equal_nan=True
            ):
                gap = (value.double() - other.double()).abs().max()
                raise AssertionError(
                    f"tensor {index} differs by {gap:.3g}, and its largest element is "
                    f"{largest:.3g}"
                )


def _keeping_mode(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call what may leave gradients turned off, and turn them on again."""
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return run(*arguments)


class FoldRunner(Runner):
    """Runs several micro-batches at once where that gives the results of the loop."""

    def __init__(self, program: Program) -> None:
        module: Any = program.run
        self._max_bytes = fold_bytes(is_training=program.has_loss)
        self._sizes: tuple[int, ...] | None = None  # of folds; empty to run in a loop
        count = len(program.weight_names)
        self._folds = _Folds(module.__self__, count, "Micro-batches")

    def run_micro_batches(self, call: DeviceCall, indices: range) -> None:
        """Run the micro-batches of an update, or of an inference call."""
        if self._sizes is None:
            self._sizes = self._choose_sizes(call, len(indices))
        device, first = call.device, indices.start
        for size in self._sizes:
            started = perf_counter()
            rows = call.inputs.stacked(first, size)
            weights = device.weights.arguments[first % device.layout.replicas]
            with torch.set_grad_enabled(device.gradients is not None):
                forward = self._folds.find(weights, rows)
                if forward is None:
                    self._sizes = ()
                    break
                results = forward(*weights, *rows)
            if device.gradients is not None:
                results = device.gradients.add(results)
            call.inputs.note_fold(started, size)
            call.outputs.add_stacked(first, results)
            first += size
        super().run_micro_batches(call, range(first, indices.stop))

    def _choose_sizes(self, call: DeviceCall, count: int) -> tuple[int, ...]:
        """Return the sizes of the folds, in micro-batches; none for the loop."""
        if any(t.dtype == torch.float16 for t in call.device.weights.trained.values()):
            logger.debug(_LOOPED, "one backward pass would add up in float16")
            return ()
        rows = [row[0] for row in call.inputs.stacked(0, 1)]
        memory = _Memory()
        with torch.no_grad(), memory:
            call.device.program.run(*call.device.weights.arguments[0], *rows)
        # The backward pass needs all values.
        has_loss = call.device.program.has_loss
        size_of_one = max(1, memory.total if has_loss else memory.most)
        most = self._max_bytes // size_of_one
        if most < 2:
            return ()
        num_folds = -(-count // min(count, most))
        size, longer = divmod(count, num_folds)
        return (size + 1,) * longer + (size,) * (num_folds - longer)


class SplitRunner(Runner):
    """Runs what no update changes for many micro-batches at once.

    An update comes after each micro-batch, so what leads from the weights to the loss
    runs in the loop. What the loss needs from the inputs alone, such as the number of
    targets that count, runs before it, for all micro-batches of a call. What no update
    depends on, such as metrics, runs after it.
    """

    def __init__(self, program: Program, parts: _Parts) -> None:
        self._max_bytes = fold_bytes(is_training=False)
        self._num_weights = len(program.weight_names)
        self._before, self._loss, self._after = parts
        self._is_ahead: bool | None = None  # whether the first part runs first
        self._early: list[Results] = []  # its results
        self._most = 0  # micro-batches of the last part; 0 until the first one has run
        self._kept: list[Results] = []  # of micro-batches that wait for it

    def run(self, call: DeviceCall) -> None:
        """Run a call, and before it what depends on its inputs alone."""
        self._kept, self._early = [], []
        before, count = self._before, len(call.device.layout.micro_batches)
        rows = call.inputs.stacked(0, count)
        if self._is_ahead is None:
            size = count * _size(before.program(*(row[0] for row in rows)))
            self._is_ahead = 0 < size <= self._max_bytes
        if self._is_ahead:
            self._early = list(zip(*map(torch.unbind, _run_part(before, rows))))
        super().run(call)

    def run_micro_batches(self, call: DeviceCall, indices: range) -> None:
        """Run the micro-batch of an update, and the last part where it is time."""
        index, count = indices.start, len(call.device.layout.micro_batches)

        def run(*arguments: Tensor) -> Results:
            if self._early:
                return self._loss.forward(*arguments, *self._early[index])
            inputs = arguments[self._num_weights :]
            early = self._before.program.forward(*inputs)
            return self._loss.forward(*arguments, *early)

        self.loop(call, indices, lambda _, results: self._kept.append(results), run)
        if self._most == 0:
            size = max(1, _size(self._kept[0]))
            self._most = max(1, self._max_bytes // size)
            weights = set(map(storage_of, call.device.weights.trained.values()))
            if not weights.isdisjoint(map(storage_of, self._kept[0])):
                self._most = 1  # the next update would change what waits
        if indices.stop == count or len(self._kept) == self._most:
            kept, self._kept = self._kept, []
            results = _run_part(self._after, list(map(torch.stack, zip(*kept))))
            call.outputs.add_stacked(indices.stop - len(kept), results)


@torch.no_grad()
def _run_part(part: _Folds, rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of a part, stacked as the rows that it takes."""
    forward = part.find((), rows)
    return part.run_loop((), rows) if forward is None else forward(*rows)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_Parts = Tuple[_Folds, GraphModule, _Folds]


def _split(program: Program) -> _Parts | None:
    """Split a training program into what depends on inputs alone, the loss, the rest.

    Returns:
        The first part takes the inputs. The second one takes what the program takes,
        then the results of the first one, and returns what the third one takes, then
        the loss. None if there is no third part, or all must run in its order.
    """
    run: Any = program.run
    module: GraphModule = run.__self__
    num_weights = len(program.weight_names)
    *nodes, output = module.graph.nodes
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
    early_results = [
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
        return GraphModule(module, graph)

    return (
        _Folds(part(inputs, early, early_results), 0, "Parts"),
        part([*places, *early_results], of_loss - early - set(places), [*kept, loss]),
        _Folds(part(kept, set(rest), results), 0, "Parts"),
    )


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
