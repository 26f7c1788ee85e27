# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights: to tell whether a device has those of the host."""

from __future__ import annotations

import zlib
from typing import Iterable, Tuple

import torch
from torch import Tensor

Fingerprint = Tuple[int, ...]
"""A checksum for each weight."""


def fingerprint(weights: Iterable[Tensor]) -> Fingerprint:
    """Checksums of the values of weights.

    Nothing cheaper tells that nothing has changed: torch counts no changes that are
    made through `weight.data`. Reading the weights once costs far less than moving
    them to a device.

    Args:
        weights: Tensors on the host, of any type and layout.

    Returns:
        The CRC-32 of each one's bytes.

    Example:
        >>> weight = torch.zeros(2)
        >>> before = fingerprint([weight])
        >>> _ = weight.data.fill_(1.0)
        >>> fingerprint([weight]) == before
        False
    """
    return tuple(_checksum(weight) for weight in weights)


def _checksum(weight: Tensor) -> int:
    plain = weight.detach().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy()) if plain.numel() else 0
