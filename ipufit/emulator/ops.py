# SPDX-License-Identifier: Apache-2.0
"""Functions a module may call in `forward` (`poptorch.*`, `poptorch.ops`)."""

from __future__ import annotations

import builtins
import functools
import json
import operator
from dataclasses import dataclass
from typing import Any, Callable, List, Mapping, Sequence, Tuple, TypeVar

import torch
from torch import Tensor
from torch.fx.graph import Graph
from torch.nn.functional import embedding, interpolate, softplus
from torch.overrides import handle_torch_function, has_torch_function

from ._printing import ipu_print_tensor
from ._searches import ctc_beam_search_decoder, fps, nearest
from .core.autograd_grad import refuse_gradient
from .core.float16 import host_tensor
from .core.graph import GraphModule, as_list, erase_dead, map_tensors
from .core.pod import ipu_model_is_on
from .core.recording import (
    Recording,
    current_trace,
    enclosing_trace,
    is_tracing,
    require_tensor,
)
from .core.slices import dynamic_slice, dynamic_update
from .enums import (
    MatMulSerializationMode,
    MultiConvPlanType,
    OverlapMode,
)
from .errors import Error, createPoptorchError, require

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
        inside = [n.target for n in trace.graph.nodes][self._first_node :]
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


DOMAIN = "poptorch.custom_ops"


def _fast_gather_last_dim(data: Tensor, index: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `FastGatherLastDim.cpp`: `torch.gather` along the last dimension."""
    if ipu_model_is_on():
        raise _refused("requires hardware but IPU model is enabled")
    if data.dim() != index.dim():
        raise _refused(
            "Input and Index tensors do not have same rank: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if data.shape[:-1] != index.shape[:-1]:
        raise _refused(
            "Index tensor must have same dimensions as Input except for last dim: "
            f"{tuple(data.shape)} and {tuple(index.shape)}"
        )
    if not data.is_floating_point() or index.dtype not in (torch.int32, torch.int64):
        raise _refused(
            "Input must be float32 or float16 and Index int32: "
            f"{data.dtype} and {index.dtype}"
        )
    return torch.gather(data, -1, index.long())


def _refused(why: str) -> Error:
    return Error(f"FastGatherLastDim: {why}.", type="popart_exception")


def _torch_softplus(x: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `TorchSoftplus.cpp`: linear above a threshold, by default 1."""
    beta = attributes.get("beta", 1.0)
    threshold = attributes.get("threshold", 1.0)
    return softplus(x, beta=beta, threshold=threshold)


def _embedding(weight: Tensor, indices: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `Embedding.cpp`: the row of `padding_idx` gets no gradient."""
    return embedding(indices, weight, padding_idx=attributes.get("padding_idx"))


def _upsample_bilinear_2d(x: Tensor, /, **attributes: Any) -> Tensor:
    """Emulate `UpsampleBilinear2d.cpp`: by `scaling_factor`, by default 2."""
    return interpolate(
        x,
        scale_factor=attributes.get("scaling_factor", 2.0),
        mode="bilinear",
        align_corners=bool(attributes.get("align_corners", 0)),
    )


SHIPPED_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "Embedding": _embedding,
    "FastGatherLastDim": _fast_gather_last_dim,
    "TorchSoftplus": _torch_softplus,
    "UpsampleBilinear2d": _upsample_bilinear_2d,
}
"""Name to the same computation with functions of torch."""


ATTR_PREFIX = "attr:"
"""Prefix of the address of an attribute dict in a string that PopTorch passes on."""

attributes_lists: list[dict[str, Any]] = []
"""The attributes of all calls of `custom_op`, kept for good."""

_ATTRIBUTE_TYPES = (float, int, str)
_LARGEST_FLOAT = torch.finfo(torch.float32).max


_registered: dict[tuple[str, str], Callable[..., Any]] = {}
"""Domain and name of an operation to the Python function that computes it."""


def register_custom_op(
    name: str, domain: str, function: Callable[..., Any] | None
) -> None:
    """Register a Python function for a custom operation that is written in C++.

    Models that are compiled from now on run `function` where they call
    `poptorch.custom_op` with this name and domain. PopTorch has no such function: a
    program that runs on IPUs loads the compiled operation.

    Args:
        name: Name of the operation.
        domain: Domain of the operation, such as `com.acme`.
        function: Takes the input tensors, and the attributes by name; returns a tensor,
            or a tuple or list of tensors. A trace doesn't look into it: it may read
            values, change its inputs in place and use a `torch.autograd.Function` for
            the gradients. It also runs while the model is traced. `None` removes the
            operation.

    Raises:
        Error: `function` can't be called.

    Example:
        >>> import ipufit.emulator as poptorch
        >>> def leaky_relu(x, alpha):
        ...     return torch.where(x > 0, x, alpha * x)
        >>> poptorch.register_custom_op("LeakyRelu", "com.acme", leaky_relu)
        >>> class Network(torch.nn.Module):
        ...     def forward(self, x):
        ...         return poptorch.custom_op(
        ...             [x], "LeakyRelu", "com.acme", 1, [x], attributes={"alpha": 0.5}
        ...         )[0]
        >>> poptorch.inferenceModel(Network())(torch.tensor([-1.0, 1.0]))
        tensor([-0.5000,  1.0000])
        >>> poptorch.register_custom_op("LeakyRelu", "com.acme", None)
    """
    if function is None:
        _registered.pop((domain, name), None)
        return
    if not callable(function):
        raise createPoptorchError(
            f"What computes {domain}::{name} must be a function. Got {function!r}."
        )
    _registered[domain, name] = function


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Run an operation that is written in C++ for PopART.

    On the host it gives zeros, as PopTorch does. There is no PopART here: a model may
    call the operations that PopTorch has itself (`FastGatherLastDim`), and those that
    `register_custom_op` knows.

    Args:
        inputs: Tensors that the operation takes.
        name: Name of the operation.
        domain: Domain of the operation, such as `com.acme`.
        domain_version: Version of the domain; only real IPUs look at it.
        example_outputs: Tensors of the shapes and types that it returns.
        attributes: Names to floats, ints, strings, or lists or tuples of one of
            these.

    Returns:
        Zeros like `example_outputs`; in a trace, the operation's results.

    Raises:
        ValueError: An attribute is none of these, or isn't ASCII.
        Error: In a trace: an attribute doesn't fit into 32 bits, an input is the
            host's, no function is registered for the operation, or it returns
            something else than `example_outputs`.

    Example:
        >>> x = torch.tensor([1.0])
        >>> custom_op([x], "Cube", "ops.example", 1, example_outputs=[x])
        [tensor([0.])]
    """
    attributes = attributes or {}
    for key, value in attributes.items():
        _check_attribute(key, value)
    attributes_lists.append(attributes)
    trace = current_trace()
    if trace is None:
        return [torch.zeros_like(example) for example in example_outputs]
    for value in attributes.values():
        for element in as_list(value):
            if isinstance(element, float) and abs(element) > _LARGEST_FLOAT:
                side = "high" if element > 0 else "low"
                raise createPoptorchError(
                    f"{element:g} is too {side} for a Popart float attribute."
                )
    outputs: list[Any]
    inputs, full_name = list(inputs), f"{domain}::{name}"
    trace.require_device(full_name, inputs)
    if (domain, name) in _registered:
        function = functools.partial(_registered[domain, name], **attributes)
        outputs = trace.record(run_custom_op, function, inputs)
    elif domain == DOMAIN and name in SHIPPED_OPERATIONS:
        outputs = [SHIPPED_OPERATIONS[name](*inputs, **attributes)]
    elif domain == DOMAIN:
        raise createPoptorchError(
            f"PopTorch has no custom operation {full_name} for models. There are "
            f"{', '.join(SHIPPED_OPERATIONS)}; parts of a model run on the host with "
            "poptorch.CPU."
        )
    else:
        raise createPoptorchError(
            f"The custom operation {full_name} (version {domain_version}) is C++ code "
            "of PopART, which can't be emulated. Say in Python what it computes, before"
            f" the model is compiled: `ipufit.emulator.register_custom_op({name!r}, "
            f"{domain!r}, function)` with `def function("
            f"{', '.join(['*inputs', *attributes])})`, or compose it of torch "
            "functions, or run this model on real IPUs."
        )
    got, expected = _kinds(outputs), _kinds(example_outputs)
    if got != expected:  # on which the rest of the model relies
        raise createPoptorchError(
            f"The custom operation {full_name} returns {', '.join(got) or 'nothing'}, "
            f"but example_outputs are {', '.join(expected) or 'empty'}."
        )
    return outputs


def run_custom_op(function: Callable[..., Any], inputs: list[Tensor]) -> list[Any]:
    """Run a registered custom operation on the device."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    # Views have gradients of their own, be they made by a torch.autograd.Function.
    return [o.view_as(o) if isinstance(o, Tensor) else o for o in outputs]


def _kinds(values: Sequence[Any]) -> list[str]:
    return [
        f"{host_tensor(value).dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in values
    ]


def attributes_at(address: str) -> dict[str, Any] | None:
    """Find attributes by the address that `torch.ops.poptorch` passes.

    Args:
        address: `ATTR_PREFIX` and the hexadecimal address of one of
            `attributes_lists`, or of `None`.

    Example:
        >>> attributes_at(f"{ATTR_PREFIX}{hex(id(None))}") is None
        True
    """
    by_address = {f"{ATTR_PREFIX}{hex(id(kept))}": kept for kept in attributes_lists}
    return by_address.get(address)


def _check_attribute(key: Any, value: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
    elements = as_list(value)
    if not all(isinstance(element, _ATTRIBUTE_TYPES) for element in elements):
        raise ValueError(
            "Attribute values must be floats, ints, strings or a list/tuple of "
            f"float, ints of strings. {key!r} is {value!r}."
        )
    if not all(isinstance(element, type(elements[0])) for element in elements):
        raise ValueError(
            "The types in a list/tuple attribute must all be the same. "
            f"{key!r} is {value!r}."
        )
    for text in (key, *elements):
        if isinstance(text, str) and not text.isascii():
            raise ValueError(f"{text} contains non-ASCII characters.")


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Look up the attributes of a custom operation.

    Args:
        attribute_id_str: JSON, or `attr:` and the address of a dictionary that
            `custom_op` has kept, in hexadecimal.

    Raises:
        ValueError: `attribute_id_str` is neither.

    Example:
        >>> accessAttributes('{"alpha": 2}')
        {'alpha': 2}
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError("Wrong type for attribute_id_str: it must be a string.")
    if attribute_id_str.startswith("{"):
        return json.loads(attribute_id_str)
    if not attribute_id_str.startswith(ATTR_PREFIX):
        raise ValueError(
            f"Invalid attribute_id_str: {attribute_id_str!r} begins neither with '{{' "
            f"nor with {ATTR_PREFIX!r}."
        )
    address = int(attribute_id_str[len(ATTR_PREFIX) :], 16)
    kept = attributes_at(f"{ATTR_PREFIX}{address:#x}")
    if kept is None:
        raise ValueError(
            f"Invalid attribute_id_str: no custom_op has attributes at {address:#x}."
        )
    return kept


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


__all__ = [
    "ATTR_PREFIX",
    "CPU",
    "MultiConv",
    "NameScope",
    "attributes_lists",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
