# SPDX-License-Identifier: Apache-2.0
"""The sums that figures are computed from, added up on the host."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor


class Sums(NamedTuple):
    """The sums of figures so far, of one process or of all.

    Attributes:
        vector: The sum of all vectors, float64; None without any.
        extra: Total and number of rows of each figure that no vector holds, by name.
    """

    vector: Tensor | None
    extra: Mapping[str, Sequence[float]]

    @classmethod
    def joined(cls, parts: Sequence[Sums]) -> Sums:
        """Add up the sums of all processes.

        Example:
            >>> one = Sums(torch.ones(2), {"loss": (3.0, 1.0)})
            >>> Sums.joined([one, Sums(None, {"loss": (1.0, 1.0)})])
            Sums(vector=tensor([1., 1.]), extra={'loss': [4.0, 2.0]})
        """
        vectors = [part.vector for part in parts if part.vector is not None]
        extra: dict[str, list[float]] = {}
        for part in parts:
            for name, pair in part.extra.items():
                before = extra.setdefault(name, [0.0, 0.0])
                extra[name] = [one + other for one, other in zip(before, pair)]
        return cls(torch.stack(vectors).sum(dim=0) if vectors else None, extra)


def running_sums(sums: Tensor | None, vectors: Tensor, size: int) -> Tensor:
    """Add vectors to sums, one after the other in float64.

    Adding in another order, or pairs first, would round otherwise.

    Args:
        sums: The sums so far, `[size]`; None for zeros.
        vectors: Any number of vectors, one after the other in dim 0.
        size: Length of a vector.

    Returns:
        The sums after each vector, `[vectors, size]`, float64.

    Example:
        >>> running_sums(None, torch.tensor([1.0, 2.0, 10.0, 20.0]), size=2)
        tensor([[ 1.,  2.],
                [11., 22.]], dtype=torch.float64)
    """
    rows = vectors.numpy().reshape(-1, size)
    parts = np.empty((1 + len(rows), size))
    parts[0] = 0.0 if sums is None else sums.numpy()
    parts[1:] = rows
    np.add.accumulate(parts, axis=0, out=parts)
    return torch.from_numpy(parts[1:])
