# SPDX-License-Identifier: Apache-2.0
"""Rules of pooling, and of upsampling and downsampling."""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..graph import as_list
from ..operators import Call, row

_INDEXED_POOLS = tuple(f"max_pool{rank}d_with_indices" for rank in (1, 2, 3))
_MAX_POOLS = "max_pool1d", "max_pool2d", "max_pool3d", *_INDEXED_POOLS
_AVG_POOLS = "avg_pool2d", "avg_pool3d"
_ADAPTIVE = tuple(f"adaptive_avg_pool{rank}d" for rank in (1, 2, 3))
_PADDED = "max_pool2d", "max_pool3d", *_INDEXED_POOLS[1:], *_AVG_POOLS
_STRIDED = *_MAX_POOLS, *_AVG_POOLS, "lp_pool2d"

row("pool-stride", _STRIDED, lambda call: not call.get("stride"))


@row("padding-of-one", (*_PADDED, "conv2d", "conv3d"))
def padding_of_one(call: Call) -> Any:
    padding = call.get("padding")
    return isinstance(padding, (list, tuple)) and len(padding) == 1


@row("max-pool-indices", _INDEXED_POOLS, topic="arguments")
def max_pool_indices(call: Call) -> Any:
    name = call.name.replace("_with_indices", "")
    users = call.node.users if call.node else ()
    is_used = any(user.users for user in users if user.args[1:] == (1,))
    return (is_used or name == "max_pool3d") and name


@row("max-pool-dilation", _MAX_POOLS)
def max_pool_dilation(call: Call) -> Any:
    return any(step != 1 for step in as_list(call.get("dilation", 1)))


def _each(value: Any, rank: int) -> list[Any]:
    """Return a value for each dimension."""
    values = as_list(value)
    return values * rank if len(values) == 1 else values


@row("ceil-mode", (*_MAX_POOLS, *_AVG_POOLS, "avg_pool1d"))
def ceil_mode(call: Call) -> Any:
    if not call.get("ceil_mode"):
        return None
    rank = int(call.name.partition("pool")[2][0])
    kernel = _each(call.get("kernel_size"), rank)
    stride = _each(call.get("stride") or kernel, rank)
    padding = _each(call.get("padding", 0), rank)
    dilation = _each(call.get("dilation", 1), rank)
    counts, sides = [], []
    for size, k, step, pad, gap in zip(
        call.first.shape[-rank:], kernel, stride, padding, dilation
    ):
        reach = gap * (k - 1) + 1
        counts.append(-(-(size + 2 * pad - reach) // step) + 1)
        # Up to the end of the device's last window.
        sides.append((pad, (counts[-1] - 1) * step + reach - size - pad))
    values = call.result[0] if isinstance(call.result, tuple) else call.result
    if counts == list(values.shape[-rank:]):
        return None
    if call.name.startswith("avg"):
        return True
    function = getattr(functional, call.name)

    def pool(input: Tensor, kernel_size: Any, *_: Any, **__: Any) -> Any:
        around = [width for pair in reversed(sides) for width in pair]
        padded = functional.pad(input, around, value=float("-inf"))
        return function(padded, kernel_size, stride, dilation=dilation)

    return pool


def _average(call: Call, **changes: Any) -> Any:
    """Return an average pooling with other arguments and without a divisor."""
    function = getattr(functional, call.name)
    arguments = {**call.arguments, **changes}
    del arguments["input"]
    arguments.pop("divisor_override", None)
    return lambda input, *_, **__: function(input, **arguments)


@row("divisor-override", _AVG_POOLS)
def divisor_override(call: Call) -> Any:
    return call.get("divisor_override") is not None and _average(call)


@row("pool-uneven-padding", _AVG_POOLS)
def pool_uneven_padding(call: Call) -> Any:
    padding = as_list(call.get("padding", 0))
    if len(set(padding)) == 1 or not call.get("count_include_pad", True):
        return None
    pool = _average(call, padding=0)
    return lambda input, *_, **__: pool(functional.pad(input, (*padding, *padding)))


@row("pool-padding-1d", "avg_pool1d")
def pool_padding_1d(call: Call) -> Any:
    is_padded = any(as_list(call.get("padding", 0)))
    return is_padded and call.get("count_include_pad", True)


@row("adaptive-pool-sizes", (*_ADAPTIVE, "interpolate"), topic="arguments")
def adaptive_pool_sizes(call: Call) -> Any:
    if call.name == "interpolate" and call.get("mode") != "area":
        return None
    rank = call.first.dim() - 2 if call.name == "interpolate" else int(call.name[-2])
    sizes = zip(call.first.shape[-rank:], call.result.shape[-rank:])
    for dim, (size, out) in enumerate(sizes):
        if out and size % out:
            return (
                f"Input dim {dim} ({size}) is not divisible by the corresponding "
                f"output dim ({out}). An IPU would compute something else."
            )
    return None


@row("pool-without-batch", _ADAPTIVE)
def pool_without_batch(call: Call) -> Any:
    return call.first.dim() == int(call.name[-2]) + 1


_LINEAR = {
    "linear": "aten::upsample_linear1d",
    "trilinear": "aten::upsample_trilinear3d",
}


@row("linear-upsampling", "interpolate", topic="arguments")
def linear_upsampling(call: Call) -> Any:
    return _LINEAR.get(call.get("mode"))


@row("bicubic-aligned", "interpolate", topic="arguments")
def bicubic_aligned(call: Call) -> Any:
    return call.get("mode") == "bicubic" and call.get("align_corners")


@row("bicubic-half", "interpolate")
def bicubic_half(call: Call) -> Any:
    return call.get("mode") == "bicubic" and call.is_half


def _resized(call: Call) -> dict[str, Any]:
    """Return rows that hold for an interpolation, and what their rules find."""
    mode = call.get("mode", "nearest")
    if mode == "nearest":
        return _nearest(call)
    if mode == "bilinear":
        return _bilinear(call)
    if mode != "bicubic" or call.is_half:
        return {}
    height, width = counts = _counts(call.first.shape[2:], _factors(call))
    return (
        {}
        if counts == list(call.result.shape[2:])
        else {
            "resize-shape": lambda *args, **kwargs: functional.interpolate(
                *args, **kwargs
            )[..., :height, :width]
        }
    )


def _factors(call: Call) -> list[Any]:
    """Return the factor of each dimension."""
    sizes, factors = call.first.shape[2:], call.get("scale_factor")
    if factors is None or call.get("recompute_scale_factor"):
        factors = [out / size for size, out in zip(sizes, call.result.shape[2:])]
    return _each(factors, len(sizes))


def _counts(sizes: Iterable[int], factors: Iterable[Any]) -> list[int]:
    """Return the sizes that a device makes of others."""
    pairs = zip(map(np.float32, sizes), map(np.float32, factors))
    return [int(np.floor(size * factor)) for size, factor in pairs]


def _lost(call: Call) -> str:
    """Refuse a result without elements."""
    return (
        f"`interpolate` to {list(call.result.shape[2:])}: the device rounds the factor "
        "down, and nothing is left of the result (`ReshapeOps.cpp`: zero-sized tensors "
        "are not supported). Use a pooling, or a mean."
    )


def _torchs_places(call: Call, dim: int, mode: str) -> Tensor:
    """Return, for each output index, the input index that torch reads."""
    ramp = torch.arange(call.first.shape[dim + 2], dtype=torch.float32)
    size = factor = None
    if call.get("size") is not None:
        size = call.result.shape[dim + 2]
    else:
        factor = _each(call.get("scale_factor"), dim + 1)[dim]
    return functional.interpolate(
        ramp[None, None],
        size,
        factor,
        mode,
        call.get("align_corners") if mode == "linear" else None,
        call.get("recompute_scale_factor"),
    )[0, 0]


def _nearest_places(size: int, count: int, factor: np.float32) -> Tensor:
    """Return those that a device reads (PopART, `resizex.cpp`)."""
    if count == size:
        return torch.arange(count)
    if abs(round(float(factor)) - float(factor)) <= 1e-5:
        return torch.arange(size).repeat_interleave(int(factor))
    exact = torch.from_numpy(np.floor(np.arange(count, dtype=np.float32) / factor))
    return exact.long().clamp(0, size - 1)


def _nearest(call: Call) -> dict[str, Any]:
    sizes, factors = call.first.shape[2:], [*map(np.float32, _factors(call))]
    if call.is_half:
        factors = [np.float32(np.float16(factor)) for factor in factors]
    counts = _counts(sizes, factors)
    if 0 in counts:
        return {"resize-shape-half": _lost(call)}
    places = [*map(_nearest_places, sizes, counts, factors)]

    def interpolate(input: Tensor, *_: Any, **__: Any) -> Tensor:
        for dim, taken in enumerate(places, 2):
            input = input.index_select(dim, taken)
        return input

    if counts != list(call.result.shape[2:]):
        name = "resize-shape-half" if call.is_half else "resize-shape"
        return {name: interpolate}
    torchs = [_torchs_places(call, dim, "nearest").long() for dim in range(len(sizes))]
    moved = [len(a) == n for n, a, b in zip(sizes, places, torchs) if not a.equal(b)]
    name = "nearest-same-size" if any(moved) else "nearest-position"
    return {name: interpolate} if moved else {}


def _bilinear(call: Call) -> dict[str, Any]:
    """Compute as a device does (PopTorch, `UpsampleBilinear2d.cpp`)."""
    sizes, traced = list(call.first.shape[2:]), list(call.result.shape[2:])
    is_aligned = bool(call.get("align_corners"))
    if is_aligned and traced[0] == 1 < sizes[0]:
        return {"bilinear-single": True}
    factor = np.float32(f"{traced[0] / sizes[0]:.6f}")
    counts = _counts(sizes, (factor, factor))
    sizes_of_gradient = [int(np.floor(np.float32(n) / factor)) for n in counts]
    if call.trains and 0 not in counts and sizes_of_gradient != sizes:
        return {"bilinear-gradient": True}
    shrinks = {"bilinear-shrinks": call.trains and factor < 0.5}
    if 0 in counts:
        return {**shrinks, "bilinear-rounded": _lost(call)}
    lines = [_lines(size, factor, n, is_aligned) for size, n in zip(sizes, counts)]

    def between(x: Tensor, dim: int) -> Tensor:
        low, high, share = lines[dim]
        share = share.view(-1, *([1] * (-dim - 1)))
        return (
            x.index_select(dim, low) * (1 - share) + x.index_select(dim, high) * share
        )

    height, width = _factors(call)
    if counts == traced:
        name = "bilinear-factor"
        places = [low + share * (high - low) for low, high, share in lines]
        torchs = [_torchs_places(call, dim, "linear") for dim in (0, 1)]
        if all(torch.allclose(*pair, atol=1e-3) for pair in zip(places, torchs)):
            return shrinks
    elif height == width:
        name = "bilinear-rounded"
    else:
        has_size = call.get("scale_factor") is None
        name = "bilinear-uneven" if has_size else "bilinear-uneven-factors"
    return {**shrinks, name: lambda input, *_, **__: between(between(input, -2), -1)}


def _lines(
    size: int, factor: np.float32, count: int, is_aligned: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two lines of which each line of a result is made, and their share."""
    places = np.arange(count)
    if factor == 1:
        exact = places.astype(np.float32)
    elif is_aligned:
        last = float(np.float32(size) * factor) - 1
        exact = np.float32((size - 1) / last) * places.astype(np.float32)
    else:
        inverse = float(np.float32(1) / factor)
        exact = np.maximum(inverse * (places + 0.5) - 0.5, 0).astype(np.float32)
    low = exact.astype(np.int64).clip(0, size - 1)
    high = (low + 1).clip(0, size - 1)
    share = exact - low.astype(np.float32)
    return torch.from_numpy(low), torch.from_numpy(high), torch.from_numpy(share)


def _add_rule(name: str) -> None:
    row(name, "interpolate", lambda call: call.once(_resized).get(name))


for _name in """
    resize-shape resize-shape-half nearest-position nearest-same-size bilinear-gradient
    bilinear-shrinks bilinear-single bilinear-uneven bilinear-uneven-factors
    bilinear-rounded bilinear-factor
""".split():  # noqa: SIM905 - one per line would be longer
    _add_rule(_name)
