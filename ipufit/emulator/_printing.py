# SPDX-License-Identifier: Apache-2.0
"""`ipu_print_tensor`: see a tensor, and its gradient, while the device runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Callable

from torch import Tensor

from .core.recording import current_trace, is_tracing, require_tensor

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
_CUT = "..."
_SMALLEST_FIXED = 1e-4


@dataclass(frozen=True)
class TensorText:
    """Formats tensors as the arguments of `ipu_print_tensor` ask."""

    summarise_threshold: int
    edge_items: int
    max_line_width: int
    digits: int
    float_format: str
    separator: str
    open_bracket: str
    close_bracket: str

    def __call__(self, tensor: Tensor) -> str:
        """Return the text of `tensor`, one row of its last dimension per line."""
        is_short = not 0 < self.summarise_threshold < tensor.numel()
        values = tensor.detach().tolist() if is_short else self._edges(tensor.detach())
        numbers = [value for value in _leaves(values) if value is not _CUT]
        spec = self._spec(numbers) if tensor.is_floating_point() else "d"
        width = 0
        if self.digits:
            width = max((len(format(number, spec)) for number in numbers), default=0)
        return self._layers(values, 0, lambda v: format(v, spec).rjust(width))

    def _edges(self, tensor: Tensor) -> Any:
        if not tensor.dim():
            return tensor.item()
        edge, size = self.edge_items, tensor.shape[0]
        if size <= 2 * edge:
            return [self._edges(row) for row in tensor]
        first = [self._edges(row) for row in tensor[:edge]]
        return [*first, _CUT, *[self._edges(row) for row in tensor[size - edge :]]]

    def _spec(self, numbers: list[float]) -> str:
        """Return the format of floating-point numbers."""
        if not self.digits or self.float_format == "none":
            return f".{self.digits}g" if self.digits else ""
        finite = [abs(number) for number in numbers if abs(number) < float("inf")]
        largest = max(finite, default=0.0)
        is_wide = largest >= 10**self.digits or 0 < largest < _SMALLEST_FIXED
        if self.float_format == "scientific" or (
            self.float_format == "auto" and is_wide
        ):
            return f".{self.digits - 1}e"
        return f".{max(self.digits - len(str(int(largest))), 0)}f"

    def _layers(self, values: Any, depth: int, text: Callable[[Any], str]) -> str:
        if not isinstance(values, list):
            return values if values is _CUT else text(values)
        if any(isinstance(element, list) for element in values):
            indent = " " * (depth + 1)
            rows = "".join(
                f"\n{indent}{self._layers(element, depth + 1, text)}"
                for element in values
            )
            return f"{self.open_bracket}{rows}\n{' ' * depth}{self.close_bracket}"
        lines = [" " * depth + self.open_bracket]
        for index, value in enumerate(values):
            is_last = index == len(values) - 1
            element = self._layers(value, depth, text)
            element += self.close_bracket if is_last else self.separator
            is_full = 0 < self.max_line_width < len(lines[-1]) + len(element)
            if is_full and index:
                lines.append(" " * (depth + 2))
            lines[-1] += element
        if not values:
            lines[-1] += self.close_bracket
        return "\n".join(lines)[depth:]


def _leaves(values: Any) -> list[Any]:
    if not isinstance(values, list):
        return [values]
    return [leaf for element in values for leaf in _leaves(element)]


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

    The device writes it only if the result is used: a compiler removes unused results.
    On the host nothing is written.

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
    if float_format not in FLOAT_FORMATS:
        raise KeyError(
            f"float_format {float_format!r}: use one of {', '.join(FLOAT_FORMATS)}."
        )
    trace = current_trace()
    if trace is None:
        return tensor
    sizes = summarise_threshold, edge_items, max_line_width, digits
    marks = separator[:1], open_bracket[:1], close_bracket[:1]  # what a device gets
    text = TensorText(*sizes, float_format, *marks)
    return trace.record(print_tensor, tensor, title, print_gradient, text)


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
