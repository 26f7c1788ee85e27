# SPDX-License-Identifier: Apache-2.0
"""Round float32 to float16: to the nearest, or at random and unbiased.

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
import threading
from typing import Any, Iterator

import torch
from torch import Tensor
from torch.autograd.function import Function

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
