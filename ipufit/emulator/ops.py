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
from torch.fx.node import Node
from torch.nn.functional import embedding, interpolate, softplus
from torch.nn.modules.module import _addindent
from torch.overrides import handle_torch_function, has_torch_function

from ._printing import ipu_print_tensor
from ._searches import ctc_beam_search_decoder, fps, nearest
from ._switches import ipu_model_is_on
from .core.autograd_grad import refuse_gradient
from .core.float16 import host_tensor
from .core.graph import (
    GraphModule,
    as_list,
    erase_dead,
    function_name,
    map_tensors,
)
from .core.recording import (
    Recording,
    current_trace,
    enclosing_trace,
    is_tracing,
    require_tensor,
)
from .core.slices import dynamic_slice, dynamic_update
from .enums import MatMulSerializationMode, MultiConvPlanType, OverlapMode
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
    reductions: dict[str, Callable[..., Tensor]]
    reductions = {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}
    require(
        reduction in reductions,
        f"Unsupported reduction type! Got {reduction!r}, expected 'sum', 'mean' or "
        "'none'.",
    )
    return torch.clone(x) if x.dim() == 0 else reductions[reduction](x)


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
        return type(tensors[0])(recomputationCheckpoint(*tensors[0]))
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
        factor: Number of parts; it must divide that dimension. Only
            `MatMulSerializationMode.Disabled` takes the default. If `rhs` is a matrix,
            all rows of `lhs` count as one dimension.
        keep_precision: Add the parts of half-precision products in float32.

    Returns:
        `torch.matmul(lhs, rhs)`.

    Raises:
        AssertionError: One of the last three arguments has another type.
        Error: In a compilation, if `factor` doesn't divide the dimension.

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
    product = torch.matmul(lhs, rhs)
    trace = current_trace()
    if trace is not None and mode is not MatMulSerializationMode.Disabled:
        # PopTorch merges batches into rows where `rhs` is a matrix (`BlasOps.cpp`).
        rows = lhs.shape[:-1] if rhs.dim() == 2 else lhs.shape[-2:-1]
        sizes = rows.numel(), lhs.shape[-1], rhs.shape[-1]
        size = dict(zip(MatMulSerializationMode, sizes))[mode]
        if factor < 1 or size % factor:
            trace.refuse_live(
                product,
                f"poptorch.serializedMatMul: invalid serialisation factor {factor} for "
                f"{mode.value} of size {size} (PopART, `matmul.cpp`). It must divide "
                "the size; an ordinary product is torch.matmul.",
            )
    return product


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Limit the memory for temporary data of the operation that made `tensor`.

    Args:
        tensor: Result of a convolution, a matrix product or a look-up.
        available_memory_proportion: Above 0, and at most 1; a device takes 0.6 by
            default.

    Returns:
        The same tensor.

    Raises:
        Error: `tensor` isn't a tensor. In a compilation, if it is an input or a weight,
            or the proportion is out of range.

    Example:
        >>> set_available_memory(torch.tensor([1.0]), 0.3)
        tensor([1.])
    """
    require_tensor(tensor, "You may only set available memory for torch.tensor values.")
    trace = current_trace()
    if trace is None or not trace.is_on_device(tensor):
        return tensor
    is_operation = trace.nodes[id(tensor)].op != "placeholder"
    if not (is_operation and 0 < available_memory_proportion <= 1):
        what = "the result of an operation" if is_operation else "an input or a weight"
        trace.refuse_live(
            tensor,
            f"poptorch.set_available_memory of {what}, {available_memory_proportion}: "
            "the proportion must be in (0,1], and the tensor the result of a "
            "convolution, a matrix product or a look-up (PopART, `builder.cpp`).",
        )
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
        trace = current_trace()
        if trace is not None:
            trace.scopes.append(self.name)

    def __exit__(self, *exception: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.pop_scope()


class MultiConv:
    """Lets the device compute the convolutions inside together.

    Other operations may be inside, another `MultiConv` may not, nor a convolution of
    another one's result. Results don't change. The settings below are checked, some
    only when a model is compiled, but not used.

    Example:
        >>> convolution = torch.nn.Conv2d(1, 1, 3)
        >>> with MultiConv().availableMemoryProportions(0.8):
        ...     convolution(torch.zeros(1, 1, 3, 3)).shape
        torch.Size([1, 1, 1, 1])
    """

    def __init__(self) -> None:
        self._settings: dict[str, list[Any]] = {}
        self._trace: Recording | None = None
        self._first_node = 0

    def availableMemoryProportions(self, value: Any) -> MultiConv:
        """Limit the memory for temporary data.

        Args:
            value: A float above 0 and at most 1, one for each convolution, or None.

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
        self._settings["availableMemoryProportions"] = as_list(value or [])
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
        if not {*as_list(value)} <= {torch.float, torch.half}:
            raise ValueError(
                "Invalid partials types. Expecting torch.float or torch.half. "
                f"Got {value!r}."
            )
        self._settings["partialsTypes"] = as_list(value)
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
            value: A proportion above 0.

        Raises:
            AssertionError: `value` isn't a float.

        Example:
            >>> _ = MultiConv().cycleBackOff(0.3)
        """
        require(isinstance(value, float), f"cycleBackOff: {value!r} is no float.")
        self._settings["cycleBackOff"] = [value]
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
        if exc_type is None:
            self._check(list(trace.graph.nodes)[self._first_node :])

    def _check(self, nodes: list[Node]) -> None:
        """Refuse settings and operations inside that a device can't have."""
        count = 0
        following: set[Node] = set()
        for node in nodes:
            name = function_name(node)
            is_convolution = name.startswith("conv") and "transpose" not in name
            follows = not following.isdisjoint(node.all_input_nodes)
            if is_convolution and follows:
                raise createPoptorchError(
                    "A convolution in this poptorch.MultiConv needs the result of "
                    "another one in it, so that PopTorch's compiler never ends "
                    "(`PopartLateCanonicalization.cpp`). Move one of them out."
                )
            if is_convolution or follows:
                following.add(node)
            count += is_convolution
        if not count:
            raise createPoptorchError(
                "Unexpected end_multi_conv: there is no convolution inside this "
                "poptorch.MultiConv."
            )
        for name, values in self._settings.items():
            is_memory = name == "availableMemoryProportions"
            numbers = [value for value in values if isinstance(value, float)]
            fits = all(0 < value <= (1 if is_memory else value) for value in numbers)
            if len(values) not in (0, 1, count) or not fits:
                raise createPoptorchError(
                    f"poptorch.MultiConv().{name}({values}): PopART takes one value or "
                    f"one for each of the {count} convolutions inside; numbers must be "
                    "above 0, and proportions of memory at most 1 (`builder.cpp`)."
                )


def _all_are(value: Any, kind: type) -> bool:
    return all(isinstance(element, kind) for element in as_list(value))


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Fetch inputs ahead of the computation that needs them.

    Compiling refuses it if anything else is done to the input, and, unless the mode is
    `NoOverlap`, if the strategy is pipelined, without IO tiles, or with an output mode
    other than `OutputMode.All` and `Sum`.

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


def overlapped_input(tensor: Tensor, mode: str) -> Tensor:
    """Mark an input, for `set_overlap_for_input`."""
    return tensor.view_as(tensor)


def overlapped_output(tensor: Tensor, mode: str) -> Tensor:
    """Mark an output, for `set_overlap_for_output`."""
    return tensor.view_as(tensor)


def _mark(mark: Any, tensors: Any, mode: OverlapMode) -> Any:
    trace, name = current_trace(), mode.value
    if trace is None:
        return tensors
    return map_tensors(tensors, lambda tensor: trace.record(mark, tensor, name))


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
        _begin_block_of(self)
        return self._layer_to_call(*args, **kwargs)


class _BeginBlockHook:
    """Forward-pre-hook that begins a block.

    It is a class, not a closure, so that it can be copied and pickled.
    """

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        _begin_block_of(self)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def _begin_block_of(owner: LegacyBeginBlockFn | _BeginBlockHook) -> None:
    """Begin a block whose first automatic id stays for later traces, as in PopTorch."""
    trace = enclosing_trace()
    if trace is not None:
        owner._user_id = owner._user_id or trace.strategy._next_auto_id()
        Block.start(owner._user_id, owner._ipu_id)


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
    if not children and "\n" not in extra:
        return f"{name}({extra})"
    lines = "\n".join(filter(None, [extra, *children]))
    indented = _addindent(f"(\n{lines}", 2)  # type: ignore[no-untyped-call,unused-ignore]
    return f"{name}{indented}\n)"


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


def _embedding(
    weight: Tensor, indices: Tensor, /, padding_idx: Any = None, **others: Any
) -> Tensor:
    """Emulate `Embedding.cpp`: the row of `padding_idx` gets no gradient."""
    return embedding(indices, weight, padding_idx)


def _softplus(x: Tensor, /, beta: Any = 1, threshold: Any = 1, **others: Any) -> Tensor:
    """Emulate `TorchSoftplus.cpp`: linear above a threshold."""
    return softplus(x, beta, threshold)


def _upsample(
    x: Tensor, /, scaling_factor: Any = 2, align_corners: Any = 0, **others: Any
) -> Tensor:
    """Emulate `UpsampleBilinear2d.cpp`."""
    return interpolate(x, None, scaling_factor, "bilinear", bool(align_corners))


_SHIPPED_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "Embedding": _embedding,
    "FastGatherLastDim": _fast_gather_last_dim,
    "TorchSoftplus": _softplus,
    "UpsampleBilinear2d": _upsample,
}
"""Name to the same computation with functions of torch."""


ATTR_PREFIX = "attr:"
"""Prefix of the address of an attribute dict in a string that PopTorch passes on."""

attributes_lists: list[dict[str, Any]] = []
"""The attributes of all calls of `custom_op`, kept for good."""

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
        Error: In a trace: an attribute doesn't fit into 32 bits or is an empty list, an
            input is the host's, no function is registered for the operation, or it
            returns something else than `example_outputs`.

    Example:
        >>> x = torch.tensor([1.0])
        >>> custom_op([x], "Cube", "ops.example", 1, example_outputs=[x])
        [tensor([0.])]
    """
    attributes = attributes or {}
    trace = current_trace()
    _check_attributes(attributes, is_compiled=trace is not None)
    attributes_lists.append(attributes)
    if trace is None:
        return [torch.zeros_like(example) for example in example_outputs]
    outputs: list[Any]
    inputs, full_name = list(inputs), f"{domain}::{name}"
    trace.require_device(full_name, inputs)
    if (domain, name) in _registered:
        function = functools.partial(_registered[domain, name], **attributes)
        outputs = trace.record(run_custom_op, function, inputs)
    elif domain == DOMAIN and name in _SHIPPED_OPERATIONS:
        outputs = [_SHIPPED_OPERATIONS[name](*inputs, **attributes)]
    elif domain == DOMAIN:
        raise createPoptorchError(
            f"PopTorch has no custom operation {full_name} for models. There are "
            f"{', '.join(_SHIPPED_OPERATIONS)}; parts of a model run on the host with "
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


def _check_attributes(attributes: dict[str, Any], *, is_compiled: bool) -> None:
    """Refuse attributes that PopTorch refuses at the call, or when it compiles it."""
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
        elements = as_list(value)
        if not all(isinstance(element, (float, int, str)) for element in elements):
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
        if is_compiled and not elements:
            raise createPoptorchError(
                f"Attribute {key!r} is empty: PopTorch reads the type of a list from "
                "its first element (`LowerToPopart.cpp`). Leave it out."
            )
        for element in elements if is_compiled else ():
            if isinstance(element, float) and abs(element) > _LARGEST_FLOAT:
                side = "high" if element > 0 else "low"
                raise createPoptorchError(
                    f"{element:g} is too {side} for a Popart float attribute."
                )


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Look up the attributes of a custom operation.

    Args:
        attribute_id_str: JSON, or `attr:` and the address of a dictionary that
            `custom_op` has kept, in hexadecimal. That of `None` stands for none.

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
    if address == id(None):
        return {}
    for attributes in attributes_lists:
        if id(attributes) == address:
            return attributes
    raise ValueError(
        f"Invalid attribute_id_str: no custom_op has attributes at {address:#x}."
    )


@dataclass(frozen=True, eq=False)
class Body:
    """The traced body of a loop or a branch.

    Attributes:
        root: The module that holds the graph's constants.
        graph: Takes the inputs, then tensors from outside the body.
        example: Tensors that the body returned while it was traced.
    """

    root: torch.nn.Module
    graph: Graph
    example: list[Tensor]

    @functools.cached_property
    def _program(self) -> Callable[..., list[Tensor]]:
        return GraphModule(self.root, self.graph).forward

    def run(
        self, inputs: list[Tensor], captured: list[Tensor], count: int = 1
    ) -> list[Tensor]:
        """Run the body `count` times on the device, each time on its last results."""
        if is_tracing():
            return _copies(self.example)
        for _ in range(count):
            inputs = self._program(*_copies(inputs), *captured)
        return _copies(inputs)


_Branch = Tuple[Body, List[Tensor], List[Tensor]]
"""A body, its inputs, and the tensors from outside that it uses."""


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
    recorded, *tensors = _record_body(trace, "for_loop", body, inputs)
    _check_same(
        "the body of poptorch.for_loop takes and returns", recorded.example, inputs
    )
    return trace.record(run_loop, count, recorded, *tensors)


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
            shapes or types, or tensors without dimensions.

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
    if any(output.dim() == 0 for output in other[0].example):
        raise createPoptorchError(
            "`else` branch output has an empty shape: bodies of poptorch.cond can't "
            "return tensors without dimensions (PopTorch, "
            "`AddSubgraphConnectionNodes.cpp`). Return `y.reshape(1)` in both."
        )
    return trace.record(run_branch, condition, then, other)


def run_loop(
    count: int, body: Body, inputs: list[Tensor], captured: list[Tensor]
) -> list[Tensor]:
    """Run `for_loop` on the device."""
    return body.run(inputs, captured, count)


def run_branch(condition: Tensor, then: _Branch, other: _Branch) -> list[Tensor]:
    """Run `cond` on the device."""
    body, inputs, captured = then if is_tracing() or bool(condition) else other
    return body.run(inputs, captured)


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
    captured = list(dict.fromkeys(n for n in used if n not in {*cut, *starts}))
    graph = Graph()
    moved = {
        node: graph.placeholder(f"argument_{index}")
        for index, node in enumerate([*starts, *captured])
    }
    for node in cut:
        moved[node] = graph.node_copy(node, moved.__getitem__)
    values = {moved[node]: trace.results[node] for node in moved.keys() & trace.results}
    trace.results.update(values)  # by which rules of operators judge the body
    erase_dead(graph, [moved[node] for node in results])
    graph.output([moved[node] for node in results])
    for node in reversed(cut):
        trace.graph.erase_node(node)
    trace.nodes = before
    body = Body(trace.root, graph, outputs)
    return body, copies, [trace.results[node] for node in captured]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.clone(tensor) for tensor in tensors]


def _check_same(what: str, *lists: Sequence[Tensor]) -> None:
    """Refuse tensors that differ in shape or type: a device allots memory once."""
    first, second = ([(tuple(t.shape), t.dtype) for t in tensors] for tensors in lists)
    if first != second:
        raise createPoptorchError(
            f"What {what} must be tensors of the same number, shapes and types. Got "
            f"{first} and {second}."
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
    "BeginBlock",
    "Block",
    "BlockFunction",
    "LegacyBeginBlockFn",
    "MultiConv",
    "NameScope",
    "accessAttributes",
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
    "module_repr",
    "nearest",
    "nop",
    "print",
    "recomputationCheckpoint",
    "register_custom_op",
    "removeBlocks",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
