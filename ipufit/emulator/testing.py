# SPDX-License-Identifier: Apache-2.0
"""Compare the outputs of a model on the host and on the device."""

from __future__ import annotations

from typing import Any

import torch

from .errors import require

__all__ = ["allclose"]


def allclose(ref: Any, other: Any) -> bool:
    """Return whether two structures of tensors have the same types, lengths and values.

    Values are compared by `torch.allclose`.

    Args:
        ref: A tensor, or tuples and lists of them.
        other: Anything.

    Raises:
        AssertionError: If `ref` holds something else.

    Example:
        >>> x = torch.tensor([1.0])
        >>> allclose((x, [x]), (x + 1e-9, [x])), allclose((x, x), [x, x])
        (True, False)
    """
    if isinstance(ref, torch.Tensor):
        return torch.allclose(other, ref)
    require(
        isinstance(ref, (tuple, list)),
        f"Compare tensors, tuples and lists, not {type(ref).__name__}.",
    )
    if type(ref) is not type(other) or len(ref) != len(other):
        return False
    return all(allclose(one, another) for one, another in zip(ref, other))
