# SPDX-License-Identifier: Apache-2.0
"""Seeds that are made of several numbers, and what they seed."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def mixed(*numbers: int) -> int:
    """A seed of 63 bits, made of several numbers; other numbers give another seed.

    Example:
        >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
        (True, False)
    """
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: Number of 63 bits.

    Example:
        >>> seed_all(3)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_all(3)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed asks all devices
