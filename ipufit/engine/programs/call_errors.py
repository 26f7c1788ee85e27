# SPDX-License-Identifier: Apache-2.0
"""Explains errors of calls that have an index which doesn't exist."""

from __future__ import annotations

import re
from typing import Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.errors import DataError, IpufitError

_OUT_OF_RANGE = re.compile(r"out of (range|bounds)|index.* invalid|Class values must")


def refuse_index(
    error: Exception, module: torch.nn.Module, batch: Sequence[Tensor]
) -> None:
    """Raise an error of torch's with the indices of the call, if one doesn't exist.

    The first micro-batch fails when it is traced, with shapes; later ones in the call.

    Args:
        error: Error that the call raised.
        batch: Tensors of the call.

    Raises:
        DataError: torch refused an index.

    Example:
        >>> error = IndexError("index out of range in self")
        >>> refuse_index(error, torch.nn.Embedding(2, 3), [torch.tensor([0, 5])])
        Traceback (most recent call last):
        ipufit.errors.DataError: Embedding failed in a call: index out of range in ...
    """
    is_own = isinstance(error, (IpufitError, poptorch.Error))
    text = str(error).rstrip(".")
    if is_own or not (isinstance(error, IndexError) or _OUT_OF_RANGE.search(text)):
        return
    raise DataError(
        f"{type(module).__name__} failed in a call: {text}. The integers of this call "
        f"are {_ranges(batch)}: a class, or the row of an embedding, must be less than "
        "their number, and 0 or more."
    ) from error


def _ranges(batch: Sequence[Tensor]) -> str:
    ranges = [
        f"{str(t.dtype).replace('torch.', '')} {list(t.shape)} from {int(t.min())} to "
        f"{int(t.max())}"
        for t in batch
        if not t.is_floating_point() and t.dtype != torch.bool and t.numel()
    ]
    return ", ".join(ranges) or "none"
