# SPDX-License-Identifier: Apache-2.0
"""Half precision as a device computes it: in 32 bits, then rounded to 16.

An IPU takes float16 operands, adds up products in float32 (the default partials) and
rounds what it writes. So does every operation here that touches float16, on every
version of torch, the versions without float16 kernels for processors among them. What
only moves or casts values keeps torch's own kernels, and with them the aliasing of
views.

Mixed operands are promoted to float32, as in torch; linear, convolutional and
normalisation layers give the type of their input instead, whatever the type of their
weights; so do recurrent ones where torch lets them (PopTorch user guide, "Half / float
16 support"; PopTorch, `NormalizationOps.cpp`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Callable

import torch
from torch import Tensor

from ipufit.emulator._tracing.operands import map_tensors, tensors_in
from ipufit.emulator._tracing.operation import Operation
from ipufit.emulator._tracing.rounding import rounds_at_random, to_float, to_half

_KEEPS_VALUES = frozenset(
    """
    __get__ __getitem__ __len__ __repr__ __set__ __setitem__ adjoint alias as_strided
    atleast_1d atleast_2d atleast_3d bool broadcast_tensors broadcast_to byte char
    chunk clone contiguous copy_ data_ptr detach detach_ diagonal dim double dsplit
    element_size expand expand_as fill_ flatten float hsplit int is_contiguous
    is_floating_point long moveaxis movedim narrow new_empty new_full new_ones
    new_zeros numel permute ravel real requires_grad_ reshape reshape_as result_type
    select short size split split_with_sizes squeeze squeeze_ stride swapaxes swapdims
    t t_ tensor_split transpose transpose_ unbind unflatten unfold unsafe_chunk
    unsafe_split unsqueeze unsqueeze_ view view_as vsplit zero_
    call_on_host overlapped_input overlapped_output print_tensor run_branch
    run_custom_op run_loop
    """.split()  # noqa: SIM905 - one per line would be two pages
)
"""Functions that compute no new values, or whose parts are recorded themselves."""

_CASTS = frozenset({"half", "to", "type", "type_as"})

_LIKE_INPUT = frozenset(
    """
    batch_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    group_norm gru instance_norm layer_norm linear lstm rnn_relu rnn_tanh
    """.split()  # noqa: SIM905 - one per line would be two pages
)
"""Functions whose results have the type of the first argument, not of the weights."""

_MOVES_VALUES = frozenset(
    """
    abs abs_ absolute cat channel_shuffle concat concatenate dstack flip fliplr flipud
    hstack neg neg_ negative pixel_shuffle pixel_unshuffle relu relu_ roll rot90 stack
    vstack
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions whose results are elements of their arguments, signs and zeros apart.

Their gradients are elements of the results' gradients. float16 can hold all of that, so
nothing is rounded.
"""

_PICKS_VALUES = frozenset(
    """
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax amin ceil cummax
    cummin embedding floor gather index_select kthvalue max max_pool1d max_pool2d
    max_pool3d maximum median min minimum repeat repeat_interleave sign sort tile topk
    trunc
    """.split()  # noqa: SIM905 - one per line would be a page
)
"""Functions of the same kind, but with gradients that are sums."""

_SUMS = frozenset({"__add__", "__radd__", "__sub__", "add", "sub", "subtract"})

_UPDATES_STATISTICS = frozenset({"batch_norm", "instance_norm"})


def in_float32(operation: Operation) -> Operation:
    """An operation as a device computes it if it touches float16.

    Returns:
        The operation itself if there is no float16, or if it computes no values.

    Example:
        >>> x = torch.tensor([1.0, 3.0], dtype=torch.float16)
        >>> in_float32(Operation(torch.sigmoid, "sigmoid", (x,), {})).run()
        tensor([0.7310, 0.9526], dtype=torch.float16)
    """
    name = operation.name
    if name in _CASTS:
        function = _as_rounding_cast(operation)
    elif _keeps_values(operation) or not _has_half(operation.tensors()):
        return operation
    else:
        function = _as_computation(operation.function, name)
    return replace(operation, function=function)


def original(target: Any) -> Any:
    """The function of torch that a node's target is, or that `in_float32` wrapped."""
    return getattr(target, "_computes_in_float32", target)


def is_rounded(target: Any) -> bool:
    """Whether a node's target is a function that `in_float32` wrapped."""
    return original(target) is not target


def _keeps_values(operation: Operation) -> bool:
    if operation.name == "dropout":
        return _drops_nothing(operation.args, operation.kwargs)
    return operation.name in _KEEPS_VALUES


def rounded_alike(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Another function for a node's target: in float32 if `in_float32` wrapped that.

    Args:
        target: Function that the node calls, which may be wrapped.
        function: Computes the same in another way.
    """
    if not is_rounded(target):
        return function
    return _as_computation(function, function.__name__)


def _has_half(value: Any) -> bool:
    return any(tensor.dtype == torch.float16 for tensor in tensors_in(value))


def _as_rounding_cast(operation: Operation) -> Callable[..., Any]:
    func, name, args = operation.function, operation.name, operation.args
    others = [*args[1:], *operation.kwargs.values()]
    is_to_half = name == "half" or torch.float16 in others or _has_half(others)
    if not is_to_half or args[0].dtype != torch.float32:
        return func

    def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_half(tensor) if rounds_at_random() else func(tensor, *args, **kwargs)

    return _named(f"to_half_{name}", func, cast)


@functools.lru_cache(maxsize=None)
def _as_computation(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        return _compute(func, name, args, kwargs)

    return _named(f"half_{name}", func, compute)


def _named(
    name: str, func: Callable[..., Any], wrapper: Callable[..., Any]
) -> Callable[..., Any]:
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper._computes_in_float32 = func  # type: ignore[attr-defined]
    return wrapper


def _compute(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    wide: dict[int, Tensor] = {}
    narrowed, widened = _casts(name, args, kwargs)

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float16:
            return tensor
        if id(tensor) not in wide:
            wide[id(tensor)] = widened(tensor)
        return wide[id(tensor)]

    given = [*args, *kwargs.values()]
    dtype = next((value for value in given if isinstance(value, torch.dtype)), None)
    if dtype == torch.float16:
        args = tuple(map(_single_precision, args))
        kwargs = {name: _single_precision(value) for name, value in kwargs.items()}
    result = func(*map_tensors(args, widen), **map_tensors(kwargs, widen))
    narrow: dict[int, Tensor] = {}
    for changed in _changed_in_place(name, args, kwargs):
        if id(changed) in wide:
            changed.copy_(narrowed(wide[id(changed)]))
            narrow[id(wide[id(changed)])] = changed
    if narrow:
        result = map_tensors(result, lambda tensor: narrow.get(id(tensor), tensor))
    becomes = dtype or _result_dtype(name, args, kwargs)
    if becomes != torch.float16:
        return result
    return map_tensors(result, lambda t: narrowed(t) if t.dtype == torch.float32 else t)


def _casts(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Give the casts of results to float16, and of arguments to float32.

    They round at random only where there is something to round: the first one results,
    the second one gradients.
    """
    if not rounds_at_random() or not _are_all_half(args, kwargs):
        return to_half, to_float
    if _moves_values(name, args, kwargs):
        return _as_half, _as_float
    if name in _PICKS_VALUES:
        return _as_half, to_float
    if _sends_gradients_on(name, args, kwargs):
        return to_half, _as_float
    return to_half, to_float


def _are_all_half(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all numbers are float16's, 0-d ones too, and no tensor is given twice.

    The gradient of one that is given twice is a sum.
    """
    given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    is_half = all(tensor.dtype == torch.float16 for tensor in given)
    return is_half and len({id(tensor) for tensor in given}) == len(given)


def _moves_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether results and gradients are elements of what is given, whatever it is."""
    if name in _MOVES_VALUES:
        return True
    if name.startswith("max_pool"):
        names = ("input", "kernel_size", "stride", "padding", "dilation")
        given = {**dict(zip(names, args)), **kwargs}
        stride = given.get("stride") or given.get("kernel_size")
        is_dense = given.get("dilation", 1) in (1, (1,), (1, 1), (1, 1, 1))
        return is_dense and bool(stride == given.get("kernel_size"))
    return False


def _drops_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of `dropout` is its input."""
    given = {**dict(zip(("input", "p", "training"), args)), **kwargs}
    return given.get("p") == 0.0 or given.get("training") is False


def _sends_gradients_on(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether gradients of a sum reach all operands as they are."""
    shapes = {tensor.shape for tensor in tensors_in(args)}
    return name in _SUMS and len(shapes) == 1 and not kwargs


def _as_float(tensor: Tensor) -> Tensor:
    cast: Tensor = tensor.to(torch.float32)
    return cast


def _as_half(tensor: Tensor) -> Tensor:
    cast: Tensor = tensor.to(torch.float16)
    return cast


def _single_precision(value: Any) -> Any:
    is_half = isinstance(value, torch.dtype) and value == torch.float16
    return torch.float32 if is_half else value


def _changed_in_place(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The arguments that a function of torch writes to."""
    if name in _UPDATES_STATISTICS:
        names = ("input", "running_mean", "running_var")
        given = {**dict(zip(names, args)), **kwargs}
        statistics = (given.get(name) for name in names[1:])
        return [tensor for tensor in statistics if isinstance(tensor, Tensor)]
    is_dunder = name.startswith("__")
    is_in_place = name.startswith("__i") if is_dunder else name.endswith("_")
    if is_in_place or kwargs.get("inplace"):
        return list(tensors_in(args[:1]))
    return list(tensors_in(kwargs.get("out")))


def _result_dtype(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.dtype:
    tensors = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    if name in _LIKE_INPUT:
        first: torch.dtype = tensors[0].dtype
        return first
    # As in torch, numbers in tensors (0-d) don't promote those with dimensions.
    deciding = [t for t in tensors if t.dim()] or tensors
    is_half = all(t.dtype == torch.float16 for t in deciding)
    return torch.float16 if is_half else torch.float32
