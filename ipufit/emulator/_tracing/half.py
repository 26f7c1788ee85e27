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

import contextlib
import functools
from dataclasses import replace
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import Function

from ipufit.emulator._tracing.operands import map_tensors, tensors_in
from ipufit.emulator._tracing.operation import Operation

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

_UPDATES_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_FRACTION_BITS = 13  # how many more float32 has than float16
_SMALLEST_NORMAL = 2.0**-14
_SUBNORMAL_STEP = 2.0**-24

_is_stochastic = False


@contextlib.contextmanager
def rounding(*, is_stochastic: bool) -> Iterator[None]:
    """Choose how results are rounded to float16 for a while.

    Args:
        is_stochastic: Whether to round up or down at random, to the nearer value with
            the higher probability, so that the expected result is exact
            (`Options.Precision.enableStochasticRounding`). Otherwise to the nearest.

    Example:
        >>> with rounding(is_stochastic=True):
        ...     ups = to_half(torch.full((4000,), 2049.0)) > 2048
        >>> 1800 < ups.sum().item() < 2200
        True
    """
    global _is_stochastic
    before = _is_stochastic
    _is_stochastic = is_stochastic
    try:
        yield
    finally:
        _is_stochastic = before


def to_half(tensor: Tensor) -> Tensor:
    """Round float32 to float16 as `rounding` says; the gradient passes through.

    Example:
        >>> to_half(torch.tensor([2049.0]))
        tensor([2048.], dtype=torch.float16)
    """
    if not _is_stochastic:
        return torch.as_tensor(tensor, dtype=torch.float16)
    rounded: Tensor = _Narrow.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    return rounded


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
    elif name in _KEEPS_VALUES or not _has_half(operation.tensors()):
        return operation
    else:
        function = _as_computation(operation.function, name)
    return replace(operation, function=function)


def original(target: Any) -> Any:
    """The function of torch that a node's target is, or that `in_float32` wrapped."""
    return getattr(target, "_computes_in_float32", target)


def _has_half(value: Any) -> bool:
    return any(tensor.dtype == torch.float16 for tensor in tensors_in(value))


def _as_rounding_cast(operation: Operation) -> Callable[..., Any]:
    func, name, args = operation.function, operation.name, operation.args
    others = [*args[1:], *operation.kwargs.values()]
    is_to_half = name == "half" or torch.float16 in others or _has_half(others)
    if not is_to_half or args[0].dtype != torch.float32:
        return func

    def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_half(tensor) if _is_stochastic else func(tensor, *args, **kwargs)

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

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float16:
            return tensor
        if id(tensor) not in wide:
            wide[id(tensor)] = _widened(tensor)
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
            changed.copy_(to_half(wide[id(changed)]))
            narrow[id(wide[id(changed)])] = changed
    if narrow:
        result = map_tensors(result, lambda tensor: narrow.get(id(tensor), tensor))
    becomes = dtype or _result_dtype(name, args, kwargs)
    if becomes != torch.float16:
        return result
    return map_tensors(result, lambda t: to_half(t) if t.dtype == torch.float32 else t)


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


def _widened(tensor: Tensor) -> Tensor:
    if not _is_stochastic:
        return torch.as_tensor(tensor, dtype=torch.float32)
    wide: Tensor = _Widen.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    return wide


class _Widen(Function):
    """Cast to float32; the gradient is rounded, as every result of the device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return torch.as_tensor(tensor, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return _round_stochastically(gradient)


class _Narrow(Function):
    """Round to float16; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return _round_stochastically(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return torch.as_tensor(gradient, dtype=torch.float32)


def _round_stochastically(tensor: Tensor) -> Tensor:
    """Round without bias: add random bits below the last one that is kept."""
    noise = torch.randint_like(tensor, 2**_FRACTION_BITS, dtype=torch.int32)
    bits = tensor.contiguous().view(torch.int32) + noise
    kept = bits & -(2**_FRACTION_BITS)
    normal = kept.view(torch.float32)
    # Below the normal numbers float16 has a fixed step.
    steps = tensor / _SUBNORMAL_STEP
    subnormal = torch.floor(steps + noise / 2**_FRACTION_BITS) * _SUBNORMAL_STEP
    rounded = torch.where(tensor.abs() < _SMALLEST_NORMAL, subnormal, normal)
    exact = torch.where(tensor.isfinite(), rounded, tensor)
    return torch.as_tensor(exact, dtype=torch.float16)
