# SPDX-License-Identifier: Apache-2.0
"""PopTorch's private module `_utils`, as far as other packages use it."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
from torch import Tensor

from ipufit.emulator._ground.custom_args import custom_arg_parser as getCustomParser

__all__ = ["combine_batch_tensors_gen", "getCustomParser"]


def combine_batch_tensors_gen(tensors: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Yield the tensors of several batches, joined along dimension 0.

    Example:
        >>> batches = [[torch.tensor([1])], [torch.tensor([2, 3])]]
        >>> list(combine_batch_tensors_gen(batches))
        [tensor([1, 2, 3])]
    """
    yield from map(torch.cat, zip(*tensors))
