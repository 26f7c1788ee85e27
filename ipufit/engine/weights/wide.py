# SPDX-License-Identifier: Apache-2.0
"""Weights of dtypes that an IPU doesn't have.

PopTorch sends those of 64 bits as float32 or int32, and brings float64 back as rounded.
"""

from __future__ import annotations

from typing import Iterable

import torch
from torch import Tensor

from ipufit.errors import UnsupportedError

from .names import user_name

_LIMITS = torch.iinfo(torch.int32)


class ExactWeights:
    """The exact values of float64 weights, which a device gets rounded.

    Example:
        >>> table = torch.tensor([0.1], dtype=torch.float64)
        >>> exact = ExactWeights()
        >>> exact.remember([table])
        >>> _ = table.copy_(table.to(torch.float32))  # as a device brings it back
        >>> exact.restore()
        >>> table
        tensor([0.1000], dtype=torch.float64)
        >>> float(table)
        0.1
    """

    def __init__(self) -> None:
        self._values: list[tuple[Tensor, Tensor]] = []

    def remember(self, weights: Iterable[Tensor]) -> None:
        """Remember the values that are on the host now, and no earlier ones."""
        self._values = [
            (weight, weight.detach().clone())
            for weight in weights
            if weight.dtype == torch.float64
        ]

    def restore(self) -> None:
        """Give weights that no program has changed their exact values back."""
        for weight, value in self._values:
            plain = weight.detach()
            rounded = value.to(torch.float32).to(torch.float64)
            if torch.equal(plain.nan_to_num(), rounded.nan_to_num()):
                plain.copy_(value)


def check_values(module: torch.nn.Module) -> None:
    """Refuse weights that an IPU can't hold: complex ones, and too large integers.

    Args:
        module: The user's module, or the one that is traced.

    Raises:
        UnsupportedError: There is such a weight.

    Example:
        >>> module = torch.nn.Identity()
        >>> module.register_buffer("start", torch.tensor([2**40]))
        >>> check_values(module)
        Traceback (most recent call last):
        ipufit.errors.UnsupportedError: The buffer start has 1099511627776: an IPU ...
    """
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, weight in ((user_name(long), weight) for long, weight in named):
            if weight.is_complex():
                raise UnsupportedError(
                    f"The {kind} {name} is of {weight.dtype}, and an IPU has no "
                    "complex numbers. Keep the real and the imaginary part as real "
                    "numbers, as torch.view_as_real gives them, and compute with those."
                )
            check_integers(name, weight)


def check_integers(name: str, buffer: Tensor) -> None:
    """Refuse a buffer with integers that an IPU can't hold.

    Args:
        name: Name of the buffer in messages.
        buffer: Tensor of any dtype; only int64 is looked at.

    Raises:
        UnsupportedError: An integer needs more than 32 bits.
    """
    if buffer.dtype != torch.int64:
        return
    is_wrong = buffer.lt(_LIMITS.min).logical_or(buffer.gt(_LIMITS.max))
    if is_wrong.any():
        value = int(buffer[is_wrong][0])
        raise UnsupportedError(
            f"The buffer {name} has {value}: an IPU has integers of 32 bits, from "
            f"{_LIMITS.min} to {_LIMITS.max}. Make it smaller, a float, or a plain "
            "attribute that `forward` doesn't compute with."
        )
