# SPDX-License-Identifier: Apache-2.0
"""The data: MNIST if its files are there, else synthetic data that can be learnt."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images, in units of full white
_IDX_HEADER_BYTES = {"images": 16, "labels": 8}


class Samples(NamedTuple):
    """Inputs `[N, ...]` and classes `[N]`."""

    x: Tensor
    y: Tensor

    def first(self, count: int) -> Samples:
        """The first so many."""
        return Samples(self.x[:count].clone(), self.y[:count].clone())


def mnist(folder: Path, count: int, *, train: bool) -> Samples | None:
    """MNIST's first images `[N, 1, 28, 28]`, normalised; None if it isn't there.

    Args:
        folder: Has `MNIST/raw`, as torchvision lays it out.
        count: How many.
        train: Those to train on, or those to test on.
    """
    raw = folder / "MNIST" / "raw"
    prefix = "train" if train else "t10k"
    parts = []
    for kind in ("images", "labels"):
        path = raw / f"{prefix}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
        if not path.is_file():
            return None
        parts.append(np.fromfile(path, np.uint8, offset=_IDX_HEADER_BYTES[kind]))
    pixels = torch.from_numpy(parts[0]).reshape(-1, 1, 28, 28)[:count]
    labels = torch.from_numpy(parts[1])[:count]
    return Samples((pixels.float() / 255 - MEAN) / STD, labels.long())


def clusters(count: int, shape: tuple[int, ...], classes: int, seed: int) -> Samples:
    """Points around the centre of their class, with noise as large as its distance.

    The centres are the same for every seed, so that what is learnt can be tested.
    """
    centres = torch.randn(
        classes, *shape, generator=torch.Generator().manual_seed(classes)
    )
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=generator)
    noise = torch.randn(count, *shape, generator=generator)
    return Samples(0.3 * centres[y] + noise, y)


def tokens(
    count: int, length: int, vocabulary: int, classes: int, seed: int
) -> Samples:
    """Sequences of int64 tokens; each class has its own frequencies of them."""
    fixed = torch.Generator().manual_seed(classes)
    frequencies = torch.rand(classes, vocabulary, generator=fixed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (count,), generator=generator)
    x = torch.multinomial(frequencies[y], length, True, generator=generator)
    return Samples(x, y)
