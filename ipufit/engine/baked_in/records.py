# SPDX-License-Identifier: Apache-2.0
"""Records of the values that code can reach, to be compared later."""

from __future__ import annotations

import collections.abc
import enum
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ipufit.engine.weights.fingerprint import checksum
from ipufit.engine.weights.wrapping import unfetched

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(np.generic, np.dtype, enum.Enum),
)
"""Values that are recorded as they are."""


@dataclass(frozen=True, eq=False)
class Identity:
    """A value that equals only itself."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __repr__(self) -> str:
        if isinstance(self.value, torch.nn.Parameter):  # of PopTorch's class, perhaps
            return "a parameter"
        if isinstance(self.value, (Tensor, torch.nn.Module)):
            return f"a {type(self.value).__name__}"
        text = repr(self.value)
        return text if len(text) <= 60 else f"a {type(self.value).__name__}"


@dataclass(frozen=True)
class SameAs:
    """A value that was reached by another path before."""

    path: str

    def __repr__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Contents:
    """A constant tensor or array by its checksum, or a container by its kind."""

    kind: str
    checksum: int = 0

    def __repr__(self) -> str:
        return self.kind


NOTHING = Contents("missing")
"""Record of a value that isn't there."""


@dataclass(frozen=True, eq=False)
class Elements:
    """The elements of a large container, compared by identity or as plain values."""

    kind: type
    values: tuple[Any, ...]

    @classmethod
    def of(cls, container: Any) -> Elements:
        """Record the elements of a container; of a mapping the keys and the values.

        Example:
            >>> Elements.of([1, 2]) == Elements.of([1, 3])
            False
        """
        is_mapping = isinstance(container, collections.abc.Mapping)
        values = container.values() if is_mapping else ()
        return cls(type(container), (*container, *values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Elements) or len(other.values) != len(self.values):
            return False
        return all(
            mine is its or (type(mine) is type(its) in PLAIN and mine == its)
            for mine, its in zip(self.values, other.values)
        )

    def __repr__(self) -> str:
        return f"a {self.kind.__name__} of {len(self.values)} values"


def checksum_of(value: Any) -> int:
    """The CRC-32 of the values of a tensor or an array.

    Example:
        >>> checksum_of(np.zeros(2)) == checksum_of(np.ones(2))
        False
    """
    if isinstance(value, Tensor):
        return checksum(value)
    values: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return zlib.crc32(values)


def version_of(tensor: Tensor) -> int:
    """Number of changes of a tensor in place, without fetching a wrapped one.

    Example:
        >>> tensor = torch.zeros(2)
        >>> _ = tensor.add_(1)
        >>> version_of(tensor)
        1
    """
    return int(unfetched(tensor, "_version"))


def scalar_dtype(buffer: Any) -> torch.dtype | None:
    """The dtype of a 0-d buffer, without fetching a wrapped one; None for all else.

    Example:
        >>> scalar_dtype(torch.tensor(0.5)), scalar_dtype(torch.ones(2))
        (torch.float32, None)
    """
    if not issubclass(type(buffer), Tensor) or unfetched(buffer, "ndim"):
        return None
    dtype: torch.dtype = unfetched(buffer, "dtype")
    return dtype
