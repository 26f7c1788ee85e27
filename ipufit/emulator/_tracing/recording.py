# SPDX-License-Identifier: Apache-2.0
"""The operations that a trace records, as a `torch.fx` graph."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Callable, ContextManager, Iterable

import numpy as np
import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.node import Node
from torch.overrides import is_tensor_method_or_property

from ipufit.emulator._ground.dtypes import device_tensor
from ipufit.emulator._options.strategies import BEFORE_BLOCKS, BlockPlacement
from ipufit.emulator._tracing.device_numbers import note_whole_numbers
from ipufit.emulator._tracing.liveness import (
    Effects,
    effects_of,
    note_effects,
    storage_of,
)
from ipufit.emulator._tracing.operands import has_tensors, map_leaves
from ipufit.emulator._tracing.operation import NodesById, Operation
from ipufit.emulator._tracing.refusals import refuse_custom_backward, untraceable
from ipufit.emulator._tracing.scopes import Scopes
from ipufit.emulator._tracing.weights import DeviceWeights, named_weights

_LITERALS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types that `torch.fx` can write into the code that it generates."""


class Recording:
    """The graph of a program while it is traced, and the node of each tensor.

    Construct it in the grad mode that the program will start in.

    Args:
        weights: Name to host tensor, parameters and buffers; each becomes an
            input of the graph.
        inputs: The tensors the module is called with, inputs of the graph too.
        copy: Makes the copy of a weight to compute with, as for `DeviceWeights`.

    Attributes:
        graph: The operations recorded so far.
        root: Holds the graph's constants.
        weights: The copies of the weights that operations compute with.
        scopes: Where in the model operations are made; each node remembers it.
        begun: The blocks that began, in order.
        results: Node to its value while tracing.
        is_running_operation: Whether an operation runs that isn't recorded yet.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        inputs: list[Tensor],
        copy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.weights = DeviceWeights(weights, copy)
        self.scopes = Scopes()
        self.begun: list[BlockPlacement] = []
        self.results: dict[Node, Any] = {}
        self.is_running_operation = False
        self._inputs = inputs
        self._nodes: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._num_constants = 0
        self._placement: BlockPlacement | None = BEFORE_BLOCKS
        self._was_grad_enabled = torch.is_grad_enabled()
        for name, tensor in weights.items():
            node = self.graph.placeholder(self.weights.inputs[name])
            self._bind(tensor, node)
            self._bind(self.weights.copies[name], node)
        for index, tensor in enumerate(inputs):
            self._bind(tensor, self.graph.placeholder(f"input_{index}"))

    # Tensors ----------------------------------------------------------------

    @property
    def nodes(self) -> NodesById:
        """The node of each tensor at this moment."""
        return self._nodes

    def rebind(self, nodes: NodesById) -> None:
        """Go back to the nodes that tensors had when a copy of `nodes` was taken."""
        self._nodes = dict(nodes)

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a weight, an input, or computed from one."""
        return id(tensor) in self._nodes

    def tensors(self) -> list[Tensor]:
        """All tensors that the trace has met, each once, in that order."""
        return list({id(tensor): tensor for tensor in self._kept_alive}.values())

    def input_memory(self) -> list[int]:
        """The storages of the inputs, in order."""
        return [storage_of(tensor) for tensor in self._inputs]

    # Blocks -----------------------------------------------------------------

    def begin_block(self, placement: BlockPlacement) -> None:
        """Place what follows on `placement`."""
        self.begun.append(placement)
        self._placement = placement

    def end_block(self) -> None:
        """Leave the current block: no block is active until the next begins."""
        self._placement = None

    def is_in_block(self) -> bool:
        """Whether a block is active, or none has begun yet."""
        return self._placement is not None

    # Operations -------------------------------------------------------------

    def append(self, operation: Operation, effects: Effects, result: Any) -> None:
        """Record an operation that has run.

        Args:
            operation: Tensors of the host among its arguments become constants.
            effects: Memory that the operation reads and changes.
            result: Its result; the tensors in it are on the device from now on.
        """
        self._record_grad_mode()
        name = operation.name
        args = map_leaves(operation.args, self._argument)
        kwargs = map_leaves(operation.kwargs, self._argument)
        if name in ("__get__", "__set__"):
            # A property such as `x.T`: the function is a bound slot of it.
            attribute = operation.function.__self__.__name__  # type: ignore[attr-defined]
            accessor = getattr if name == "__get__" else setattr
            values = args[1:] if name == "__set__" else ()
            node = self.graph.call_function(accessor, (args[0], attribute, *values))
        elif _is_method(operation):
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(operation.function, args, kwargs)
        node.meta["operator"] = (self.scopes.prefix, name)
        node.meta["block"] = self._placement
        note_whole_numbers(node, (*operation.args, *operation.kwargs.values()))
        note_effects(node, effects)
        self._bind_result(result, node)

    def finish(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Close the recording and name the nodes of `outputs`, tensors on the device.

        An output that is an input or a weight is copied by an operator of its own
        (PopTorch, `JitDispatch.cpp`), and so is a view of a weight: that may change
        before the output is read.
        """
        memory = self.weights.memory()
        nodes = []
        for tensor in outputs:
            refuse_custom_backward(tensor)
            node = self._nodes[id(tensor)]
            on_device = self.weights.on_device(tensor)
            storage = storage_of(on_device)
            is_input = node.op == "placeholder"
            if is_input or storage in memory:
                is_operator = is_input and not _is_constant_weight(node, on_device)
                with self._before_statistics_change(node, storage):
                    node = self.graph.call_function(torch.clone, (node,))
                effects = Effects(reads=frozenset({storage}), is_operator=is_operator)
                note_effects(node, effects)
                node.meta["block"] = self._placement
                self.results[node] = on_device
            nodes.append(node)
        return nodes

    def _before_statistics_change(
        self, value: Node, memory: int
    ) -> ContextManager[Any]:
        """Insert where a normalisation layer hasn't updated its statistics yet.

        Its operator doesn't say that it does, so who reads them in the same program
        gets the values before (PopTorch, `NormalizationOps.cpp`).
        """
        nodes = self.graph.nodes if value.op == "placeholder" else ()
        for node in nodes:
            if memory in effects_of(node).statistics:
                place: ContextManager[Any] = self.graph.inserting_before(node)
                return place
        return contextlib.nullcontext()

    def _record_grad_mode(self) -> None:
        enabled = torch.is_grad_enabled()
        if enabled != self._was_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (enabled,))
            self._was_grad_enabled = enabled

    # Bindings ---------------------------------------------------------------

    def _bind_result(self, result: Any, node: Node) -> None:
        self.results[node] = result
        if isinstance(result, Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                if has_tensors(element):
                    item = self.graph.call_function(operator.getitem, (node, index))
                    item.meta.update(node.meta)
                    self._bind_result(element, item)

    def _bind(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        # The weight of a copy that changed in place: later uses depend on the change.
        self._nodes[id(self.weights.on_host(tensor))] = node
        self.results[node] = tensor
        self._kept_alive.append(tensor)  # an id is only unique while it lives

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._nodes.get(id(value)) or self._constant(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _LITERALS):
            return value
        if isinstance(value, torch.nn.Module) and named_weights(value):
            raise untraceable(f"{type(value).__name__} as an argument")
        return self._attribute(value)

    def _constant(self, tensor: Tensor) -> Node:
        """Record a tensor of the host as a constant.

        The program makes a copy of it in each run, as later operations may change it.
        """
        frozen = device_tensor(tensor.detach(), copy=True)
        node: Node = self.graph.call_function(torch.clone, (self._attribute(frozen),))
        self.results[node] = frozen
        return node

    def _attribute(self, value: Any) -> Node:
        name = f"constant_{self._num_constants}"
        self._num_constants += 1
        if isinstance(value, Tensor):
            self.root.register_buffer(name, value)
        else:
            setattr(self.root, name, value)
        node: Node = self.graph.get_attr(name)
        self.results[node] = value
        return node


def _is_method(operation: Operation) -> bool:
    """Whether a graph calls the operation as a method of its first argument."""
    function, name = operation.function, operation.name
    return (
        is_tensor_method_or_property(function)
        or getattr(Tensor, name, None) is function  # torch 2.0 forgets `unflatten`
        or name in ("__getitem__", "__setitem__")
    )


def _is_constant_weight(node: Node, tensor: Tensor) -> bool:
    """Whether it is a weight of whole numbers, which PopTorch compiles in."""
    return str(node.target).startswith("weight_") and not tensor.is_floating_point()
