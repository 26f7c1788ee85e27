# SPDX-License-Identifier: Apache-2.0
"""Run a module's Python once and keep what it did as a `torch.fx` graph.

PopTorch executes `forward` a single time, when the model is compiled, and the
device then repeats what was recorded. So does the emulator: `Tracer` is a
`TorchFunctionMode` that sees every call of torch's Python API, carries it out on
copies of the weights, and appends it to a graph. Python values are baked in and
Python side effects happen once. Calls that touch tensors of the host only are none
of the device's business: they run there and then.
"""

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
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from ipufit.emulator._ground.dtypes import device_tensor
from ipufit.emulator._tracing.blocks import BEFORE_BLOCKS, BlockPlacement
from ipufit.emulator._tracing.device_numbers import note_whole_numbers
from ipufit.emulator._tracing.half import in_float32
from ipufit.emulator._tracing.limits import refuse_unsupported
from ipufit.emulator._tracing.liveness import (
    CallWatch,
    Effects,
    effects_of,
    note_effects,
    storage_of,
)
from ipufit.emulator._tracing.moving_slices import (
    constant_bounds,
    moving_sizes,
    moving_slices,
)
from ipufit.emulator._tracing.operands import (
    has_tensors,
    map_leaves,
    map_tensors,
    tensors_in,
)
from ipufit.emulator._tracing.refusals import (
    host_tensor_among,
    refuse_custom_backward,
    refuse_dynamic_shape,
    refuse_value_reader,
    tensors_are_equal,
    untraceable,
)
from ipufit.emulator._tracing.scopes import Scopes
from ipufit.emulator._tracing.sizes import with_plain_sizes
from ipufit.emulator._tracing.tensor_devices import (
    emulated_devices,
    is_forced_to_device,
    is_host_device,
)
from ipufit.emulator._tracing.trace_state import recorded
from ipufit.emulator._tracing.weights import named_weights

_INDEXING = ("__getitem__", "__setitem__")
_MOVES = frozenset({"to", "type_as"})
_RETURN_NOTHING = frozenset({"__setitem__", "__set__"})

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
"""What `torch.fx` can write into the code that it generates."""


class Tracer(TorchFunctionMode):
    """Record the torch calls made while active.

    Construct it in the grad mode that the program will start in.

    Args:
        weights: Name to host tensor, parameters and buffers; each becomes an
            input of the graph. Calls run on copies, so a trace changes no weight.
        inputs: The tensors the module is called with, inputs of the graph too.

    Attributes:
        graph: What was recorded.
        root: Holds the graph's constants.
        scopes: Where in the model the calls are made; each node remembers it.
        begun: The blocks that began, in order.
        results: What the call of each node returned while tracing.
        rebound: Weights that were given other memory, as by `weight.data = ...`.
            After `finish`.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.scopes = Scopes()
        self.begun: list[BlockPlacement] = []
        self.results: dict[Node, Any] = {}
        self.rebound: list[str] = []
        self._inputs = inputs
        self._stand_ins: dict[str, Tensor] = {}
        self._stand_in_of: dict[int, Tensor] = {}
        self._host_of: dict[int, Tensor] = {}
        self._node_of: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._num_constants = 0
        self._placement: BlockPlacement | None = BEFORE_BLOCKS
        self._was_grad_enabled = torch.is_grad_enabled()
        self._is_recording = False
        self._weight_inputs = {n: f"weight_{i}" for i, n in enumerate(weights)}
        for name, tensor in weights.items():
            copy = device_tensor(tensor.detach(), copy=True)
            copy.requires_grad_(tensor.requires_grad and copy.is_floating_point())
            self._stand_ins[name] = copy
            self._stand_in_of[id(tensor)] = copy
            self._host_of[id(copy)] = tensor
            node = self.graph.placeholder(self.weight_input(name))
            self._bind(tensor, node)
            self._bind(copy, node)
        for index, tensor in enumerate(inputs):
            self._bind(tensor, self.graph.placeholder(f"input_{index}"))
        self._first_memory = {n: t.data_ptr() for n, t in self._stand_ins.items()}

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a weight, an input, or computed from one."""
        return id(tensor) in self._node_of

    def weight_input(self, name: str) -> str:
        """The name of the graph's input for a weight."""
        return self._weight_inputs[name]

    def is_recording(self) -> bool:
        """Whether a call that was seen is being carried out."""
        return self._is_recording

    # Bindings ---------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        """All tensors that the trace knows, each once."""
        return list({id(tensor): tensor for tensor in self._kept_alive}.values())

    def bindings(self) -> dict[int, Node]:
        """Which node each tensor is at this moment, by the tensor's id."""
        return dict(self._node_of)

    def rebind(self, bindings: dict[int, Node]) -> None:
        """Forget what was recorded since `bindings` were taken."""
        self._node_of = dict(bindings)

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

    # Memory -----------------------------------------------------------------

    def weight_memory(self) -> dict[int, str]:
        """The storages of the weights, and the weights' names."""
        return {storage_of(copy): name for name, copy in self._stand_ins.items()}

    def input_memory(self) -> list[int]:
        """The storages of the inputs, in order."""
        return [storage_of(tensor) for tensor in self._inputs]

    # Results ----------------------------------------------------------------

    def finish(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Close the recording and name the nodes of `outputs`, tensors on the device.

        An output that is an input or a weight is copied by an operator of its own
        (PopTorch, `JitDispatch.cpp`), and so is a view of a weight: that may change
        before the output is read.
        """
        memory = self.weight_memory()
        nodes = []
        for tensor in outputs:
            refuse_custom_backward(tensor)
            node = self._node_of[id(tensor)]
            device = self._device(tensor)
            is_input = node.op == "placeholder"
            if is_input or storage_of(device) in memory:
                is_operator = is_input and not _is_constant_weight(node, device)
                effects = Effects(
                    reads=frozenset({storage_of(device)}), is_operator=is_operator
                )
                with self._before_statistics_change(node, storage_of(device)):
                    node = self.graph.call_function(torch.clone, (node,))
                note_effects(node, effects)
                node.meta["block"] = self._placement
                self.results[node] = device
            nodes.append(node)
        for name, copy in self._stand_ins.items():
            if copy.data_ptr() != self._first_memory[name]:
                self.rebound.append(name)
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

    # TorchFunctionMode ------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry out `func`, on copies of the weights, and record it."""
        func = recorded(func)
        name = getattr(func, "__name__", str(func))
        args, kwargs, device = emulated_devices(name, args, kwargs or {})
        if name == "new" and isinstance(args[-1], torch.Size):
            # In a graph the size becomes a tuple, and `new` of a tuple takes values.
            func, name = Tensor.new_empty, "new_empty"
        args, kwargs = with_plain_sizes(func, args, kwargs, self.is_on_device)
        if name in _INDEXING:
            args = (args[0], constant_bounds(args[1], self.is_on_device), *args[2:])
            sizes = moving_sizes(args[1], self._node_of)
            if sizes and name == "__getitem__":
                func, name, args = moving_slices, moving_slices.__name__, (*args, sizes)
        touched = list(tensors_in((args, kwargs)))
        on_device = [tensor for tensor in touched if self.is_on_device(tensor)]
        is_creating = (
            is_forced_to_device(func, args, kwargs)
            if device is None
            else not is_host_device(device)
        )
        if not on_device and not is_creating:
            return func(*args, **kwargs)  # on the host, once
        if on_device:
            if name == "__repr__":
                return f"tensor(<unavailable>, shape={tuple(args[0].shape)})"
            if name == "equal":
                return tensors_are_equal()
            refuse_value_reader(name, args, device)
            refuse_dynamic_shape(name, args, kwargs)
            refuse_unsupported(name, args, kwargs)
            for tensor in on_device:
                refuse_custom_backward(tensor)
        if not is_creating:  # creation takes constants from the host
            self._refuse_host_tensors(name, touched)
        func = in_float32(func, name, args, kwargs)
        self._is_recording = True
        try:
            result = self._carry_out(func, name, args, kwargs)
        finally:
            self._is_recording = False
        return map_tensors(result, self._host)

    def _carry_out(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        touched = list(tensors_in((args, kwargs)))
        watch = CallWatch(name, [self._device(tensor) for tensor in touched])
        result = func(
            *map_tensors(args, self._device), **map_tensors(kwargs, self._device)
        )
        if any(result is tensor for tensor in touched if not self.is_on_device(tensor)):
            result = result.clone()  # moved to the device it seems to be on already
        effects = watch.effects(result)
        if has_tensors(result) or name in _RETURN_NOTHING or effects.writes:
            node = self._record(func, name, args, kwargs)
            note_effects(node, effects)
            self._bind_result(result, node)
        return result

    def _refuse_host_tensors(self, name: str, touched: list[Tensor]) -> None:
        allowed = (
            touched[:1] if name in _MOVES else touched[1:] if name == "copy_" else ()
        )
        for tensor in touched:
            is_allowed = any(tensor is other for other in allowed)
            if not self.is_on_device(tensor) and not is_allowed:
                raise host_tensor_among(name, tensor)

    # Recording --------------------------------------------------------------

    def _record(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Node:
        self._record_grad_mode()
        node: Node
        node_args = map_leaves(args, self._argument)
        node_kwargs = map_leaves(kwargs, self._argument)
        if name in ("__get__", "__set__"):
            # A property such as `x.T`: the function is a bound slot of it.
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            accessor = getattr if name == "__get__" else setattr
            values = node_args[1:] if name == "__set__" else ()
            node = self.graph.call_function(
                accessor, (node_args[0], attribute, *values)
            )
        elif (
            is_tensor_method_or_property(func)
            or getattr(Tensor, name, None) is func  # torch 2.0 forgets `unflatten`
            or name in _INDEXING
        ):
            node = self.graph.call_method(name, node_args, node_kwargs)
        else:
            node = self.graph.call_function(func, node_args, node_kwargs)
        node.meta["operator"] = (self.scopes.prefix, name)
        node.meta["block"] = self._placement
        note_whole_numbers(node, (*args, *kwargs.values()))
        return node

    def _record_grad_mode(self) -> None:
        enabled = torch.is_grad_enabled()
        if enabled != self._was_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (enabled,))
            self._was_grad_enabled = enabled

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
        self._node_of[id(tensor)] = node
        self.results[node] = tensor
        self._kept_alive.append(tensor)  # an id is only unique while it lives
        host = self._host_of.get(id(tensor))
        if host is not None:  # changed in place: later uses depend on the change
            self._node_of[id(host)] = node

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node_of.get(id(value)) or self._constant(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _LITERALS):
            return value
        if isinstance(value, torch.nn.Module) and named_weights(value):
            raise untraceable(f"{type(value).__name__} as an argument")
        return self._attribute(value)

    def _constant(self, tensor: Tensor) -> Node:
        """A tensor of the host, frozen; a copy each time, lest the model change it."""
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

    def _device(self, tensor: Tensor) -> Tensor:
        return self._stand_in_of.get(id(tensor), tensor)

    def _host(self, tensor: Tensor) -> Tensor:
        return self._host_of.get(id(tensor), tensor)


def _is_constant_weight(node: Node, tensor: Tensor) -> bool:
    """Whether PopTorch compiles a weight in: it does if that is of whole numbers."""
    return str(node.target).startswith("weight_") and not tensor.is_floating_point()
