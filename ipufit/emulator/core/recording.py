# SPDX-License-Identifier: Apache-2.0
"""The operations that a trace records, as a `torch.fx` graph.

A trace changes no weight: it computes with copies. An assignment of another tensor to a
weight's name in `forward` is undone, and refused.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import traceback
from collections import OrderedDict
from functools import partial
from typing import Any, Callable, ClassVar, Dict, Iterable, Iterator, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import _set_grad_enabled
from torch.fx.graph import Graph
from torch.fx.node import Node, base_types, map_aggregate
from torch.overrides import is_tensor_method_or_property
from torch.utils.hooks import RemovableHandle

from ..errors import createPoptorchError
from ..options import BEFORE_BLOCKS, BlockPlacement, ExecutionStrategy
from .autograd_grad import note_maker
from .float16 import ROUNDING, device_tensor
from .graph import (
    DeviceFunction,
    Effects,
    Operation,
    Place,
    effects_of,
    find_place,
    storage_of,
    tensors_in,
)
from .refusals import host_tensor_among, refuse_custom_backward, untraceable

_ResultT = TypeVar("_ResultT")

_LITERALS = (*base_types, type(None), type(Ellipsis))
"""Types that `torch.fx` can write into the code that it generates."""

_BATCH_NORMS = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
)


REFUSAL = "refusal"
"""Metadata of a node: the topic of a refusal if the node is live, and its message."""


def named_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module, then its buffers, without repetition."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_learned(weight: Tensor) -> bool:
    """Return whether gradients train a weight.

    A buffer that the host has computed requires gradients too, but isn't a leaf.
    """
    return weight.is_floating_point() and weight.requires_grad and weight.is_leaf


@contextlib.contextmanager
def unchanged(
    module: torch.nn.Module, problems: list[str] | None = None
) -> Iterator[None]:
    """Restore a module's weights, and torch's random state, after the context.

    Args:
        module: The module.
        problems: Gets a description of each weight whose name had got another tensor.
    """
    before = [
        (owner, prefix, kind, dict(getattr(owner, kind)))
        for prefix, owner in module.named_modules()
        for kind in ("_parameters", "_buffers")
    ]
    rng_state = torch.random.get_rng_state()
    problems = [] if problems is None else problems
    try:
        yield
    finally:
        torch.random.set_rng_state(rng_state)
        for owner, prefix, kind, tensors in before:
            now = getattr(owner, kind)
            for name in now.keys() - tensors.keys():
                del now[name]
            for name, tensor in tensors.items():
                if now.get(name) is tensor:
                    continue
                verb = "reassigned" if name in now else "removed"
                if not isinstance(owner, _BATCH_NORMS):
                    what = "Parameter" if kind == "_parameters" else "Buffer"
                    full = f"{prefix}.{name}" if prefix else name
                    problems.append(f"{what} {full} is {verb}")
                now[name] = tensor
                owner.__dict__.pop(name, None)


def refuse_rebound(problem: str) -> None:
    """Raise an error for a problem that `unchanged` describes.

    Raises:
        Error: Always.
    """
    text = f"{problem} from the model when calling the forward method."
    if problem.endswith("reassigned"):
        name = problem.split()[1]
        text = (
            f"{problem} within the model when calling the forward method. This is "
            f"not supported. Consider using self.{name}.copy_(src) to copy data from a "
            "source tensor, where src is the name of the source tensor."
        )
    raise createPoptorchError(
        f"{text} The device holds the weights it was compiled with."
    )


class Recording:
    """A trace: the graph of a program, the node of each tensor, and open scopes.

    Construct it in the grad mode that the program will start in.

    Args:
        weights: Name to host tensor, parameters and buffers; each becomes an
            input of the graph.
        inputs: The tensors that the module is called with; each becomes an input of the
            graph.
        strategy: Gives each block an IPU, a stage and a phase.
        is_training: Whether the program will be differentiated.

    Attributes:
        graph: The operations recorded so far.
        root: The module that holds the graph's constants.
        weights: The host's weights by name.
        copies: Copy of each weight by name, in the type that a device stores.
        scopes: Names of the open scopes, outermost first: running sub-modules, and
            `NameScope`.
        running: Paths of the sub-modules that run, outermost first; "" is the whole.
        constructs: Names of the loops, branches and the like that are open, innermost
            last.
        nodes: The node of each tensor at this moment, by the tensor's `id`.
        begun: The blocks that have begun, in order.
        block: The active block, if any.
        results: Value of each node while tracing.
        refused: Subject of what the tracer has refused in the operation that runs.
        is_running_operation: Whether an operation runs that isn't recorded yet.
        tracing_function: The code of the function that traces.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        inputs: list[Tensor],
        strategy: ExecutionStrategy,
        is_training: bool,
    ) -> None:
        self.tracing_function = sys._getframe(1).f_code
        self.strategy = strategy
        self.is_training = is_training
        self.weights = weights
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.copies = {name: _copy(weight) for name, weight in weights.items()}
        self.scopes: list[str] = []
        self.running = [""]
        self.constructs: list[str] = []
        self.begun: list[BlockPlacement] = []
        self.block: BlockPlacement | None = BEFORE_BLOCKS
        self.results: dict[Node, Any] = {}
        self.refused = ""
        self.is_running_operation = False
        pairs = list(zip(weights.values(), self.copies.values()))
        self._copy_of = {id(host): copy for host, copy in pairs}
        self._host_of = {id(copy): host for host, copy in pairs}
        self._addresses = {name: _address(c) for name, c in self.copies.items()}
        self._inputs = inputs
        self.nodes: dict[int, Node] = {}
        self._kept_alive: list[Tensor] = []
        self._num_constants = 0
        self._was_grad_enabled = torch.is_grad_enabled()
        for index, (host, copy) in enumerate(pairs):
            node = self.graph.placeholder(f"weight_{index}")
            self._bind(host, node)
            self._bind(copy, node)
        for index, tensor in enumerate(inputs):
            self._bind(tensor, self.graph.placeholder(f"input_{index}"))

    # Tensors ----------------------------------------------------------------

    def is_on_device(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a weight, an input, or computed from them."""
        return id(tensor) in self.nodes

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return the copy of a weight; another tensor itself."""
        return self._copy_of.get(id(tensor), tensor)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return the weight that a tensor is a copy of; another tensor itself."""
        return self._host_of.get(id(tensor), tensor)

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the trace without repetition, in their order."""
        return list({id(tensor): tensor for tensor in self._kept_alive}.values())

    def weight_memory(self) -> dict[int, str]:
        """Return the names of the weights, by the storage of their copies."""
        return {storage_of(copy): name for name, copy in self.copies.items()}

    def input_memory(self) -> list[int]:
        """Return the storages of the inputs, in order."""
        return [storage_of(tensor) for tensor in self._inputs]

    def rebound(self) -> list[str]:
        """Describe weights whose memory was replaced, as by `weight.data = ...`.

        A shape that was changed in place counts, too: the device's stays.
        """
        return [
            f"{'Parameter' if isinstance(weight, torch.nn.Parameter) else 'Buffer'} "
            f"{name} is reassigned"
            for name, weight in self.weights.items()
            if _address(self.copies[name]) != self._addresses[name]
        ]

    def constant_inputs(self) -> set[str]:
        """Return the names of the graph's inputs that PopTorch compiles in."""
        return {
            f"weight_{index}"
            for index, weight in enumerate(self.weights.values())
            if not weight.is_floating_point()
        }

    # For the functions that a module calls ----------------------------------

    def record(
        self, function: Callable[..., _ResultT], *args: Any, **kwargs: Any
    ) -> _ResultT:
        """Run `function` on the device's tensors and record it as one operation.

        Args:
            function: The function that the device runs. It also runs while tracing.
            *args: Positional arguments, at least one tensor among them.
            **kwargs: Keyword arguments.

        Returns:
            Its result; the tensors in it are on the device.

        Raises:
            Error: One of the tensors is the host's.
        """
        self.require_device(function.__name__, tensors_in((args, kwargs)))
        return DeviceFunction(function)(*args, **kwargs)

    def require_device(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Refuse tensors of the host among the arguments of `what`."""
        for tensor in tensors:
            if not self.is_on_device(tensor):
                raise host_tensor_among(what, tensor)

    def refuse_live(self, tensor: Tensor, message: str) -> None:
        """Note a refusal of a hint, for `refuse_marked`, if the tensor is live."""
        node = self.nodes.get(id(tensor))
        if node is not None:
            node.meta.setdefault(REFUSAL, ("arguments", message))
            node.meta.setdefault("place", self.here())

    def refuse_training(self, what: str) -> None:
        """Refuse `what` in a training model: it has no backward pass on a device."""
        if self.is_training:
            raise createPoptorchError(
                f"poptorch.{what}() is only supported in inference: the device has "
                "no backward pass for it."
            )

    @contextlib.contextmanager
    def inside(self, construct: str) -> Iterator[None]:
        """Mark `construct` as open inside the context."""
        self.constructs.append(construct)
        try:
            yield
        finally:
            self.constructs.pop()

    def begin_block(self, placement: BlockPlacement) -> None:
        """Begin a block with this placement."""
        self.block = placement
        self.begun.append(placement)

    def pop_scope(self) -> None:
        """Close the innermost name scope.

        Raises:
            Error: No scope is open; PopART's behaviour is undefined then.
        """
        if not self.scopes:
            raise createPoptorchError(
                "A name scope is closed that was never opened: there are more calls "
                "of torch.ops.poptorch.pop_name_scope than of push_name_scope."
            )
        self.scopes.pop()

    @contextlib.contextmanager
    def module_scopes(self, root: torch.nn.Module) -> Iterator[None]:
        """Open a name scope whenever a sub-module of `root` runs.

        The scopes of a module that fails stay open, whoever catches the error
        (PopTorch, `NameScopeHook` in `_impl.py`).
        """

        def enter(path: str, module: torch.nn.Module, args: Any) -> None:
            self.scopes.append(path.rpartition(".")[2])
            self.running.append(path)

        def leave(path: str, module: torch.nn.Module, args: Any, output: Any) -> None:
            self.pop_scope()
            while self.running.pop() != path:
                pass

        with contextlib.ExitStack() as hooks:
            hooks.callback(self.scopes.clear)
            for path, module in root.named_modules():
                if path:
                    before, after = partial(enter, path), partial(leave, path)
                    hooks.enter_context(module.register_forward_pre_hook(before))
                    hooks.enter_context(module.register_forward_hook(after))
            yield

    # Operations -------------------------------------------------------------

    def append(
        self, operation: Operation, effects: Effects, result: Any, **notes: Any
    ) -> None:
        """Record an operation that has run.

        Args:
            operation: The operation. Its tensors of the host become constants.
            effects: Memory that the operation reads and changes.
            result: Its result; the tensors in it are on the device from now on.
            **notes: Further metadata of its node.
        """
        enabled = torch.is_grad_enabled()
        if self.is_training and enabled != self._was_grad_enabled:
            self.graph.call_function(_set_grad_enabled, (enabled,))
            self._was_grad_enabled = enabled
        name = operation.name
        args: Any = map_aggregate(operation.args, self._argument)
        kwargs: Any = map_aggregate(operation.kwargs, self._argument)
        if name in ("__get__", "__set__"):
            # A property such as `x.T`: the function is a bound slot of it.
            attribute = operation.function.__self__.__name__  # type: ignore[attr-defined]
            accessor = getattr if name == "__get__" else setattr
            node = self.graph.call_function(accessor, (args[0], attribute, *args[1:]))
        elif _is_method(operation):
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(operation.function, args, kwargs)
        scope = "".join(f"{name}/" for name in self.scopes)
        node.meta.update(
            operator=(scope, name),
            block=self.block,
            effects=effects,
            place=self.here(),
            refused=self.refused,
            **notes,
        )
        self._bind_result(result, node)
        if not self.is_training:
            note_maker(result, operation, node.meta["place"])

    def here(self) -> Place:
        """Return the place that is traced."""
        frames = traceback.walk_stack(sys._getframe(1))
        return find_place(frames, self.tracing_function, self.running[-1])

    def finish(self, outputs: Iterable[Tensor]) -> list[Node]:
        """Close the recording, and return the nodes of `outputs`.

        An output that is an input, a weight or a view of a weight is copied by an
        operator of its own (PopTorch, `JitDispatch.cpp`): a weight may change before
        the output is read.
        """
        memory = self.weight_memory()
        nodes = []
        for tensor in outputs:
            if self.is_training:
                refuse_custom_backward(tensor)
            node = self.nodes[id(tensor)]
            on_device = self.on_device(tensor)
            storage = storage_of(on_device)
            is_input = node.op == "placeholder"
            if is_input or storage in memory:
                is_weight = str(node.target).startswith("weight_")
                # Weights of whole numbers are compiled in.
                is_constant = is_weight and not on_device.is_floating_point()
                with self._before_statistics_change(node, storage):
                    node = self.graph.call_function(torch.clone, (node,))
                node.meta["effects"] = Effects(
                    reads=frozenset({storage}), is_operator=is_input and not is_constant
                )
                node.meta["block"] = self.block
                self.results[node] = on_device
            nodes.append(node)
        return nodes

    def _before_statistics_change(self, value: Node, memory: int) -> Any:
        """Insert before a normalisation layer updates its statistics.

        PopTorch's operator doesn't declare this update, so a reader in the same program
        gets the statistics from before it (PopTorch, `NormalizationOps.cpp`).
        """
        for node in self.graph.nodes if value.op == "placeholder" else ():
            if memory in effects_of(node).statistics:
                return self.graph.inserting_before(node)
        return contextlib.nullcontext()

    # Nodes ------------------------------------------------------------------

    def _bind_result(self, result: Any, node: Node) -> None:
        self.results[node] = result
        if isinstance(result, Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            for index, element in enumerate(result):
                if tensors_in(element):
                    item = self.graph.call_function(operator.getitem, (node, index))
                    item.meta.update({**node.meta, ROUNDING: ""})
                    self._bind_result(element, item)

    def _bind(self, tensor: Tensor, node: Node) -> None:
        self.nodes[id(tensor)] = node
        # The weight of a copy that changed in place: later uses depend on the change.
        self.nodes[id(self.on_host(tensor))] = node
        self.results[node] = tensor
        self._kept_alive.append(tensor)  # an id is only unique while it lives

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.nodes.get(id(value)) or self._constant(value)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, _LITERALS):
            return value
        if isinstance(value, torch.nn.Module) and named_weights(value):
            raise untraceable(f"{type(value).__name__} as an argument")
        return self._attribute(value)

    def _constant(self, tensor: Tensor) -> Node:
        """Record a tensor of the host as a constant.

        The program copies it in each run, because later operations may change it.
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


def _address(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    return storage_of(tensor), *layout


def _copy(weight: Tensor) -> Tensor:
    copy = device_tensor(weight.detach(), copy=True)
    return copy.requires_grad_(is_learned(weight))


def _is_method(operation: Operation) -> bool:
    """Return whether a graph calls the operation as a method of its first argument."""
    function, name = operation.function, operation.name
    return (
        is_tensor_method_or_property(function)
        or getattr(Tensor, name, None) is function  # torch 2.0 forgets `unflatten`
        or name in ("__getitem__", "__setitem__")
    )


# The trace under way --------------------------------------------------------------

_ONE_TRACE = threading.RLock()
"""What a trace changes of torch and of the module, it changes for all threads."""


class _Thread(threading.local):
    """The trace of each thread; None outside of it."""

    trace: Recording | None = None


_thread = _Thread()


def is_tracing() -> bool:
    """Return whether a module is being traced at this moment.

    Example:
        >>> is_tracing()
        False
    """
    return _thread.trace is not None


def enclosing_trace() -> Recording | None:
    """Return the current trace, also while a recorded operation runs.

    Example:
        >>> enclosing_trace() is None
        True
    """
    return _thread.trace


def current_trace() -> Recording | None:
    """Return the trace that would record an operation made now.

    Returns:
        None outside a trace, and while a recorded operation runs: calls inside it
        are part of it.

    Example:
        >>> current_trace() is None
        True
    """
    trace = _thread.trace
    return None if trace is None or trace.is_running_operation else trace


class Substitutions(contextlib.ExitStack):
    """Functions of other packages that are replaced while a model is traced.

    PopTorch Geometric replaces functions of PyG that don't compile. PopTorch calls
    this class `_OverwriteContextManager`, and spells its method so.
    """

    _manager_types: ClassVar[list[Callable[[], Any]]] = []

    @classmethod
    def registerSubsitutionManager(cls, type: Callable[[], Any]) -> None:
        """Register a class whose objects have `replace()` and `restore()`."""
        if type not in cls._manager_types:
            cls._manager_types.append(type)

    def __enter__(self) -> Substitutions:
        try:
            for manager in [manager_type() for manager_type in self._manager_types]:
                manager.replace()
                self.callback(manager.restore)
        except BaseException:
            self.close()
            raise
        return self


@contextlib.contextmanager
def tracing(recording: Recording) -> Iterator[None]:
    """Make a trace the current one of this thread inside the context."""
    with _ONE_TRACE, Substitutions():
        before, _thread.trace = _thread.trace, recording
        try:
            yield
        finally:
            _thread.trace = before


def require_tensor(value: Any, message: str) -> None:
    """Refuse an argument that isn't a tensor, as PopTorch's functions do.

    Args:
        value: The argument of PopTorch's function.
        message: Beginning of the error message, about the arguments that the function
            takes.

    Raises:
        Error: `value` isn't a tensor.

    Example:
        >>> require_tensor(3, "f takes a tensor.")
        Traceback (most recent call last):
            ...
        ipufit.emulator.errors.Error: 'poptorch_py_error': f takes a tensor. Got int.
    """
    if not isinstance(value, Tensor):
        raise createPoptorchError(f"{message} Got {type(value).__name__}.")


def getIpuTensorId(x: Tensor) -> int:
    """Return the number of a device's tensor, while a model is traced.

    The numbers are the emulator's own: each trace counts its tensors from 0, in the
    order in which it meets them, weights and inputs first.

    Args:
        x: A weight, an input, or a result of them.

    Returns:
        The number; a tensor keeps it when it is changed in place.

    Raises:
        Error: `x` isn't a tensor of the device; outside `forward` none is.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> class Curious(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         print(getIpuTensorId(x), getIpuTensorId(y))
        ...         return y
        >>> inferenceModel(Curious()).compile(torch.ones(1))
        0 1
    """
    require_tensor(x, "getIpuTensorId takes a tensor.")
    trace = enclosing_trace()
    if trace is None or not trace.is_on_device(x):
        raise createPoptorchError(
            "Only tensors on the IPU have an id: the weights and inputs of a model and "
            "what `forward` computes from them, while it is traced."
        )
    numbers = [id(tensor) for tensor in trace.tensors()]
    return numbers.index(id(x))


_Hooks = Dict[int, Callable[[], Any]]

PRE_COMPILE_HOOKS: _Hooks = OrderedDict()
POST_COMPILE_HOOKS: _Hooks = OrderedDict()


def registerPreCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Register a function to call whenever an executor begins to trace its model.

    It is called by every executor, without arguments, in the order of registration.
    As in PopTorch the trace has begun then: torch calls in a hook become part of
    the program, and `isRunningOnIpu()` is true.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPreCompileHook(lambda: print("compiling"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        compiling
        >>> handle.remove()
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
    """
    return _register(PRE_COMPILE_HOOKS, hook, "Pre-compile")


def registerPostCompileHook(hook: Callable[[], Any]) -> RemovableHandle:
    """Register a function to call whenever an executor has traced its model.

    It is called by every executor, without arguments, in the order of registration:
    after the trace, even a failed one, and before the stages of the compilation, which
    may refuse the program.

    Returns:
        A handle with `remove()`.

    Raises:
        RuntimeError: `hook` can't be called.

    Example:
        >>> import torch
        >>> from ipufit.emulator import inferenceModel
        >>> handle = registerPostCompileHook(lambda: print("traced"))
        >>> inferenceModel(torch.nn.Identity()).compile(torch.ones(1))
        traced
        >>> handle.remove()
    """
    return _register(POST_COMPILE_HOOKS, hook, "Post-compile")


def call_hooks(hooks: _Hooks) -> None:
    """Call registered hooks in their order."""
    for hook in list(hooks.values()):
        hook()


def _register(hooks: _Hooks, hook: Callable[[], Any], kind: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{kind} hook must be callable. Got {hook!r}.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
