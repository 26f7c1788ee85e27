# SPDX-License-Identifier: Apache-2.0
"""Half precision as a device computes it: in 32 bits, then rounded to 16.

An IPU takes float16 operands, sums products in float32 (the default partials) and
rounds what it writes. So does every operation here with float16 operands, on every
version of torch, also those without float16 kernels for CPUs. Operations that only view
or cast values keep torch's own kernels, so that views still share memory.

Mixed operands are promoted to float32, as in torch. Linear, convolutional and
normalisation layers return the type of their input instead, whatever the type of their
weights; so do recurrent ones where torch lets them (PopTorch user guide, "Half / float
16 support"; PopTorch, `NormalizationOps.cpp`).

Numbers are rounded to the nearest, or stochastically: a number becomes one of its two
neighbours in float16, the nearer one with the higher probability, so that the expected
result is exact (`Options.Precision.enableStochasticRounding`).
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import Function

from .graph import (
    Operation,
    base_name,
    map_tensors,
    tensors_in,
)

_KEEPS_VALUES = frozenset(
    """
    __get__ __getitem__ __len__ __repr__ __set__ __setitem__ adjoint alias as_strided
    atleast_1d atleast_2d atleast_3d bool broadcast_tensors broadcast_to byte char
    chunk clone contiguous copy data_ptr detach diagonal dim double dsplit element_size
    expand expand_as fill flatten float hsplit int is_contiguous is_floating_point long
    moveaxis movedim narrow new_empty new_full new_ones new_zeros numel permute ravel
    real requires_grad reshape reshape_as resize resize_as result_type select short
    size split split_with_sizes squeeze stride swapaxes swapdims t tensor_split
    transpose unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as
    vsplit zero
    call_on_host overlapped_input overlapped_output print_tensor run_branch
    run_custom_op run_loop
    """.split()  # noqa: SIM905 - one per line would be two pages
)
"""Functions that compute no new values, or whose parts are recorded themselves.

Those that do so in place are included: `squeeze_` with `squeeze`."""

_CASTS = frozenset({"_to_copy", "half", "to", "type", "type_as"})

_LIKE_INPUT = frozenset(
    """
    batch_norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    group_norm gru instance_norm layer_norm linear lstm rnn_relu rnn_tanh
    """.split()  # noqa: SIM905 - one per line would be two pages
)
"""Functions whose results have the type of the first argument, not of the weights."""

_STATISTICS = ("running_mean", "running_var")
_UPDATES_STATISTICS = frozenset({"batch_norm", "instance_norm"})

# Tensors: torch makes one of each number in an expression, in a second operation.
_CUT_OFF = torch.tensor(2**13 - 1, dtype=torch.int32)
"""The bits of a float32 fraction that float16 doesn't have."""

_OTHER_BITS = ~_CUT_OFF

_TO_SUBNORMAL = torch.tensor(2.0**-112, dtype=torch.float32)
"""Takes 2**-14 to 2**-126: the least normal numbers of float16 and of float32."""

_FROM_SUBNORMAL = 1 / _TO_SUBNORMAL

_ROW = 2**12
"""The number of independent words in a table of random words."""

_is_stochastic = False


@contextlib.contextmanager
def rounding(*, is_stochastic: bool) -> Iterator[None]:
    """Choose how results are rounded to float16 inside the context.

    Args:
        is_stochastic: Whether to round stochastically, and not to the nearest.

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


def rounds_at_random() -> bool:
    """Return whether results are rounded stochastically now."""
    return _is_stochastic


def to_half(tensor: Tensor) -> Tensor:
    """Round float32 to float16, in the chosen way; the gradient passes through.

    Example:
        >>> to_half(torch.tensor([2049.0]))
        tensor([2048.], dtype=torch.float16)
    """
    if not _is_stochastic:
        return _cast(tensor, torch.float16)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Narrow.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    return _round_at_random(tensor.detach())


def _to_float(tensor: Tensor) -> Tensor:
    """Cast float16 to float32, with a gradient that is rounded to float16."""
    if _is_stochastic and tensor.requires_grad and torch.is_grad_enabled():
        return _Widen.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
    return _cast(tensor, torch.float32)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype)


class _Widen(Function):
    """Casts to float32; its gradient is rounded, as every result of the device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return _cast(tensor, torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return to_half(gradient)


class _Narrow(Function):
    """Rounds to float16; its gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return _round_at_random(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return _cast(gradient, torch.float32)


def _round_at_random(tensor: Tensor) -> Tensor:
    """Round float32 to float16 stochastically, without bias.

    Values that float16 can represent, infinities and NaN stay as they are. From 65504
    on the upper neighbour is infinite.

    A number is scaled so that it is subnormal in float32 if it is in float16. Then
    float16 lacks the same 13 bits of each number. Random bits are added to these, and
    they are cut off. `torch.set_flush_denormal(True)` makes numbers below
    2**-14 zero.

    More than 4096 numbers are a table with rows of that length. Their random words are
    those of the row, each XORed with a word of the column. Any three of these words are
    independent, so sums and means have the mean and the spread that they would have if
    all words were drawn.
    """
    scaled = torch.mul(tensor, _TO_SUBNORMAL)  # without gaps in memory
    count = scaled.numel()
    bits = scaled.view(torch.int32).as_strided((count,), (1,))
    width = min(count, _ROW)
    words = torch.empty((width + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    random = words.view(torch.int32)[:width] & _CUT_OFF
    if count > width:
        column = torch.randint(2**13, (-(-count // _ROW), 1), dtype=torch.int32)
        random = torch.bitwise_xor(column, random).view(-1)[:count]
    bits.add_(random).bitwise_and_(_OTHER_BITS)
    return scaled.mul_(_FROM_SUBNORMAL).half()


def in_float32(operation: Operation) -> Operation:
    """Make an operation with float16 tensors compute in float32, as a device does.

    Returns:
        The operation itself if there is no float16, or if it computes no values.

    Example:
        >>> x = torch.tensor([1.0, 3.0], dtype=torch.float16)
        >>> in_float32(Operation(torch.sigmoid, "sigmoid", (x,), {})).run()
        tensor([0.7310, 0.9526], dtype=torch.float16)
    """
    function, name, args = operation.function, operation.name, operation.args
    if name in _CASTS:
        others = [*args[1:], *operation.kwargs.values()]
        types = [v.dtype if isinstance(v, Tensor) else v for v in others]
        is_to_half = name == "half" or torch.float16 in types
        if not is_to_half or args[0].dtype != torch.float32:
            return operation
        function = _as_rounding_cast(function, name)
    elif (
        base_name(name) in _KEEPS_VALUES
        or (name == "dropout" and _drops_nothing(operation))
        or all(tensor.dtype != torch.float16 for tensor in operation.tensors())
    ):
        return operation
    else:
        function = _as_computation(function, name)
    return replace(operation, function=function)


def _drops_nothing(dropout: Operation) -> bool:
    """Return whether `dropout` returns its input unchanged."""
    given = dropout.arguments
    return given.get("p") == 0.0 or False in (given.get("training"), given.get("train"))


def rounded_alike(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return another function for a node's target, in float32 if the target was.

    Args:
        target: Function that the node calls, which `in_float32` may have wrapped.
        function: Computes the same in another way.
    """
    if not hasattr(target, "_computes_in_float32"):
        return function
    return _as_computation(function, function.__name__)


def _as_rounding_cast(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_half(tensor) if _is_stochastic else func(tensor, *args, **kwargs)

    return _named(f"to_half_{name}", func, cast)


@functools.lru_cache(maxsize=None)
def _as_computation(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that computes in float32, then rounds its results."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        halves = {id(t): t for t in given if t.dtype == torch.float16}
        wide = {key: _to_float(tensor) for key, tensor in halves.items()}
        before = {key: tensor._version for key, tensor in wide.items()}
        values = [*args, *kwargs.values()]
        dtype = next((v for v in values if isinstance(v, torch.dtype)), None)

        def widened(value: Any) -> Any:
            return torch.float32 if value is torch.float16 else value

        given_args, given_kwargs = map_tensors(
            (args, kwargs), lambda tensor: wide.get(id(tensor), tensor)
        )
        result = func(
            *map(widened, given_args),
            **{key: widened(value) for key, value in given_kwargs.items()},
        )
        statistics: list[Any] = []
        if name in _UPDATES_STATISTICS:  # without telling the version counter
            statistics = [*args[1:3], *map(kwargs.get, _STATISTICS)]
        for key, tensor in wide.items():
            half = halves[key]
            if tensor._version != before[key] or any(half is s for s in statistics):
                half.copy_(to_half(tensor))
        if dtype is None:
            # As in torch, numbers in tensors (0-d) don't promote those with dimensions.
            deciding = [t for t in given if t.dim()] or given
            if name in _LIKE_INPUT:
                deciding = given[:1]
            is_half = all(t.dtype == torch.float16 for t in deciding)
        else:
            is_half = dtype == torch.float16
        as_given = {id(tensor): halves[key] for key, tensor in wide.items()}

        def rounded(tensor: Tensor) -> Tensor:
            if id(tensor) in as_given:
                return as_given[id(tensor)]
            is_rounded = is_half and tensor.dtype == torch.float32
            return to_half(tensor) if is_rounded else tensor

        return map_tensors(result, rounded)

    return _named(f"half_{name}", func, compute)


def _named(
    name: str, func: Callable[..., Any], wrapper: Callable[..., Any]
) -> Callable[..., Any]:
    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper._computes_in_float32 = func  # type: ignore[attr-defined]
    return wrapper
