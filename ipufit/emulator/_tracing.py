# SPDX-License-Identifier: Apache-2.0
"""Run a module's Python once and keep what it did as a `torch.fx` graph.

PopTorch executes `forward` a single time, when the model is compiled, and the
device then repeats what was recorded. So does the emulator: `Tracer` is a
`TorchFunctionMode` that sees every call of torch's Python API, carries it out on
copies of the weights, and appends it to a graph. Python values are baked in,
Python side effects happen once, and whatever needs the *value* of a tensor while
tracing (`.item()`, `if tensor:`) is refused as it is on an IPU.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import (
    Any,
    Callable,
    Iterable,
    Iterator,
)

import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.node import Node
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from .blocks import BlockPlacement
from .errors import createPoptorchError

_VALUE_READERS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "is_nonzero": "is_nonzero()",
    "equal": "torch.equal()",
    "allclose": "torch.allclose()",
    "__bool__": "the truth value (`if tensor:`, `and`, `while`)",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "use as an index",
    "__array__": "conversion to a NumPy array",
    "__contains__": "`in`",
    "backward": ".backward()",
}
"""Functions that give Python a value which exists only when the device runs."""

NORM_FUNCTIONS = frozenset({"batch_norm", "instance_norm"})
"""Functions that keep running statistics."""

_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "from_numpy"})
"""Functions that turn Python data into a tensor: constants of the program."""

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


_INDEXING = ("__getitem__", "__setitem__")
_INT_INDEX_ESCAPES = torch.__version__.startswith("2.0.")


class Tracer(TorchFunctionMode):
    """Record the torch calls made while active.

    Args:
        weights: Name to host tensor, parameters and buffers; each becomes an
            input of the graph. Calls run on copies, so a trace changes no weight.
        inputs: The tensors the module is called with, inputs of the graph too.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self.graph = Graph()
        self.root = torch.nn.Module()
        self._num_constants = 0
        self.begun: list[BlockPlacement] = []
        self.homeless_op: str | None = None
        self.mutated: dict[str, set[str]] = {}
        self._node_of: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._stand_in: dict[int, Tensor] = {}
        self._host_of: dict[int, Tensor] = {}
        self._weight_name: dict[int, str] = {}
        self._placement: BlockPlacement | None = None
        self._is_block_closed = False
        self._has_op_before_blocks = False
        self._was_grad_enabled = torch.is_grad_enabled()
        for name, tensor in weights.items():
            node = self._placeholder("weight_", name)
            copy = device_tensor(tensor.detach(), copy=True)
            copy.requires_grad_(tensor.requires_grad and copy.is_floating_point())
            self._bind_stand_in(tensor, copy, node)
            self._weight_name[id(copy)] = name
        for index, tensor in enumerate(inputs):
            self._bind(tensor, self._placeholder("input_", str(index)))
        self._first_versions = {
            name: self._stand_in[id(tensor)]._version
            for name, tensor in weights.items()
        }
        self._weights = weights

    # Blocks -----------------------------------------------------------------

    def begin_block(self, placement: BlockPlacement) -> None:
        """Place what follows on `placement`."""
        self.begun.append(placement)
        self._placement = placement
        self._is_block_closed = False

    def end_block(self) -> None:
        """Leave the current block: no block is active until the next begins."""
        self._placement = None
        self._is_block_closed = True

    def ipus(self) -> list[int]:
        """The IPUs that the traced calls live on, in the order of first use."""
        first = [0] if self._has_op_before_blocks or not self.begun else []
        return list(dict.fromkeys([*first, *(block.ipu for block in self.begun)]))

    # Results ----------------------------------------------------------------

    def finish(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Close the recording and name the nodes of `outputs`.

        Also completes `mutated`: the weights that the module changed in place,
        each with the functions that did it (empty: through a view).
        """
        for name, tensor in self._weights.items():
            if self._stand_in[id(tensor)]._version != self._first_versions[name]:
                self.mutated.setdefault(name, set())
        return [self._node(tensor) for tensor in outputs]

    # TorchFunctionMode ------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry out `func` on the device's copies and record it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        touched = list(_tensors((args, kwargs)))
        if name in _VALUE_READERS and touched:
            raise createPoptorchError(
                f"{_VALUE_READERS[name]} needs the value of a tensor while the model "
                "is traced, but values exist only when the compiled model runs. "
                "Compute with tensors (torch.where, masks), or take the value from "
                "the output of the model."
            )
        before = self._weight_marks(name, touched)
        result = func(*_map(args, self._device), **_map(kwargs, self._device))
        self._note_mutations(name, before)
        if self._is_worth_recording(name, touched, result):
            self._record(func, name, args, kwargs, result)
        return _map(result, self._host)

    # Recording --------------------------------------------------------------

    def _is_worth_recording(
        self, name: str, touched: list[Tensor], result: Any
    ) -> bool:
        if any(True for _ in _tensors(result)):
            return True
        return bool(touched) and name in ("__setitem__", "__set__")  # return None

    def _record(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        if name in _FROM_PYTHON and not any(True for _ in _tensors((args, kwargs))):
            return  # `_node` makes it a constant when it is used
        self._record_grad_mode()
        node_args = _map(args, self._argument, everything=True)
        node_kwargs = _map(kwargs, self._argument, everything=True)
        if name in ("__get__", "__set__"):
            # A property such as `x.T`: the function is a bound slot of it.
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            accessor = getattr if name == "__get__" else setattr
            values = node_args[1:] if name == "__set__" else ()
            node = self.graph.call_function(
                accessor, (node_args[0], attribute, *values)
            )
        elif name in _INDEXING or is_tensor_method_or_property(func):
            node = self.graph.call_method(name, node_args, node_kwargs)
        else:
            node = self.graph.call_function(func, node_args, node_kwargs)
        self._place(node, args, kwargs, result)
        self._bind_result(result, node)

    def _record_grad_mode(self) -> None:
        enabled = torch.is_grad_enabled()
        if enabled != self._was_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (enabled,))
            self._was_grad_enabled = enabled

    def _bind_result(self, result: Any, node: Node) -> None:
        if isinstance(result, Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                if any(True for _ in _tensors(element)):
                    item = self.graph.call_function(operator.getitem, (node, index))
                    item.meta.update(node.meta)
                    self._bind_result(element, item)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, _LITERALS):
            return value
        if hasattr(value, "item") and type(value).__module__ == "numpy":
            return value.item()
        return self._attribute(value)

    def _node(self, tensor: Tensor) -> Node:
        node = self._node_of.get(id(tensor))
        if node is None:
            # Neither weight, input nor result of a recorded call: PopTorch
            # freezes such a tensor into the program.
            if tensor.grad_fn is not None:
                raise createPoptorchError(
                    "The model uses a tensor made by a function that cannot be traced "
                    f"({tensor.grad_fn}). Use functions of torch's Python API."
                )
            copy = device_tensor(tensor.detach(), copy=True)
            node = self._attribute(copy)
            self._bind_stand_in(tensor, copy, node)
        return node

    def _attribute(self, value: Any) -> Node:
        name = f"constant_{self._num_constants}"
        self._num_constants += 1
        if isinstance(value, Tensor):
            self.root.register_buffer(name, value)
        else:
            setattr(self.root, name, value)
        node: Node = self.graph.get_attr(name)
        return node

    def _placeholder(self, prefix: str, name: str) -> Node:
        node: Node = self.graph.placeholder(prefix + name.replace(".", "_"))
        return node

    def _bind(self, tensor: Tensor, node: Node) -> None:
        self._node_of[id(tensor)] = node
        self._kept_alive.append(tensor)  # an id is only unique while it lives
        host = self._host_of.get(id(tensor))
        if host is not None:  # changed in place: later uses depend on the change
            self._node_of[id(host)] = node

    def _bind_stand_in(self, host: Tensor, copy: Tensor, node: Node) -> None:
        self._stand_in[id(host)] = copy
        self._host_of[id(copy)] = host
        self._bind(host, node)
        self._bind(copy, node)

    def _device(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._node_of:
            self._node(tensor)
        return self._stand_in.get(id(tensor), tensor)

    def _host(self, tensor: Tensor) -> Tensor:
        return self._host_of.get(id(tensor), tensor)

    # Side effects -----------------------------------------------------------

    def _weight_marks(self, name: str, touched: list[Tensor]) -> dict[str, Any]:
        """What to compare later to see which weights a call changed."""
        marks: dict[str, Any] = {}
        for tensor in touched:
            copy = self._device(tensor)
            weight = self._weight_name.get(id(copy))
            if weight is not None:
                # Normalisation updates its statistics without telling the version
                # counter.
                is_norm = name in NORM_FUNCTIONS
                value = copy.detach().clone() if is_norm else None
                marks[weight] = (copy, copy._version, value)
        return marks

    def _note_mutations(self, name: str, marks: dict[str, Any]) -> None:
        for weight, (copy, version, value) in marks.items():
            is_changed = value is not None and not torch.equal(value, copy)
            if copy._version != version or is_changed:
                self.mutated.setdefault(weight, set()).add(name)

    def _place(self, node: Node, args: Any, kwargs: Any, result: Any) -> None:
        node.meta["block"] = self._placement
        if self._placement is not None:
            return
        if not self.begun:
            self._has_op_before_blocks = True
        elif self._is_block_closed and self.homeless_op is None:
            storages = {_storage(tensor) for tensor in _tensors((args, kwargs))}
            results = {_storage(tensor) for tensor in _tensors(result)}
            if storages and not results <= storages:  # views are folded away
                self.homeless_op = str(node.target)


@contextlib.contextmanager
def traceable_indexing() -> Iterator[None]:
    """Make `tensor[i]` visible to a `TorchFunctionMode`.

    torch 2.0 passes an index to the mode only if it is a tuple.
    """
    if not _INT_INDEX_ESCAPES:
        yield
        return

    def with_tuple(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # the name is what the trace records
        def access(self: Tensor, index: Any, *value: Any) -> Any:
            index = index if isinstance(index, tuple) else (index,)
            return original(self, index, *value)

        return access

    for name in _INDEXING:
        setattr(Tensor, name, with_tuple(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name in _INDEXING:
            delattr(Tensor, name)  # the inherited one is back


def device_tensor(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """`tensor` in a type that an IPU holds.

    64-bit integers keep their type, because torch's CPU kernels ask for it where
    an IPU takes 32 bits, but only the values of 32 bits; `float64` and `bfloat16`
    become `float32` (PopTorch, `PoplarExecutable.cpp`).

    Example:
        >>> device_tensor(torch.tensor([2**32 + 7, -1]))
        tensor([ 7, -1])
        >>> device_tensor(torch.zeros(1, dtype=torch.float64)).dtype
        torch.float32
    """
    if tensor.dtype == torch.int64:
        return torch.as_tensor(tensor.to(torch.int32), dtype=torch.int64)
    if tensor.dtype in (torch.float64, torch.bfloat16):
        return torch.as_tensor(tensor, dtype=torch.float32)
    return torch.clone(tensor) if copy else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_sparse else id(tensor)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for element in value.values():
            yield from _leaves(element)
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _leaves(element)
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step))
    else:
        yield value


def _tensors(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))


def _map(
    value: Any, function: Callable[[Any], Any], *, everything: bool = False
) -> Any:
    """Apply `function` to the tensors (or to every leaf) of nested arguments."""
    if isinstance(value, dict):
        return {k: _map(v, function, everything=everything) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        elements = [_map(v, function, everything=everything) for v in value]
        if everything:
            return tuple(elements) if isinstance(value, tuple) else elements
        if all(new is old for new, old in zip(elements, value)):
            return value  # keeps torch's own named results as they are
        return (
            type(value)(*elements)
            if hasattr(value, "_fields")
            else type(value)(elements)
        )
    if isinstance(value, slice):
        return slice(
            *(
                _map(v, function, everything=everything)
                for v in (value.start, value.stop, value.step)
            )
        )
    if everything or isinstance(value, Tensor):
        return function(value)
    return value
