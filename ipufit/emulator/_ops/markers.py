# SPDX-License-Identifier: Apache-2.0
"""Annotations for the compiler, which change no value."""

from __future__ import annotations

import builtins
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ipufit.emulator._tracing.gradients import refuse_gradient
from ipufit.emulator._tracing.operation import as_list, map_tensors, original
from ipufit.emulator._tracing.recording import (
    Recording,
    current_trace,
    enclosing_trace,
    require_tensor,
)
from ipufit.emulator.enums import (
    MatMulSerializationMode,
    MultiConvPlanType,
    OverlapMode,
)
from ipufit.emulator.errors import createPoptorchError, require

_ResultT = TypeVar("_ResultT")


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Mark `x` as the loss to minimise, and reduce it.

    Back-propagation starts at the one final loss of a training model. The built-in
    loss functions mark themselves; anything computed by hand, or from several of
    them, must be marked with this function (PopTorch user guide, "Custom loss").

    Args:
        x: The loss, of any shape.
        reduction: `"sum"` or `"mean"` over all elements, or `"none"`.

    Returns:
        The reduced loss: 0-d, or of the shape of `x` for `"none"`.

    Raises:
        AssertionError: `reduction` is something else.

    Example:
        >>> identity_loss(torch.tensor([1.0, 3.0]), reduction="mean")
        tensor(2.)
    """
    if has_torch_function((x,)):
        # Let a trace see the mark itself, not only the sum or mean below.
        return handle_torch_function(identity_loss, (x,), x, reduction=reduction)
    if reduction == "none" or (reduction in ("sum", "mean") and x.dim() == 0):
        return torch.clone(x)
    if reduction == "sum":
        return torch.sum(x)
    if reduction == "mean":
        return torch.mean(x)
    raise AssertionError(
        f"Unsupported reduction type! Got {reduction!r}, expected 'sum', 'mean' or "
        "'none'."
    )


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor, by an operator that no compiler removes.

    Raises:
        Error: `tensor` isn't a tensor.

    Example:
        >>> nop(torch.tensor([1.0]))
        tensor([1.])
    """
    require_tensor(tensor, "nop must take a torch.tensor argument.")
    return _operator(nop, tensor)


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Keep these activations for the backward pass; recompute those between them.

    Args:
        *tensors: Tensors, or one list or tuple of them.

    Returns:
        A tensor for one argument, a tuple for several, a list for a list.
        As in PopTorch, a container of one tensor becomes one of the tensor's rows.

    Raises:
        ValueError: An argument isn't a tensor.

    Example:
        >>> x, y = torch.tensor([1.0]), torch.tensor([2.0])
        >>> recomputationCheckpoint([x, y])
        [tensor([1.]), tensor([2.])]
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        container = tensors[0]
        return type(container)(recomputationCheckpoint(*container))
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"All inputs must be tensors. Got {type(tensor).__name__}."
            )
    if len(tensors) == 1:
        return _operator(recomputationCheckpoint, tensors[0])
    return tuple(map(recomputationCheckpoint, tensors))


def _operator(function: Callable[..., Tensor], tensor: Tensor) -> Tensor:
    """Record an operator that returns its argument, unless a block is active.

    After a block has ended no operator may follow: a check finds the recorded one.
    Inside a block the operator would make no difference.
    """
    trace = current_trace()
    if trace is None:
        return tensor
    if trace.block is not None:
        if not trace.is_training:
            on_device = trace.on_device(tensor)
            refuse_gradient(on_device, function.__name__, trace.here())
        return tensor
    return trace.record(function, tensor)


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Multiply matrices; the device computes the product in `factor` smaller ones.

    Args:
        lhs: Left operand.
        rhs: Right operand.
        mode: The dimension to cut.
        factor: Number of parts; it must divide that dimension.
        keep_precision: Add the parts of half-precision products in float32.

    Returns:
        `torch.matmul(lhs, rhs)`.

    Raises:
        AssertionError: One of the last three arguments has another type.

    Example:
        >>> mode = MatMulSerializationMode.ReducingDim
        >>> serializedMatMul(torch.ones(2, 4), torch.ones(4, 1), mode, factor=2)
        tensor([[4.],
                [4.]])
    """
    require(isinstance(keep_precision, bool), "keep_precision must be a bool.")
    require(isinstance(factor, int), "factor must be an int.")
    require(
        isinstance(mode, MatMulSerializationMode),
        f"mode must be a poptorch.MatMulSerializationMode. Got {mode!r}.",
    )
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Limit the memory for temporary data of the operation that made `tensor`.

    Args:
        tensor: Result of a convolution, a matrix product or a look-up.
        available_memory_proportion: Between 0 and 1; a device takes 0.6 by default.

    Returns:
        The same tensor.

    Raises:
        Error: `tensor` isn't a tensor.

    Example:
        >>> set_available_memory(torch.tensor([1.0]), 0.3)
        tensor([1.])
    """
    require_tensor(tensor, "You may only set available memory for torch.tensor values.")
    return tensor


class NameScope:
    """Prefix the names of the operators inside the context.

    `PoplarExecutor.getTensorNames` shows it: `encoder/Relu:0`.

    Args:
        name: The prefix.

    Raises:
        AssertionError: `name` isn't a string.

    Example:
        >>> with NameScope("encoder"):
        ...     torch.tensor([1.0]) + 1
        tensor([2.])
    """

    def __init__(self, name: str) -> None:
        require(isinstance(name, str), "Parameter to NameScope must be a string.")
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, *exception: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Open a name scope in the current trace, if any."""
    trace = current_trace()
    if trace is not None:
        trace.scopes.append(name)


def pop_name_scope() -> None:
    """Close the innermost name scope of the current trace, if any."""
    trace = current_trace()
    if trace is not None:
        trace.pop_scope()


class Attribute:
    """Attach attributes to the operators inside, for a device's compiler.

    Args:
        **attributes: Name of an attribute to its keys and values, all strings.

    Example:
        >>> with Attribute(__outline={"layer": "embedding"}):
        ...     torch.tensor([1.0]) + 1
        tensor([2.])
    """

    def __init__(self, **attributes: dict[str, str]) -> None:
        self.attributes = attributes

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


_PARTIALS = (torch.float, torch.half)


class MultiConv:
    """Lets the device compute the convolutions inside together.

    Other operations may be inside, another `MultiConv` may not. Results don't change.
    The settings below are checked, but not used.

    Example:
        >>> convolution = torch.nn.Conv2d(1, 1, 3)
        >>> with MultiConv().availableMemoryProportions(0.8):
        ...     convolution(torch.zeros(1, 1, 3, 3)).shape
        torch.Size([1, 1, 1, 1])
    """

    def __init__(self) -> None:
        self._trace: Recording | None = None
        self._first_node = 0

    def availableMemoryProportions(self, value: Any) -> MultiConv:
        """Limit the memory for temporary data.

        Args:
            value: A float, one for each convolution, or None.

        Raises:
            AssertionError: `value` is something else.

        Example:
            >>> _ = MultiConv().availableMemoryProportions([0.8, 0.4])
        """
        require(
            value is None or (bool(as_list(value)) and _all_are(value, float)),
            "Invalid available memory proportion! Use a float, or a list or tuple of "
            f"them. Got {value!r}.",
        )
        return self

    def partialsTypes(self, value: Any) -> MultiConv:
        """Choose the type of intermediate sums.

        Args:
            value: `torch.float` or `torch.half`, or one for each convolution.

        Raises:
            ValueError: `value` is something else.

        Example:
            >>> _ = MultiConv().partialsTypes(torch.half)
        """
        if any(partials not in _PARTIALS for partials in as_list(value)):
            raise ValueError(
                "Invalid partials types. Expecting torch.float or torch.half. "
                f"Got {value!r}."
            )
        return self

    def enableConvDithering(self, value: Any) -> MultiConv:
        """Spread convolutions over tiles from different starting points.

        Args:
            value: A bool, one for each convolution, or None.

        Raises:
            ValueError: `value` is something else.

        Example:
            >>> _ = MultiConv().enableConvDithering(True)
        """
        if value is not None and not _all_are(value, bool):
            raise ValueError(f"value must be bool or list of bools. Got {value!r}.")
        return self

    def planType(self, value: MultiConvPlanType | None) -> MultiConv:
        """Choose whether convolutions run side by side or one after the other.

        Args:
            value: The plan; None for the default.

        Raises:
            AssertionError: `value` is something else.

        Example:
            >>> _ = MultiConv().planType(MultiConvPlanType.Serial)
        """
        require(
            value is None or isinstance(value, MultiConvPlanType),
            f"Invalid plan type! Use poptorch.MultiConvPlanType. Got {value!r}.",
        )
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Reserve tiles for each convolution.

        Args:
            value: Number of tiles.

        Raises:
            AssertionError: `value` isn't an int.

        Example:
            >>> _ = MultiConv().perConvReservedTiles(120)
        """
        require(isinstance(value, int), f"perConvReservedTiles: {value!r} is no int.")
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Trade speed of the largest convolution for tiles of the others.

        Args:
            value: A proportion.

        Raises:
            AssertionError: `value` isn't a float.

        Example:
            >>> _ = MultiConv().cycleBackOff(0.3)
        """
        require(isinstance(value, float), f"cycleBackOff: {value!r} is no float.")
        return self

    def __enter__(self) -> None:
        trace = current_trace()
        if trace is None:
            return
        if "MultiConv" in trace.constructs:
            raise createPoptorchError("Nested poptorch.MultiConv is not supported.")
        trace.constructs.append("MultiConv")
        self._trace = trace
        self._first_node = len(trace.graph.nodes)

    def __exit__(
        self, exc_type: type[BaseException] | None, *exception: object
    ) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.constructs.remove("MultiConv")
        inside = [original(n.target) for n in trace.graph.nodes][self._first_node :]
        names = [str(getattr(function, "__name__", "")) for function in inside]
        if exc_type is None and not any(name.startswith("conv") for name in names):
            raise createPoptorchError(
                "Unexpected end_multi_conv: there is no convolution inside this "
                "poptorch.MultiConv."
            )


def _all_are(value: Any, kind: type) -> bool:
    return all(isinstance(element, kind) for element in as_list(value))


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Fetch inputs ahead of the computation that needs them.

    Compiling refuses it if anything else is done to the input, if the strategy is
    pipelined, without IO tiles, or with an output mode other than `OutputMode.All` and
    `Sum`.

    Args:
        input_tensors: Inputs of the model: a tensor, or tuples, lists and dicts of
            them.
        mode: How many steps ahead.

    Returns:
        The same structure and values.

    Example:
        >>> import torch
        >>> set_overlap_for_input([torch.tensor([1.0])], OverlapMode.NoOverlap)
        [tensor([1.])]
    """
    return _mark(overlapped_input, input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """Send outputs while the device computes on.

    Compiling refuses it unless the tensor is returned, and returned once. The options
    must be as for `set_overlap_for_input`.

    Args:
        output_tensors: Outputs of the model: a tensor, or tuples, lists and dicts of
            them.
        mode: How many steps behind.

    Returns:
        The same structure and values.

    Example:
        >>> import torch
        >>> set_overlap_for_output(torch.tensor([1.0]), OverlapMode.NoOverlap)
        tensor([1.])
    """
    return _mark(overlapped_output, output_tensors, mode)


def overlapped_input(tensor: Tensor) -> Tensor:
    """Mark an input, for `set_overlap_for_input`."""
    return tensor.view_as(tensor)


def overlapped_output(tensor: Tensor) -> Tensor:
    """Mark an output, for `set_overlap_for_output`."""
    return tensor.view_as(tensor)


def _mark(mark: Any, tensors: Any, mode: OverlapMode) -> Any:
    trace = current_trace()
    if mode.value == OverlapMode.NoOverlap.value or trace is None:
        return tensors
    return map_tensors(tensors, lambda tensor: trace.record(mark, tensor))


# Blocks -------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A part of a model that runs on one IPU, as a context manager.

    Blocks don't nest: after the context no block is active, not even an outer one.

    Args:
        user_id: The block's name. Without one it gets "0", "1", ... in turn.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> import torch
        >>> from ipufit.emulator import Block
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         with Block("first", ipu_id=0):
        ...             x = x + 1
        ...         with Block("second", ipu_id=1):
        ...             return x * 2
        >>> Network()(torch.tensor([1.0]))
        tensor([4.])
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number blocks without a name from 0 again: call it first in `forward`.

        Example:
            >>> from ipufit.emulator import Block
            >>> Block.useAutoId()
        """
        trace = enclosing_trace()
        if trace is not None:
            trace.strategy._reset_auto_id()

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one begins or ends.

        Args:
            user_id: The block's name; without one it is numbered.
            ipu_id: The IPU it runs on, unless the execution strategy says another.

        Raises:
            AssertionError: During a trace, if the execution strategy doesn't
                know the block, or needs its IPU.

        Example:
            >>> from ipufit.emulator import Block
            >>> Block.start("head", ipu_id=1)
        """
        trace = enclosing_trace()
        if trace is not None:
            trace.begin_block(trace.strategy._place(user_id, ipu_id))

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, *exception: object) -> None:
        trace = enclosing_trace()
        if trace is not None:
            trace.block = None


class LegacyBeginBlockFn(torch.nn.Module):
    """Function that begins a block when it is called; `BeginBlock` makes it.

    Args:
        layer_to_call: The function.
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> from ipufit.emulator import LegacyBeginBlockFn
        >>> LegacyBeginBlockFn(abs, user_id="abs", ipu_id=1)(-3)
        3
    """

    def __init__(
        self,
        layer_to_call: Callable[..., Any],
        user_id: str | None = None,
        ipu_id: int | None = None,
    ) -> None:
        super().__init__()
        self._layer_to_call = layer_to_call
        self._user_id = user_id
        self._ipu_id = ipu_id

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Begin the block, and call the function with these arguments."""
        Block.start(self._user_id, self._ipu_id)
        return self._layer_to_call(*args, **kwargs)


class _BeginBlockHook:
    """Forward-pre-hook that begins a block.

    It is a class, not a closure, so that it can be copied and pickled.
    """

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        trace = enclosing_trace()
        if trace is not None:
            # As in PopTorch, the hook keeps its first automatic id for later traces.
            self._user_id = self._user_id or trace.strategy._next_auto_id()
            Block.start(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def BeginBlock(
    layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None
) -> Any:
    """Begin a block whenever a module is called.

    The block holds the module and all that runs after it, until the next begins.

    Args:
        layer_to_call: A module, which is changed in place, or a function.
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Returns:
        The same module; of a function, a `LegacyBeginBlockFn`.

    Raises:
        Error: If the module begins a block already, or it is neither.

    Example:
        >>> import torch
        >>> from ipufit.emulator import BeginBlock
        >>> layer = torch.nn.Linear(2, 2)
        >>> BeginBlock(layer, "head", ipu_id=1) is layer
        True
    """
    if not isinstance(layer_to_call, torch.nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise createPoptorchError(
            "module is not an instance of torch.nn.Module or function. Got "
            f"{layer_to_call!r}."
        )
    hooks = layer_to_call._forward_pre_hooks.values()
    if any(isinstance(hook, _BeginBlockHook) for hook in hooks):
        raise createPoptorchError(
            "module has already been assigned to a block. Call "
            "poptorch.removeBlocks(module) first."
        )
    layer_to_call.register_forward_pre_hook(_BeginBlockHook(user_id, ipu_id))
    return layer_to_call


def BlockFunction(
    user_id: str | None = None, ipu_id: int | None = None
) -> Callable[[Callable[..., _ResultT]], Callable[..., _ResultT]]:
    """Run a function in a block.

    As in PopTorch, the decorated function's name becomes `wrapper`.

    Args:
        user_id: The block's name; without one it is numbered.
        ipu_id: The IPU it runs on, unless the execution strategy says another.

    Example:
        >>> from ipufit.emulator import BlockFunction
        >>> @BlockFunction("double", ipu_id=1)
        ... def double(x):
        ...     return 2 * x
        >>> double(4)
        8
    """

    def decorate(func: Callable[..., _ResultT]) -> Callable[..., _ResultT]:
        def wrapper(*args: Any, **kwargs: Any) -> _ResultT:
            with Block(user_id, ipu_id):
                return func(*args, **kwargs)

        return wrapper

    return decorate


def removeBlocks(module: torch.nn.Module) -> None:
    """Undo `BeginBlock` on a module and all modules in it.

    Args:
        module: The module; its other hooks stay.

    Raises:
        AssertionError: If it isn't a module.

    Example:
        >>> import torch
        >>> from ipufit.emulator import BeginBlock, removeBlocks
        >>> layer = BeginBlock(torch.nn.Linear(2, 2), ipu_id=1)
        >>> removeBlocks(layer)
        >>> len(layer._forward_pre_hooks)
        0
    """
    require(isinstance(module, torch.nn.Module), f"Not a torch module: {module!r}.")
    for part in module.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, _BeginBlockHook):
                del part._forward_pre_hooks[key]


def module_repr(m: torch.nn.Module) -> str:
    """Describe a module as torch does, and where `BeginBlock` begins blocks.

    Example:
        >>> from ipufit.emulator import BeginBlock
        >>> layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> _ = BeginBlock(layers[1], "second", ipu_id=1)
        >>> builtins.print(module_repr(layers))
        Sequential(
          (0): ReLU()
          (1): BeginBlock(user_id=second, ipu_id=1) Tanh()
        )
    """
    hooks = [
        repr(h) for h in m._forward_pre_hooks.values() if isinstance(h, _BeginBlockHook)
    ]
    name = " ".join([*hooks, type(m).__name__])
    extra = m.extra_repr()
    children = [f"({key}): {module_repr(child)}" for key, child in m.named_children()]
    if extra and not children and "\n" not in extra:
        return f"{name}({extra})"
    parts = [*([extra] if extra else []), *children]
    lines = [line for part in parts for line in part.split("\n")]
    if not lines:
        return f"{name}()"
    body = "".join(f"\n  {line}" for line in lines)
    return f"{name}({body}\n)"


def print(m: Any, *args: Any, **kwargs: Any) -> None:
    """Print an object; for a module, print its blocks first.

    As in PopTorch, a module is printed twice: by `module_repr`, then as usual.

    Args:
        m: A module, or any other object.
        *args: As for the built-in `print`.
        **kwargs: As for the built-in `print`.

    Example:
        >>> print(torch.nn.ReLU())
        ReLU()
        ReLU()
    """
    if isinstance(m, torch.nn.Module):
        builtins.print(module_repr(m), *args, **kwargs)  # noqa: T201 - what it is for
    builtins.print(m, *args, **kwargs)  # noqa: T201 - what it is for
