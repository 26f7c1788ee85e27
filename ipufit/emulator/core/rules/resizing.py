# SPDX-License-Identifier: Apache-2.0
"""Rules of pooling, and of upsampling and downsampling."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..graph import as_list
from ..operators import Call, rule

_INDEXED_POOLS = tuple(f"max_pool{rank}d_with_indices" for rank in (1, 2, 3))
_MAX_POOLS = "max_pool1d", "max_pool2d", "max_pool3d", *_INDEXED_POOLS
_AVG_POOLS = "avg_pool2d", "avg_pool3d"
_ADAPTIVE = tuple(f"adaptive_avg_pool{rank}d" for rank in (1, 2, 3))


@rule("pool-stride", *_MAX_POOLS, *_AVG_POOLS, "lp_pool2d")
def pool_stride(call: Call) -> Any:
    return call.arguments.get("stride") in (None, [], ())


@rule(
    "padding-of-one",
    *("max_pool2d", "max_pool3d", *_INDEXED_POOLS[1:]),
    *(*_AVG_POOLS, "conv2d", "conv3d"),
)
def padding_of_one(call: Call) -> Any:
    padding = call.arguments.get("padding")
    return isinstance(padding, (list, tuple)) and len(padding) == 1


@rule("max-pool-indices", *_INDEXED_POOLS, topic="arguments")
def max_pool_indices(call: Call) -> Any:
    users = call.node.users if call.node else ()
    indices = [user for user in users if user.args[1:] == (1,)]
    is_used = any(user.users for user in indices) or call.name.startswith("max_pool3d")
    return is_used and (
        f"{call.name.replace('_with_indices', '')} with return_indices=True is not "
        "supported: only the values of max pooling can be had."
    )


@rule("max-pool-dilation", *_MAX_POOLS)
def max_pool_dilation(call: Call) -> Any:
    dilation = call.arguments.get("dilation", 1)
    return any(step != 1 for step in as_list(dilation))


class _Window(NamedTuple):
    """Along one dimension: sizes, and how many positions a device and torch have."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    traced: int

    @property
    def extra(self) -> int:
        """Elements on the right, up to the end of the device's last window."""
        return (
            (self.positions - 1) * self.stride
            + self.reach
            - self.size
            - (2 * self.padding)
        )

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    @property
    def positions(self) -> int:
        inner = self.size + 2 * self.padding - self.reach
        return -(-inner // self.stride) + 1


def _windows(call: Call) -> list[_Window]:
    given = call.arguments
    rank = int(call.name.partition("pool")[2][0])

    def each(name: str, default: Any) -> list[int]:
        value = as_list(given.get(name, default))
        return value * rank if len(value) == 1 else value

    values = call.result[0] if isinstance(call.result, tuple) else call.result
    kernel = each("kernel_size", None)
    stride = given.get("stride")
    return [
        _Window(*one)
        for one in zip(
            given["input"].shape[-rank:],
            kernel,
            kernel if stride in (None, [], ()) else each("stride", None),
            each("padding", 0),
            each("dilation", 1),
            values.shape[-rank:],
        )
    ]


@rule("ceil-mode", *_MAX_POOLS)
def ceil_mode(call: Call) -> Any:
    if not call.arguments.get("ceil_mode"):
        return None
    windows = _windows(call)
    if all(window.positions == window.traced for window in windows):
        return None
    function = getattr(functional, call.name)
    sides = [side for w in windows[::-1] for side in (w.padding, w.padding + w.extra)]
    stride = [window.stride for window in windows]
    dilation = [window.dilation for window in windows]

    def pool(input: Tensor, kernel_size: Any, *_: Any, **__: Any) -> Any:
        padded = functional.pad(input, sides, value=float("-inf"))
        return function(padded, kernel_size, stride, dilation=dilation)

    return pool


@rule("ceil-mode", *_AVG_POOLS)
def ceil_mode_of_averages(call: Call) -> Any:
    windows = _windows(call)
    is_ceil = call.arguments.get("ceil_mode")
    return is_ceil and any(w.positions != w.traced for w in windows)


def _average(call: Call) -> dict[str, Any]:
    """Arguments of an average pooling as a device takes them, without its input."""
    given = call.arguments
    return {k: v for k, v in given.items() if k not in ("input", "divisor_override")}


@rule("divisor-override", *_AVG_POOLS)
def divisor_override(call: Call) -> Any:
    if call.arguments.get("divisor_override") is None:
        return None
    function = getattr(functional, call.name)
    given = _average(call)
    return lambda input, *_, **__: function(input, **given)


@rule("pool-uneven-padding", *_AVG_POOLS)
def pool_uneven_padding(call: Call) -> Any:
    given = _average(call)
    padding = as_list(given.get("padding", 0))
    if len(set(padding)) == 1 or not given.get("count_include_pad", True):
        return None
    function = getattr(functional, call.name)
    given["padding"] = 0
    return lambda input, *_, **__: function(
        functional.pad(input, (*padding, *padding)), **given
    )


@rule("pool-padding-1d", "avg_pool1d")
def pool_padding_1d(call: Call) -> Any:
    given = call.arguments
    is_padded = any(as_list(given.get("padding", 0)))
    return is_padded and given.get("count_include_pad", True)


@rule("adaptive-pool-sizes", *_ADAPTIVE, topic="arguments")
def adaptive_pool_sizes(call: Call) -> Any:
    given = call.arguments
    sizes = given["input"].shape[-int(call.name[-2]) :]
    wanted = as_list(given["output_size"])
    wanted = wanted * len(sizes) if len(wanted) == 1 else wanted
    for dim, (size, out) in enumerate(zip(sizes, wanted)):
        if out and size % out:
            return (
                f"Input dim {dim} ({size}) is not divisible by the corresponding "
                f"output dim ({out}). An IPU would compute something else."
            )
    return None


@rule("pool-without-batch", *_ADAPTIVE)
def pool_without_batch(call: Call) -> Any:
    return call.arguments["input"].dim() == int(call.name[-2]) + 1


_LINEAR = {
    "linear": "aten::upsample_linear1d",
    "trilinear": "aten::upsample_trilinear3d",
}


@rule("linear-upsampling", "interpolate", topic="arguments")
def linear_upsampling(call: Call) -> Any:
    mode = call.arguments.get("mode")
    return mode in _LINEAR and (
        f"Unsupported upsample mode {_LINEAR[mode]}: currently only 'nearest' is "
        "supported for this number of dimensions."
    )


@rule("bicubic-aligned", "interpolate", topic="arguments")
def bicubic_aligned(call: Call) -> Any:
    given = call.arguments
    is_aligned = given.get("mode") == "bicubic" and given.get("align_corners")
    return is_aligned and "Only support align_corners=False. Mode: bicubic."


def _is_lost(call: Call) -> str:
    """Refuse a result without elements."""
    return (
        f"`interpolate` to {list(call.result.shape[2:])}: the device rounds the factor "
        "down, and nothing is left of the result (`ReshapeOps.cpp`: zero-sized tensors "
        "are not supported). Use a pooling, or a mean."
    )


def _interpolation(call: Call) -> tuple[dict[str, Any], list[float]]:
    """Arguments of `interpolate`, and the factor of each dimension."""
    given = call.arguments
    sizes, traced = given["input"].shape[2:], call.result.shape[2:]
    factors = given.get("scale_factor")
    if factors is None or given.get("recompute_scale_factor"):
        return given, [out / size for size, out in zip(sizes, traced)]
    factors = as_list(factors)
    return given, factors * len(sizes) if len(factors) == 1 else factors


def _torchs_positions(call: Call, dim: int, mode: str) -> Tensor:
    """Where torch takes the elements of a result from, along a dimension."""
    given = call.arguments
    ramp = torch.arange(given["input"].shape[dim + 2], dtype=torch.float32)
    size = factor = None
    if given.get("size") is not None:
        size = call.result.shape[dim + 2]
    else:
        factors = as_list(given["scale_factor"])
        factor = factors[dim if len(factors) > 1 else 0]
    return functional.interpolate(
        ramp[None, None],
        size,
        factor,
        mode,
        given.get("align_corners") if mode == "linear" else None,
        given.get("recompute_scale_factor"),
    )[0, 0]


def _nearest_positions(size: int, factor: np.float32) -> Tensor:
    """Where a device takes them from (PopART, `resizex.cpp`)."""
    count = int(np.floor(np.float32(size) * factor))
    places = torch.arange(count)
    if count == size:
        return places
    if abs(round(float(factor)) - float(factor)) <= 1e-5:
        return torch.arange(size).repeat_interleave(int(factor))
    exact = torch.from_numpy(np.floor(np.arange(count, dtype=np.float32) / factor))
    return exact.long().clamp(0, size - 1)


def _resized(call: Call, row: str) -> Any:
    """The rules of `mode="nearest"` and of bicubic shapes."""
    given, exact = _interpolation(call)
    mode = given.get("mode", "nearest")
    is_half = given["input"].dtype == torch.float16
    if mode != "nearest" and (mode != "bicubic" or is_half):
        return None
    factors = [np.float32(factor) for factor in exact]
    if is_half:
        factors = [np.float32(np.float16(factor)) for factor in factors]
    sizes, traced = given["input"].shape[2:], call.result.shape[2:]
    counts = [int(np.floor(np.float32(s) * f)) for s, f in zip(sizes, factors)]
    is_reshaped = counts != list(traced)
    if mode == "bicubic":
        if not is_reshaped or row != "resize-shape":
            return None
        height, width = counts
        return lambda *args, **kwargs: functional.interpolate(*args, **kwargs)[
            ..., :height, :width
        ]
    positions = [_nearest_positions(s, f) for s, f in zip(sizes, factors)]
    torchs = [_torchs_positions(call, d, "nearest").long() for d in range(len(sizes))]
    pairs = list(zip(positions, torchs))
    if 0 in counts:
        return row == "resize-shape-half" and _is_lost(call)
    if is_reshaped:
        found = "resize-shape-half" if is_half else "resize-shape"
    elif all(torch.equal(a, b) for a, b in pairs):
        return None
    else:
        is_kept = any(
            size == len(a) and not torch.equal(a, b)
            for size, (a, b) in zip(sizes, pairs)
        )
        found = "nearest-same-size" if is_kept else "nearest-position"
    if found != row:
        return None

    def interpolate(input: Tensor, *_: Any, **__: Any) -> Tensor:
        for dim, taken in enumerate(positions, 2):
            input = input.index_select(dim, taken)
        return input

    return interpolate


for _row in (
    "resize-shape",
    "resize-shape-half",
    "nearest-position",
    "nearest-same-size",
):
    rule(_row, "interpolate")(functools.partial(_resized, row=_row))


@rule("bicubic-half", "interpolate", is_certain=False)
def bicubic_half(call: Call) -> Any:
    given = call.arguments
    return given.get("mode") == "bicubic" and given["input"].dtype == torch.float16


class _Lines(NamedTuple):
    """The two lines of which a line of a bilinear result is made, along a dimension."""

    low: Tensor
    high: Tensor
    share: Tensor


class _Bilinear(NamedTuple):
    """Bilinear interpolation as a device computes it (`UpsampleBilinear2d.cpp`)."""

    sizes: tuple[int, int]
    factor: np.float32
    is_aligned: bool

    @property
    def counts(self) -> list[int]:
        return [int(np.floor(np.float32(s) * self.factor)) for s in self.sizes]

    @property
    def gradient_counts(self) -> list[int]:
        return [int(np.floor(np.float32(c) / self.factor)) for c in self.counts]

    def lines(self, dim: int) -> _Lines:
        size, count = self.sizes[dim], self.counts[dim]
        places = np.arange(count)
        if self.factor == 1:
            exact = places.astype(np.float32)
        elif self.is_aligned:
            last = float(np.float32(size) * self.factor) - 1
            exact = np.float32((size - 1) / last) * places.astype(np.float32)
        else:
            inverse = float(np.float32(1) / self.factor)
            exact = np.maximum(inverse * (places + 0.5) - 0.5, 0).astype(np.float32)
        low = exact.astype(np.int64).clip(0, size - 1)
        high = (low + 1).clip(0, size - 1)
        share = exact - low.astype(np.float32)
        return _Lines(*map(torch.from_numpy, (low, high, share)))


def _bilinear(call: Call) -> _Bilinear | None:
    given = call.arguments
    if given.get("mode") != "bilinear":
        return None
    height, width = given["input"].shape[2:]
    factor = np.float32(f"{call.result.shape[2] / height:.6f}")
    found = _Bilinear((height, width), factor, bool(given.get("align_corners")))
    is_broken = found.is_aligned and call.result.shape[2] == 1 < height
    return None if is_broken else found


def _has_misfit_gradient(call: Call, found: _Bilinear) -> bool:
    return (
        call.trains
        and 0 not in found.counts
        and found.gradient_counts != list(found.sizes)
    )


@rule("bilinear-gradient", "interpolate")
def bilinear_gradient(call: Call) -> Any:
    found = _bilinear(call)
    return found and _has_misfit_gradient(call, found)


@rule("bilinear-shrinks", "interpolate", is_certain=False)
def bilinear_shrinks(call: Call) -> Any:
    found = _bilinear(call)
    return (
        found
        and call.trains
        and not _has_misfit_gradient(call, found)
        and found.factor < 0.5
    )


@rule("bilinear-single", "interpolate")
def bilinear_single(call: Call) -> Any:
    given = call.arguments
    return (
        given.get("mode") == "bilinear"
        and given.get("align_corners")
        and call.result.shape[2] == 1 < given["input"].shape[2]
    )


def _resized_bilinearly(call: Call, row: str) -> Any:
    """The rules of `mode="bilinear"` that compute."""
    found = _bilinear(call)
    if found is None or _has_misfit_gradient(call, found):
        return None
    if 0 in found.counts:
        return row == "bilinear-rounded" and _is_lost(call)
    given, factors = _interpolation(call)
    has_factor = given.get("scale_factor") is not None
    height, width = found.lines(0), found.lines(1)
    if found.counts != list(call.result.shape[2:]):
        is_uneven = factors[0] != factors[1]
        name = "bilinear-uneven" if is_uneven else "bilinear-rounded"
        if is_uneven and has_factor:
            name = "bilinear-uneven-factors"
    else:
        name = "bilinear-factor"
        torchs = [_torchs_positions(call, dim, "linear") for dim in (0, 1)]
        places = [low + share * (high - low) for low, high, share in (height, width)]
        if all(torch.allclose(*pair, atol=1e-3) for pair in zip(places, torchs)):
            return None
    if name != row:
        return None

    def between(x: Tensor, lines: _Lines, dim: int) -> Tensor:
        share = lines.share.view(-1, *([1] * (-dim - 1)))
        low, high = (x.index_select(dim, taken) for taken in lines[:2])
        return low * (1 - share) + high * share

    return lambda input, *_, **__: between(between(input, height, -2), width, -1)


for _row in (
    "bilinear-uneven",
    "bilinear-uneven-factors",
    "bilinear-rounded",
    "bilinear-factor",
):
    rule(_row, "interpolate")(functools.partial(_resized_bilinearly, row=_row))
