# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the shapes and types that others have, for benchmarks."""

from __future__ import annotations

import torch

from .arrays import in_memory
from .source import IndexedSource, Source
from .values import as_tensor

_DISTINCT = 64
_RANGES = {torch.uint8: (0, 256), torch.bool: (0, 2)}


def generated_like(source: Source, n: int) -> IndexedSource:
    """Random inputs in memory, of the shapes and types that others have.

    Whole numbers are drawn from the range of the first sample's. Targets and weights
    are those of the first sample: random ones may be none, as a class, a probability or
    a weight must be in its range.

    Args:
        source: The others; its first sample counts.
        n: Number of samples. The first 64 are drawn, and come again.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for place, leaf in enumerate(source.first()):
        example = as_tensor(leaf, source.name)
        if place >= source.structure.num_inputs:
            tensors.append(torch.stack([example] * n))
            continue
        shape, dtype = (min(n, _DISTINCT), *example.shape), example.dtype
        if dtype.is_floating_point:
            drawn = torch.randn(shape, generator=generator)
        else:
            values = [0, *example.reshape(-1).tolist()]
            least, bound = _RANGES.get(dtype, (min(values), max(values) + 1))
            drawn = torch.randint(least, bound, shape, generator=generator)
        tensors.append(drawn.to(dtype)[torch.arange(n) % len(drawn)])
    return in_memory(tensors, source.structure, source.name)
