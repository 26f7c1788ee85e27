# SPDX-License-Identifier: Apache-2.0
"""Operators that machine code leaves to torch's own kernels.

Inductor writes loops of its own for max pooling. They are fast where only the largest
values are wanted, and several times slower than torch's kernels where their places are
too, and on the way back. And the calls that it writes of oneDNN's LSTM fail: they keep
nothing for the way back, and lose an empty list and what is None there. Behind names
of our own it leaves all of these to torch.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Sequence

import torch
from torch import Tensor

_NAMESPACE = "ipufit_emulator"
_POOLING = (
    "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
)
_POOL = f"max_pool2d(Tensor input, {_POOLING}) -> (Tensor, Tensor)"
_POOL_BACKWARD = (
    f"max_pool2d_backward(Tensor gradient, Tensor input, {_POOLING}, Tensor indices) "
    "-> Tensor"
)
_LSTM = (
    "lstm(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, "
    "Tensor weight4, Tensor hx, Tensor cx, bool reverse, int mode, int hidden_size, "
    "int num_layers, bool has_biases, bool bidirectional, bool batch_first, "
    "bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LSTM_BACKWARD = (
    "lstm_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, "
    "Tensor weight4, Tensor hx, Tensor cx, Tensor output, Tensor hy, Tensor cy, "
    "Tensor grad_output, Tensor grad_hy, Tensor grad_cy, bool reverse, int mode, "
    "int hidden_size, int num_layers, bool has_biases, bool train, "
    "bool bidirectional, bool batch_first, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_BATCH_SIZES = 8
_SECOND_BIAS = 4
_GRADIENTS = slice(10, 13)
"""Of the results, which come right before them."""

# Much of what is used here, the oldest torch hasn't got.
_torch: Any = torch

Table = Dict[Any, Callable[..., Any]]


@functools.lru_cache(maxsize=None)
def kernel_table() -> Table:
    """List the operators to replace in a differentiated function, and by what.

    It also makes the operators known to torch: machine code that calls them needs that
    before it is loaded.

    Returns:
        A decomposition table, as `make_fx` takes it.
    """
    aten, ours, library = _torch.ops.aten, _torch.ops.ipufit_emulator, _library()
    tags = _torch.Tag
    # As in the graph: there they are what a convolution gives.
    strides = getattr(tags, "needs_exact_strides", tags.needs_fixed_stride_order)
    for schema, kernel in ((_POOL, _pool), (_POOL_BACKWARD, _pool_backward)):
        library.define(schema, tags=(strides,))
        _implement(library, schema, kernel)
    table: Table = {
        aten.max_pool2d_with_indices.default: _all_arguments,
        aten.max_pool2d_with_indices_backward.default: ours.max_pool2d_backward.default,
    }
    if hasattr(aten, "mkldnn_rnn_layer_backward"):
        library.define(_LSTM)
        library.define(_LSTM_BACKWARD)
        _implement(library, _LSTM, _lstm)
        _implement(library, _LSTM_BACKWARD, _lstm_backward)
        table[aten.mkldnn_rnn_layer.default] = _without_batch_sizes
        table[aten.mkldnn_rnn_layer_backward.default] = _simplified
    return table


@functools.lru_cache(maxsize=None)
def _library() -> Any:  # kept: its operators go with it
    return _torch.library.Library(_NAMESPACE, "DEF")


def _implement(library: Any, schema: str, kernel: Callable[..., Any]) -> None:
    """Compute an operator, and what its results look like, by one function."""
    for place in ("CPU", "Meta"):
        library.impl(schema.split("(")[0], kernel, place)


def _all_arguments(
    input: Tensor,
    kernel_size: list[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    return _torch.ops.ipufit_emulator.max_pool2d(
        input, kernel_size, stride, padding, dilation, ceil_mode
    )


def _pool(input: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    values, indices = _torch.ops.aten.max_pool2d_with_indices(input, *args)
    return values, indices


def _pool_backward(gradient: Tensor, *args: Any) -> Tensor:
    backward = _torch.ops.aten.max_pool2d_with_indices_backward
    result: Tensor = backward(gradient, *args)
    return result


def _without_batch_sizes(*args: Any) -> Any:
    if args[_BATCH_SIZES]:
        return NotImplemented
    before, after = args[:_BATCH_SIZES], args[_BATCH_SIZES + 1 :]
    return _torch.ops.ipufit_emulator.lstm(*before, *after)


def _lstm(*args: Any) -> Any:
    before, after = args[:_BATCH_SIZES], args[_BATCH_SIZES:]
    with torch.enable_grad():  # else it keeps nothing for the way back
        results = _torch.ops.aten.mkldnn_rnn_layer(*before, [], *after)
    return tuple(result.contiguous() for result in results)


def _simplified(*args: Any) -> Any:
    """The operator without the arguments that get lost: empty lists and None."""
    *before, batch_sizes, batch_first, workspace = args
    if batch_sizes:
        return NotImplemented
    for place, gradient in enumerate(before[_GRADIENTS], _GRADIENTS.start):
        if gradient is None:
            result = before[place - len(before[_GRADIENTS])]
            before[place] = torch.zeros_like(result)
    return _torch.ops.ipufit_emulator.lstm_backward(*before, batch_first, workspace)


def _lstm_backward(*args: Any) -> Any:
    *before, batch_first, workspace = args
    backward = _torch.ops.aten.mkldnn_rnn_layer_backward
    results = list(backward(*before, [], batch_first, workspace))
    results[_SECOND_BIAS] = results[_SECOND_BIAS].clone()  # the same as the first's
    return tuple(result.contiguous() for result in results)
