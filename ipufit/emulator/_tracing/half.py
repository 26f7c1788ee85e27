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

Rounding is to the nearest, or at random and unbiased.

At random, a number becomes one of its two neighbours in float16, the nearer one with
the higher probability. That takes few passes over whole tensors, in two steps:

1. The 13 bits of a float32 fraction that float16 doesn't have get random bits added,
   and are cut off. Numbers below 2**-14, for which float16 has a fixed step of 2**-24,
   keep too many bits by that: their step shrinks with them.
2. So a random part of that fixed step, less than one half of it either way, is added to
   all numbers, and torch's cast rounds the sum to the nearest. Numbers from 2**-14 on
   are in float16 already, where the next ones are no nearer than the step: the cast
   undoes the addition. Below, it makes the second step of the rounding. The steps of
   both roundings nest, so two unbiased roundings have the outcomes of one.

Random words are drawn for each tensor, 4096 at most. A larger tensor is seen as a table
with rows of that length. Its words are those of the row, each XORed with a word of the
column. Of words in such a table any three are independent, so sums and means over a
tensor have the mean and the spread that they would have if all words were drawn.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import replace
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import Function

from ipufit.emulator._tracing.operation import Operation, map_tensors, tensors_in

_CUT_OFF = 2**13 - 1
"""The bits of a float32 fraction that float16 doesn't have."""

_OTHER_BITS = 19
"""A word's bits from this one on are for the second step: a signed number.

It is made odd, so that no sum is half-way between two results.
"""

_PART_OF_STEP = 2.0**-37
"""This number times this is a part of float16's smallest step."""

_HALF_STEP = 2.0**-25
"""All that is no larger becomes 0."""

_ROW = 2**12
"""The number of independent words for one tensor."""

_CHUNK = 2**17
"""The most elements that are rounded at once: half a MiB of each kind of number."""

_SMALL = 2**14
"""The most elements of a gradient for which `small_gradients_last` waits."""

_is_stochastic = False
_late: list[tuple[Tensor, Tensor]] | None = None
"""Weights and their gradients that wait to be rounded; None if none has to."""


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


def rounds_at_random() -> bool:
    """Whether `rounding` says so now."""
    return _is_stochastic


@contextlib.contextmanager
def small_gradients_last() -> Iterator[None]:
    """Round small gradients of weights together, when a backward pass is over.

    Rounding a few numbers takes no longer than rounding thousands. Gradients of weights
    that somebody watches (with hooks) don't wait.

    Example:
        >>> weight = torch.ones(2, dtype=torch.float16, requires_grad=True)
        >>> with rounding(is_stochastic=True):
        ...     loss = to_float(weight).sum()
        ...     with small_gradients_last():
        ...         loss.backward()
        >>> weight.grad
        tensor([1., 1.], dtype=torch.float16)
    """
    global _late
    late: list[tuple[Tensor, Tensor]] = []
    _late = late
    try:
        yield
    finally:
        _late = None
    if late:
        flat = round_at_random(torch.cat([g.reshape(-1) for _, g in late]))
        parts = torch.split(flat, [gradient.numel() for _, gradient in late])
        for (weight, gradient), part in zip(late, parts):
            part = part.view(gradient.shape)
            weight.grad = part if weight.grad is None else weight.grad + part


def to_half(tensor: Tensor) -> Tensor:
    """Round float32 to float16 as `rounding` says; the gradient passes through.

    Example:
        >>> to_half(torch.tensor([2049.0]))
        tensor([2048.], dtype=torch.float16)
    """
    if not _is_stochastic:
        cast: Tensor = tensor.to(torch.float16)
        return cast
    if tensor.requires_grad and torch.is_grad_enabled():
        rounded: Tensor = _Narrow.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
        return rounded
    return round_at_random(tensor.detach())


def to_float(tensor: Tensor) -> Tensor:
    """Cast float16 to float32; the gradient is rounded as `rounding` says."""
    if _is_stochastic and tensor.requires_grad and torch.is_grad_enabled():
        wide: Tensor = _Widen.apply(tensor)  # type: ignore[no-untyped-call,unused-ignore]
        return wide
    cast: Tensor = tensor.to(torch.float32)
    return cast


class _Widen(Function):
    """Cast to float32; the gradient is rounded, as every result of the device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        is_small_weight = tensor.is_leaf and tensor.numel() <= _SMALL
        may_wait = is_small_weight and not tensor._backward_hooks
        ctx.weight = tensor if may_wait else None
        cast: Tensor = tensor.to(torch.float32)
        return cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor | None:  # type: ignore[override,unused-ignore]
        if _late is None or ctx.weight is None:
            return round_at_random(gradient)
        _late.append((ctx.weight, gradient))
        return None


class _Narrow(Function):
    """Round to float16; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        return round_at_random(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override,unused-ignore]
        cast: Tensor = gradient.to(torch.float32)
        return cast


def round_at_random(tensor: Tensor) -> Tensor:
    """Round float32 to float16 without bias.

    What float16 can hold stays as it is, and so do infinities and NaN. From 65504 on
    the upper neighbour is infinite.

    Args:
        tensor: One without a gradient to record. It isn't written to.

    Returns:
        A float16 tensor of the same shape, in memory of its own.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> small = torch.full((4000,), 2.0**-26)  # a quarter of the smallest one
        >>> round(round_at_random(small).float().mean().item() / 2.0**-26, 1)
        1.0
    """
    rounded = torch.empty_like(tensor, dtype=torch.float16)
    if rounded.stride() != tensor.stride():  # else its elements lie without gaps
        tensor = torch.empty_like(tensor).copy_(tensor)
    count = tensor.numel()
    numbers = tensor.as_strided((count,), (1,)).view(torch.int32)
    _work_space().round(numbers, rounded.as_strided((count,), (1,)), count)
    return rounded


class _WorkSpace:
    """Memory to round in: what is taken anew would have to be cleared each time."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._pairs = torch.empty(_ROW // 2, dtype=torch.int64)
            self._bits = torch.empty(_CHUNK, dtype=torch.int32)
            self._others = torch.empty(_CHUNK, dtype=torch.int32)
            self._parts = torch.empty(_CHUNK)
            # As tensors: of a number, torch would make one in each call.
            self._cut_off = torch.tensor(_CUT_OFF, dtype=torch.int32)
            self._kept = torch.tensor(~_CUT_OFF, dtype=torch.int32)
        self._row = self._pairs.view(torch.int32)

    def round(self, numbers: Tensor, results: Tensor, count: int) -> None:
        """Round float32 numbers, given as the integers of their bits."""
        width = min(count, _ROW)
        self._pairs[: (width + 1) // 2].random_(-(2**63), None)  # all 64 bits
        bits, others = self._split(self._row[:width])
        others.bitwise_or_(1)
        if count <= _ROW:
            self._round(bits, others, numbers, results, count)
            return
        heads = torch.empty(-(-count // _ROW), 1, dtype=torch.int32)
        head_bits, head_others = self._split(heads.random_(-(2**31), None))
        head_others.bitwise_and_(~1)
        for first in range(0, count, _CHUNK):
            size = min(_CHUNK, count - first)
            num_rows = -(-size // _ROW)
            room = slice(num_rows * _ROW)
            rows = slice(first // _ROW, first // _ROW + num_rows)
            self._round(
                _table(head_bits[rows], bits, self._bits[room])[:size],
                _table(head_others[rows], others, self._others[room])[:size],
                numbers[first : first + size],
                results[first : first + size],
                size,
            )

    def _split(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Cut random words into the bits for either step; the words get lost."""
        bits = torch.bitwise_and(words, self._cut_off)
        return bits, words.bitwise_right_shift_(_OTHER_BITS)

    def _round(
        self, bits: Tensor, others: Tensor, numbers: Tensor, results: Tensor, size: int
    ) -> None:
        """Round at most `_CHUNK` numbers; `bits` get lost."""
        parts = self._parts[:size]
        bits.add_(numbers).bitwise_and_(self._kept)
        sums = bits.view(torch.float32)
        sums.add_(parts.copy_(others), alpha=_PART_OF_STEP)
        # The cast would do that, too, but give a zero the sign of the random part.
        torch.hardshrink(sums, _HALF_STEP, out=parts)  # type: ignore[call-overload,unused-ignore]
        results.copy_(parts)


def _table(heads: Tensor, row: Tensor, memory: Tensor) -> Tensor:
    """XOR a column of words with a row of them; the table is flat."""
    torch.bitwise_xor(heads, row, out=memory.view(-1, _ROW))
    return memory


_of_thread = threading.local()


def _work_space() -> _WorkSpace:
    """The work space of this thread."""
    space: _WorkSpace | None = getattr(_of_thread, "space", None)
    if space is None:
        space = _of_thread.space = _WorkSpace()
    return space


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
