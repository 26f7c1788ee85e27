# SPDX-License-Identifier: Apache-2.0
"""Bodies of `for_loop` and `cond`, and layers of `CPU`: parts that run apart."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor
from torch.fx.graph import Graph

from ipufit.emulator._ground.torch_extras import GraphModule
from ipufit.emulator._tracing.operation import as_list, erase_dead
from ipufit.emulator._tracing.recording import (
    Recording,
    current_trace,
    enclosing_trace,
    is_tracing,
)
from ipufit.emulator.errors import createPoptorchError


@dataclass(frozen=True, eq=False)
class Body:
    """The traced body of a loop or a branch.

    Attributes:
        program: Takes the inputs, then the captured tensors.
        captured: Tensors from outside the body that it uses, as they are in the trace.
        example: Tensors that the body returned while it was traced.
    """

    program: GraphModule
    captured: list[Tensor]
    example: list[Tensor]


_Branch = Tuple[Body, List[Tensor], List[Tensor]]
"""A body, its inputs, and the tensors from around it."""


def for_loop(
    count: int, body: Callable[..., Any], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Run `body` `count` times, each time on its last results.

    On the host, and while a model is traced, the body runs once whatever `count` is.
    For inference only; loops can't be nested.

    Args:
        count: Number of runs of the body on the device.
        body: A function that returns as many tensors as it takes. It gets copies. It
            may use tensors from outside, but may not change them.
        inputs: A list of the tensors for the first run.

    Returns:
        The results of the body's last run; a list of one for a single tensor.

    Raises:
        ValueError: `inputs` isn't a list of tensors.
        Error: In a trace: the model is for training, the loop is inside another, or the
            body returns other shapes or types than it takes.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> class Power(torch.nn.Module):
        ...     def forward(self, x):
        ...         return for_loop(10, lambda y: y * 2, [x])[0]
        >>> inferenceModel(Power())(torch.tensor([1.0]))
        tensor([1024.])
    """
    what = "poptorch.for_loop expects input tensors to be a list of tensors."
    if not isinstance(inputs, list):
        raise ValueError(f"{what} (Object is not list)")
    for index, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{what} (Object contained in list at index {index} is not "
                "torch.tensor)"
            )
    trace = current_trace()
    if trace is None:
        return as_list(body(*_copies(inputs)))
    trace.refuse_training("for_loop")
    if "for_loop" in trace.constructs:
        raise createPoptorchError(
            "poptorch.for_loop inside another one is not supported (new "
            "poptorch::start_for_loop encountered before previous "
            "poptorch::end_for_loop)."
        )
    count = operator.index(count)
    recorded, *given = _record_body(trace, "for_loop", body, inputs)
    _check_same(
        "the body of poptorch.for_loop takes and returns", recorded.example, inputs
    )
    return trace.record(run_loop, count, recorded, *given)


def cond(
    condition: Tensor,
    then_body: Callable[..., Any],
    then_inps: list[Tensor],
    else_body: Callable[..., Any],
    else_inps: list[Tensor],
) -> list[Tensor]:
    """Run one of two bodies, depending on `condition`.

    On the host only that body is called. While a model is traced both are, and the
    device runs one of them each time. For inference only.

    Args:
        condition: A truth value: a tensor of one element.
        then_body: A function of tensors, for a true condition. In a trace it gets
            copies. It may use tensors from outside, but may not change them.
        then_inps: A list of the tensors that `then_body` gets.
        else_body: The same for a false condition; it returns as many tensors.
        else_inps: A list of the tensors that `else_body` gets.

    Returns:
        The results of the body that ran; a list of one for a single tensor.

    Raises:
        ValueError: `then_inps` or `else_inps` isn't a list.
        Error: In a trace: the model is for training, or the bodies return different
            shapes or types.

    Example:
        >>> x = torch.tensor([3.0])
        >>> cond(x > 0, lambda y: y, [x], lambda y: -y, [x])
        [tensor([3.])]
    """
    if not isinstance(then_inps, list) or not isinstance(else_inps, list):
        raise ValueError(
            "poptorch.cond expects then_inps and else_inps tensors to be a list of "
            "tensors. (Object is not list)"
        )
    trace = current_trace()
    if trace is None:
        chosen, inputs = (then_body, then_inps) if condition else (else_body, else_inps)
        return as_list(chosen(*inputs))
    trace.refuse_training("cond")
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        got = tuple(condition.shape) if isinstance(condition, Tensor) else condition
        raise createPoptorchError(
            "The condition of poptorch.cond must be a tensor of one element on the "
            f"device. Got {got!r}."
        )
    then = _record_body(trace, "cond", then_body, then_inps)
    other = _record_body(trace, "cond", else_body, else_inps)
    _check_same("the bodies of poptorch.cond return", then[0].example, other[0].example)
    return trace.record(run_branch, condition, then, other)


def run_loop(
    count: int, body: Body, inputs: list[Tensor], captured: list[Tensor]
) -> list[Tensor]:
    """Run `for_loop` on the device."""
    if is_tracing():
        return _copies(body.example)
    for _ in range(count):
        inputs = body.program.forward(*_copies(inputs), *captured)
    return _copies(inputs)


def run_branch(condition: Tensor, then: _Branch, other: _Branch) -> list[Tensor]:
    """Run `cond` on the device."""
    if is_tracing():
        return _copies(then[0].example)
    body, inputs, captured = then if bool(condition) else other
    return _copies(body.program.forward(*_copies(inputs), *captured))


def _record_body(
    trace: Recording, construct: str, function: Callable[..., Any], inputs: list[Tensor]
) -> _Branch:
    """Call `function` once, and move its operations into a graph of their own.

    Args:
        trace: The current trace.
        construct: Name of the construct: `for_loop` or `cond`.
        function: The loop's or branch's body.
        inputs: Tensors that the body gets copies of; they differ from run to run.

    Raises:
        Error: `function` returns something else than tensors of the device, or changes
            a tensor in place that isn't one of its inputs.
    """
    trace.require_device(construct, inputs)
    with trace.inside(construct):
        copies = _copies(inputs)
        before = dict(trace.nodes)
        outside = [t for t in trace.tensors() if all(t is not copy for copy in copies)]
        versions = [tensor._version for tensor in outside]
        num_nodes = len(trace.graph.nodes)
        outputs = as_list(function(*copies))
    for output in outputs:
        if not isinstance(output, Tensor):
            raise createPoptorchError(
                "The body of poptorch.for_loop or poptorch.cond must return tensors. "
                f"Got {type(output).__name__}."
            )
        trace.require_device("return", [output])
    if any(t._version != version for t, version in zip(outside, versions)):
        raise createPoptorchError(
            "The body of poptorch.for_loop or poptorch.cond changes a tensor in place "
            "that is not one of its inputs: on the device it has a copy, and the "
            "change would be lost. Make it an input, and return it."
        )
    cut = list(trace.graph.nodes)[num_nodes:]
    starts = [before[id(copy)] for copy in copies]
    results = [trace.nodes[id(output)] for output in outputs]
    used = [source for node in cut for source in node.all_input_nodes] + results
    inside = {*cut, *starts}
    captured = list(dict.fromkeys(node for node in used if node not in inside))
    graph = Graph()
    copy_of = {
        node: graph.placeholder(f"argument_{index}")
        for index, node in enumerate([*starts, *captured])
    }
    for node in cut:
        copy_of[node] = graph.node_copy(node, copy_of.__getitem__)
    erase_dead(graph, [copy_of[node] for node in results])
    graph.output([copy_of[node] for node in results])
    for node in reversed(cut):
        trace.graph.erase_node(node)
    trace.nodes = before
    tensor_of = {before[id(t)]: t for t in reversed(trace.tensors()) if id(t) in before}
    around = [tensor_of[node] for node in captured]
    body = Body(GraphModule(trace.root, graph), around, outputs)
    return body, copies, around


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.clone(tensor) for tensor in tensors]


def _check_same(what: str, one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Refuse tensors that differ in shape or type: a device allots memory for one."""
    kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (one, other)]
    if kinds[0] != kinds[1]:
        raise createPoptorchError(
            f"What {what} must be tensors of the same number, shapes and types. Got "
            f"{kinds[0]} and {kinds[1]}."
        )


# On the host ---------------------------------------------------------------------


class CPU:
    """Runs a layer on the host, in the middle of a model that is on the device.

    For inference only. While the model is traced the layer runs once, on zeros, to
    learn what it returns; afterwards once for each micro-batch.

    Args:
        layer_to_call: A function of tensors, or a module. A module's parameters then no
            longer require gradients.
        ID: Name for messages.

    Example:
        >>> double = CPU(lambda x: 2 * x, "double")
        >>> double(torch.tensor([1.0]))
        tensor([2.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._layer_to_call = layer_to_call
        self._ID = ID
        self.in_shapes: list[torch.Size] | None = None
        self.out_shapes: list[torch.Size] | None = None
        self.inputs: list[Tensor] | None = None
        self.outputs: list[Tensor] | None = None

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> Any:
        """Call the layer.

        Args:
            *inputs: Tensors.
            **kwargs: Ignored, as in PopTorch.

        Returns:
            The tensor that the layer returns, or a list of what its list or tuple has.

        Raises:
            Error: In a trace: it is for training, a tensor isn't on the device, or
                the layer calls another one on the host.
        """
        enclosing = enclosing_trace()
        if enclosing is not None and "CPU" in enclosing.constructs:
            raise createPoptorchError(
                "Trying to enter CPU from another CPU op! CPU ops must not overlap. "
                f"The inner one is {self._ID!r}."
            )
        trace = current_trace()
        if trace is None:
            outputs = _listed(self._layer_to_call(*inputs))
        else:
            trace.refuse_training("CPU")
            with trace.inside("CPU"):
                # Not the layer itself: a trace refuses modules with weights.
                layer = functools.partial(self._layer_to_call)
                outputs = trace.record(call_on_host, layer, *inputs)
        self.in_shapes = [tensor.shape for tensor in inputs]
        self.out_shapes = [tensor.shape for tensor in as_list(outputs)]
        return outputs

    def registerPersistentData(self) -> None:
        """Allocate the tensors that `execute` reads and writes, filled with zeros.

        PopTorch's backend calls this, the emulator doesn't.

        Raises:
            TypeError: The layer has not been called, so that no shapes are known.

        Example:
            >>> double = CPU(lambda x: 2 * x, "double")
            >>> _ = double(torch.tensor([1.0]))
            >>> double.registerPersistentData()
            >>> double.inputs, double.outputs
            ([tensor([0.])], [tensor([0.])])
        """
        if self.in_shapes is None or self.out_shapes is None:
            raise TypeError(
                f"The CPU op {self._ID!r} has not been called yet: the shapes of its "
                "tensors are unknown."
            )
        self.inputs = [torch.zeros(shape, device="cpu") for shape in self.in_shapes]
        self.outputs = [torch.zeros(shape, device="cpu") for shape in self.out_shapes]

    def execute(self) -> None:
        """Call the layer with `inputs`, and write its results to `outputs`.

        PopTorch's backend calls this, the emulator doesn't.

        Raises:
            TypeError: `registerPersistentData` hasn't been called.

        Example:
            >>> double = CPU(lambda x: 2 * x, "double")
            >>> _ = double(torch.tensor([1.0]))
            >>> double.registerPersistentData()
            >>> _ = double.inputs[0].fill_(3.0)
            >>> double.execute()
            >>> double.outputs
            [tensor([6.])]
        """
        if self.inputs is None or self.outputs is None:
            raise TypeError(
                f"The CPU op {self._ID!r} has no tensors of its own: call "
                "registerPersistentData() first."
            )
        outputs = as_list(self._layer_to_call(*self.inputs))
        for kept, output in zip(self.outputs, outputs):
            kept.copy_(output)


def call_on_host(layer: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run the layer of a `CPU`, for the device."""
    if enclosing_trace() is not None:
        inputs = tuple(torch.zeros_like(tensor) for tensor in inputs)
    return _listed(layer(*inputs))


def _listed(outputs: Any) -> Any:
    return list(outputs) if isinstance(outputs, (list, tuple)) else outputs
