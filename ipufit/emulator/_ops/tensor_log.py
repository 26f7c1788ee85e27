# SPDX-License-Identifier: Apache-2.0
"""`ipu_print_tensor`: see a tensor, and its gradient, while the device runs."""

from __future__ import annotations

import sys
from typing import Any, Callable

from torch import Tensor

from ipufit.emulator._ops.tensor_text import TensorText, first_character
from ipufit.emulator._tracing.trace_state import (
    current_trace,
    is_tracing,
    require_tensor,
)


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Write a tensor to stderr whenever the device computes it.

    Only if the result is used: a compiler removes what isn't. On the host it writes
    nothing.

    Args:
        tensor: The tensor to print.
        title: Text to print before it.
        print_gradient: In training, print the gradient too, as `<title>_gradient`.
        summarise_threshold: Shorten tensors of more elements; 0 for none.
        edge_items: Elements to keep at each end of a dimension that is shortened.
        max_line_width: Break longer rows; 0 for none.
        digits: Number of significant digits, without those of an exponent; with 0
            columns are not aligned.
        float_format: `"auto"`, `"fixed"`, `"scientific"` or `"none"`.
        separator: Text between elements; the first character counts.
        open_bracket: Text before a dimension; the first character counts.
        close_bracket: Text after a dimension; the first character counts.

    Returns:
        A tensor of the same values.

    Raises:
        Error: `tensor` isn't a tensor.
        KeyError: There is no such `float_format`.

    Example:
        >>> import torch
        >>> ipu_print_tensor(torch.tensor([1.0]), "on the host: silent")
        tensor([1.])
    """
    require_tensor(tensor, "ipu print tensor must take a torch.tensor argument.")
    text = TensorText(
        summarise_threshold=summarise_threshold,
        edge_items=edge_items,
        max_line_width=max_line_width,
        digits=digits,
        float_format=float_format,
        separator=first_character(separator),
        open_bracket=first_character(open_bracket),
        close_bracket=first_character(close_bracket),
    )
    trace = current_trace()
    if trace is None:
        return tensor
    result: Tensor = trace.record(print_tensor, tensor, title, print_gradient, text)
    return result


def print_tensor(
    tensor: Tensor, title: str, print_gradient: bool, text: TensorText
) -> Tensor:
    """Run `ipu_print_tensor` on the device."""
    result: Tensor = tensor.view_as(tensor)
    if is_tracing():
        return result
    _write(title, text(tensor))
    if print_gradient and result.requires_grad:
        register: Callable[[Any], object] = result.register_hook
        register(lambda gradient: _write(f"{title}_gradient", text(gradient)))
    return result


def _write(title: str, text: str) -> None:
    sys.stderr.write(f"{title}: {text}\n" if title else f"{text}\n")
