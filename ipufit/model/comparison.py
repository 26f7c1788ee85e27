# SPDX-License-Identifier: Apache-2.0
"""The result of `compare`: where device and host differ, as records and as text."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import Iterator, Mapping

import torch
from torch import Tensor

_WIDTH = 100
_SHOWN = 20
"""Rows of a table that is printed; the record has all."""

_NUMBERS = 26
"""Columns of the last three numbers."""


@dataclass(frozen=True)
class Difference:
    """The largest difference between two tensors, and where it is.

    Attributes:
        part: "output", "layer", "loss", "gradient", "weight" or "buffer".
        name: Name of the tensor: of a parameter, a layer, or an output among several.
        index: Position of the largest difference; of the first element that is NaN or
            infinite on one side only, if there is one.
        host: The value there on the host.
        device: The value there on the device.
        absolute: The difference between both; NaN or infinite if one of them is.
        relative: `absolute` by the host's value.
        share: `absolute` by the largest absolute value of the host's tensor.
        num_broken: Number of elements that are NaN or infinite on one side only.
        num_elements: Number of elements of the tensor.
    """

    part: str
    name: str
    index: tuple[int, ...]
    host: float
    device: float
    absolute: float
    relative: float
    share: float
    num_broken: int
    num_elements: int

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sorts differences: the worst has the greatest."""
        broken = self.num_broken / self.num_elements
        share, absolute = (
            math.inf if math.isnan(one) else one for one in (self.share, self.absolute)
        )
        return broken, share, absolute


@dataclass(frozen=True)
class Comparison:
    """Everything that `compare` has found.

    Attributes:
        differences: One for each tensor, the worst first: by the share of elements
            that are NaN or infinite on one side only, then by `share`.
        layers: Differences of layers, in the order of their calls.
        notes: Sentences about what was left out or can't be equal.
    """

    differences: tuple[Difference, ...]
    layers: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, part: str) -> tuple[Difference, ...]:
        """The differences of one part, the worst first."""
        return tuple(one for one in self.differences if one.part == part)

    @property
    def first_broken_layer(self) -> str | None:
        """The first layer with values that are NaN or infinite on the device only."""
        broken = (one.name for one in self.layers if one.num_broken)
        return next(broken, None)

    def __repr__(self) -> str:
        """A table of at most 100 columns, of the worst differences."""
        lines = [_line("", "tensor", "at", "host", "device", "abs", "rel", "share")]
        lines += [_row(one) for one in self.differences[:_SHOWN]]
        left = len(self.differences) - _SHOWN
        if left > 0:
            lines.append(f"and {left} more, all smaller")
        if self.first_broken_layer is not None:
            lines.append(f"first broken layer: {self.first_broken_layer}")
        for note in self.notes:
            lines += textwrap.wrap(note, _WIDTH)
        return "\n".join(lines)


def differences(
    part: str, host: Mapping[str, Tensor], device: Mapping[str, Tensor]
) -> Iterator[Difference]:
    """The largest difference of each pair of tensors.

    Args:
        part: As in `Difference`.
        host: Tensors by name.
        device: Tensors with the same names.

    Example:
        >>> given = {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([1.0, 4.5])}
        >>> (one,) = differences("weight", *given)
        >>> one.index, one.absolute, one.share
        ((1,), 0.5, 0.125)
    """
    for name, expected in host.items():
        yield _difference(part, name, expected, device[name])


def _difference(part: str, name: str, host: Tensor, device: Tensor) -> Difference:
    expected = host.detach().to(torch.float64).reshape(host.shape)
    got = device.detach().to(torch.float64).reshape(host.shape)
    apart = (got - expected).abs()
    is_same = got.eq(expected) | (got.isnan() & expected.isnan())
    apart[is_same] = 0.0
    broken = ~is_same & ~(got.isfinite() & expected.isfinite())
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    if not apart.numel():
        return Difference(part, name, (), 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1)
    where = broken if broken.any() else apart
    flat = int(where.reshape(-1).to(torch.float64).argmax())
    index = _unravelled(flat, apart.shape)
    absolute = float(apart.reshape(-1)[flat])
    one, other = (float(values.reshape(-1)[flat]) for values in (expected, got))
    return Difference(
        part,
        name,
        index,
        one,
        other,
        absolute,
        _ratio(absolute, abs(one)),
        _ratio(absolute, largest),
        int(broken.sum()),
        apart.numel(),
    )


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _unravelled(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.insert(0, rest)
    return tuple(index)


def _row(one: Difference) -> str:
    at = ",".join(map(str, one.index))
    broken = f"{one.num_broken} of {one.num_elements} broken"
    if len(broken) > _NUMBERS:
        broken = f"{one.num_broken} broken"
    return _line(
        one.part,
        one.name,
        f"[{at}]" if at else "",
        f"{one.host:.4g}",
        f"{one.device:.4g}",
        *(
            (broken,)
            if one.num_broken
            else (f"{value:.1e}" for value in (one.absolute, one.relative, one.share))
        ),
    )


def _line(part: str, name: str, at: str, host: str, device: str, *numbers: str) -> str:
    if len(name) > 27:
        name = f"{name[:10]}...{name[-14:]}"
    if len(at) > 14:
        at = f"{at[:10]}...]"
    widths = " ".join(f"{number:>8}" for number in numbers)
    line = f"{part:<8} {name:<27} {at:<14} {host:>10} {device:>10} {widths}"
    return line.rstrip()
