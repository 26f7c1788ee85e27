# SPDX-License-Identifier: Apache-2.0
"""Figures of IPUs that plans are held against, and where each was published.

The memory is tiles times the memory of a tile, in bytes. Clock, peaks and links are
nominal: what makers and reviewers publish, which no program reaches.
"""

from __future__ import annotations

from typing import NamedTuple

from ipufit.errors import UnknownNameError


class Device(NamedTuple):
    """One kind of IPU.

    Attributes:
        name: Name in sentences.
        num_tiles: Tiles, each a processor with memory of its own.
        tile_bytes: Memory of one tile.
        clock_hertz: Nominal clock.
        float16_flops: Nominal peak in float16 with float16 sums, FLOP per second.
        float32_flops: Nominal peak in float32, FLOP per second.
        link_bytes_per_second: Nominal rate of all links to other IPUs together, both
            directions.
        source: Where the figures were published.

    Example:
        >>> DEVICES["mk2"].num_bytes
        940572672
    """

    name: str
    num_tiles: int
    tile_bytes: int
    clock_hertz: float
    float16_flops: float
    float32_flops: float
    link_bytes_per_second: float
    source: str

    @property
    def num_bytes(self) -> int:
        """Memory of the whole IPU, for code and data together."""
        return self.num_tiles * self.tile_bytes


_PER_TILE = (
    'docs.graphcore.ai, "Memory and Performance Optimisation", out-of-memory page '
    "(638976 bytes per tile)"
)

DEVICES: dict[str, Device] = {
    "mk1": Device(
        name="Mk1 (GC2)",
        num_tiles=1216,
        tile_bytes=256 * 1024,
        clock_hertz=1.6e9,
        float16_flops=124.5e12,
        float32_flops=31.1e12,
        link_bytes_per_second=320e9,
        source="Jia et al., arXiv:1912.03413",
    ),
    "mk2": Device(
        name="Mk2 (GC200)",
        num_tiles=1472,
        tile_bytes=638_976,
        clock_hertz=1.33e9,
        float16_flops=250e12,
        float32_flops=62.5e12,
        link_bytes_per_second=320e9,
        source=_PER_TILE + '; docs.graphcore.ai, "IPU Programmer\'s Guide"',
    ),
    "bow": Device(
        name="Bow",
        num_tiles=1472,
        tile_bytes=638_976,
        clock_hertz=1.85e9,
        float16_flops=350e12,
        float32_flops=87e12,
        link_bytes_per_second=320e9,
        source=_PER_TILE + '; docs.graphcore.ai, "Bow-2000 datasheet" (the float32 '
        "peak is a quarter of the float16 one)",
    ),
}
"""Kinds of IPUs by the names that `model.plan(device=)` takes."""

_OTHER_NAMES = {"gc2": "mk1", "gc200": "mk2", "bow-2000": "bow", "m2000": "mk2"}


def device_named(device: str | Device) -> Device:
    """The figures of a kind of IPU.

    Args:
        device: "mk1", "mk2" or "bow", or another name of one of them; or figures of
            your own, which are given back.

    Raises:
        UnknownNameError: There is no such kind; the nearest name is suggested.

    Example:
        >>> device_named("GC200").name
        'Mk2 (GC200)'
    """
    if isinstance(device, Device):
        return device
    name = str(device).lower()
    name = _OTHER_NAMES.get(name, name)
    if name not in DEVICES:
        raise UnknownNameError("kind of IPU", str(device), DEVICES)
    return DEVICES[name]
