# SPDX-License-Identifier: Apache-2.0
"""Types of a device, and half precision: in 32 bits, then rounded to 16.

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
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.fx.node import Node

from .graph import (
    NORM_FUNCTIONS,
    Operation,
    base_name,
    function_name,
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


def device_tensor(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Cast a tensor to a type that an IPU holds.

    64-bit integers keep their type, because torch's CPU kernels need it where an IPU
    takes 32 bits, but their values are cut to 32 bits. `float64` and `bfloat16` become
    `float32` (PopTorch, `PoplarExecutable.cpp`).

    Args:
        tensor: Tensor of any type.
        copy: If True, the result has memory of its own. If False, it is `tensor`
            itself where nothing changes.

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


def host_tensor(tensor: Tensor) -> Tensor:
    """Cast a tensor to the type that a device returns; other types stay as they are.

    Example:
        >>> host_tensor(torch.tensor([1, 2])).dtype
        torch.int32
    """
    dtype = {torch.int64: torch.int32, torch.float64: torch.float32}.get(tensor.dtype)
    return tensor if dtype is None else torch.as_tensor(tensor, dtype=dtype)


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
        return tensor.to(torch.float16)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Cast.apply(tensor, _round_at_random, Tensor.float)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
    return _round_at_random(tensor.detach())


def _to_float(tensor: Tensor) -> Tensor:
    """Cast float16 to float32, with a gradient that is rounded to float16."""
    if _is_stochastic and tensor.requires_grad and torch.is_grad_enabled():
        return _Cast.apply(tensor, Tensor.float, to_half)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
    return tensor.to(torch.float32)


class _Cast(Function):
    """Casts a tensor by one function, and its gradient by another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cast: Any, cast_gradient: Any) -> Any:  # type: ignore[override,unused-ignore]
        ctx.cast = cast_gradient
        return cast(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override,unused-ignore]
        return ctx.cast(gradient), None, None


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


ROUNDING = "rounding"
"""Metadata of a node: what a device rounds, as `rounding_of` returns it."""


def rounding_of(operation: Operation) -> str:
    """Return what a device rounds to float16, if anything.

    Returns:
        "cast" for a cast of float32; "results" for an operation with float16 tensors,
        which a device computes in float32; "" if there is no float16, or if the
        operation computes no values.

    Example:
        >>> x = torch.tensor([1.0, 3.0], dtype=torch.float16)
        >>> rounding_of(Operation(torch.sigmoid, "sigmoid", (x,), {}))
        'results'
    """
    name, args = operation.name, operation.args
    if name in _CASTS:
        others = [*args[1:], *operation.kwargs.values()]
        types = [v.dtype if isinstance(v, Tensor) else v for v in others]
        is_to_half = name == "half" or torch.float16 in types
        return "cast" if is_to_half and args[0].dtype == torch.float32 else ""
    keeps_values = base_name(name) in _KEEPS_VALUES or (
        name == "dropout" and _drops_nothing(operation)
    )
    is_half = any(tensor.dtype == torch.float16 for tensor in operation.tensors)
    return "results" if is_half and not keeps_values else ""


def _drops_nothing(dropout: Operation) -> bool:
    """Return whether `dropout` returns its input unchanged."""
    given = dropout.arguments
    return given.get("p") == 0.0 or False in (given.get("training"), given.get("train"))


FUNCTION = "function"
"""Metadata of a node: the function of a rule that a device computes it with."""


def unrounded_function(node: Node) -> Callable[..., Any]:
    """Return the function of a rule that computes a node, or torch's."""
    target: Any = node.target
    is_method = node.op == "call_method"
    return node.meta.get(FUNCTION) or (getattr(Tensor, target) if is_method else target)


def device_function(node: Node) -> Callable[..., Any]:
    """Return the function that a device computes a node with, in its precision."""
    rounding = node.meta.get(ROUNDING, "")
    return rounded(unrounded_function(node), function_name(node), rounding)


def rounded(
    function: Callable[..., Any], name: str, rounding: str
) -> Callable[..., Any]:
    """Make a function compute in float32, and round to float16, as a device does.

    Args:
        function: The function.
        name: Its name in torch.
        rounding: "results", "cast" or "", as in `rounding_of`.

    Example:
        >>> x = torch.tensor([1.0, 3.0], dtype=torch.float16)
        >>> rounded(torch.sigmoid, "sigmoid", "results")(x)
        tensor([0.7310, 0.9526], dtype=torch.float16)
    """
    if not rounding:
        return function

    def cast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return to_half(tensor) if _is_stochastic else function(tensor, *args, **kwargs)

    def compute(*args: Any, **kwargs: Any) -> Any:
        operands = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        halves = {id(t): t for t in operands if t.dtype == torch.float16}
        wide = {key: _to_float(tensor) for key, tensor in halves.items()}
        before = {key: tensor._version for key, tensor in wide.items()}
        values = [*args, *kwargs.values()]
        dtype = next((v for v in values if isinstance(v, torch.dtype)), None)

        def widened(value: Any) -> Any:
            value = map_tensors(value, lambda tensor: wide.get(id(tensor), tensor))
            return torch.float32 if value is torch.float16 else value

        result = function(
            *map(widened, args),
            **{key: widened(value) for key, value in kwargs.items()},
        )
        statistics: list[Any] = []
        if name in NORM_FUNCTIONS:  # without telling the version counter
            statistics = [*args[1:3], *map(kwargs.get, _STATISTICS)]
        for key, tensor in wide.items():
            half = halves[key]
            if tensor._version != before[key] or any(half is s for s in statistics):
                half.copy_(to_half(tensor))
        if dtype is None:
            # As in torch, numbers in tensors (0-d) don't promote those with dimensions.
            deciding = [t for t in operands if t.dim()] or operands
            if name in _LIKE_INPUT:
                deciding = operands[:1]
            is_half = all(t.dtype == torch.float16 for t in deciding)
        else:
            is_half = dtype == torch.float16
        half_of = {id(tensor): halves[key] for key, tensor in wide.items()}

        def narrowed(tensor: Tensor) -> Tensor:
            if id(tensor) in half_of:
                return half_of[id(tensor)]
            is_rounded = is_half and tensor.dtype == torch.float32
            return to_half(tensor) if is_rounded else tensor

        return map_tensors(result, narrowed)

    wrapper = cast if rounding == "cast" else compute
    wrapper.__name__ = wrapper.__qualname__ = name
    return wrapper
