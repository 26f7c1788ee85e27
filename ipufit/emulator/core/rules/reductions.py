# SPDX-License-Identifier: Apache-2.0
"""Rules of sums, means, largest elements, norms, distances and other reductions."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ..graph import as_list, base_name, function_name
from ..operators import Call, row
from ..refusals import is_norm_of_matrices

_ALL: tuple[Any, ...] = ((), [])
"""Values of `dim` by which some functions reduce everything."""

_INFINITY = float("inf")


def _keeps(call: Call) -> bool:
    return call.name in ("normalize", "_weight_norm") or bool(call.get("keepdim"))


def _places(call: Call, dim: Any) -> tuple[int, ...]:
    """Return the reduced dimensions as numbers from 0 on."""
    rank = max(tensor.dim() for tensor in call.tensors)
    dims = as_list(dim) if rank and isinstance(dim, (int, list, tuple)) else []
    return tuple(d % rank for d in dims) or tuple(range(rank))


def _rounded_to_half(x: Tensor) -> Tensor:
    """Round a sum as the device stores it, with the gradient of the sum."""
    return x + (x.detach().half().to(x.dtype) - x.detach())


def _half_mean(x: Tensor, places: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return a mean of float16 as the device computes it: it stores the sum first."""
    total = _rounded_to_half(x.sum(places, keepdim))
    return total / (x.numel() / total.numel())


# Sums and means ---------------------------------------------------------------------


row("mean-whole", "mean", lambda call: call.is_whole)
row("sum-dim-none", "sum mean", lambda call: call.get("dim", ()) is None)


@row("sum-all-keepdim", "sum mean logsumexp")
def sum_all_keepdim(call: Call) -> Any:
    function = getattr(torch, call.name)
    return (_keeps(call) and call.get("dim") in _ALL) and (
        lambda *args, **kwargs: function(*args, **kwargs).reshape(())
    )


@row("sum-whole-as-float", "sum prod")
def sum_whole_as_float(call: Call) -> Any:
    if not call.is_whole or not call.result.is_floating_point():
        return None
    function = getattr(torch, call.name)
    return call.users != {"output"} or (
        lambda *args, **kwargs: function(*args, **{**kwargs, "dtype": torch.int32})
    )


@row("mean-half", "mean", is_reported=False)
def mean_half(call: Call) -> Any:
    places, keepdim = _places(call, call.get("dim")), _keeps(call)
    return (call.is_half and "dtype" not in call.kwargs) and (
        lambda input, *_, **__: _half_mean(input, places, keepdim)
    )


@row("mean-half-squares", "mean")
def mean_half_squares(call: Call) -> Any:
    squares = call.argument_node("input")
    if not mean_half(call) or squares is None:
        return None
    name, factors = base_name(function_name(squares)), [*squares.args, None][:2]
    is_power = name in ("pow", "__pow__") and factors[1] == 2
    is_product = name in ("mul", "__mul__", "multiply") and factors[0] is factors[1]
    return name == "square" or is_power or is_product


@row("logsumexp-infinite", "logsumexp", is_reported=False)
def logsumexp_infinite(call: Call) -> Any:
    dim = call.get("dim")

    def logsumexp(input: Tensor, *_: Any, **__: Any) -> Tensor:
        largest = input.detach().amax(dim, keepdim=True)
        total = (input - largest).exp().sum(dim, keepdim=True)
        return _squeezed(call, total.log() + largest, _places(call, dim))

    return call.first.is_floating_point() and dim not in _ALL and logsumexp


def _squeezed(call: Call, x: Tensor, places: tuple[int, ...]) -> Tensor:
    """Remove the reduced dimensions unless `keepdim` is true."""
    for place in () if _keeps(call) else sorted(places, reverse=True):
        x = x.squeeze(place)
    return x


@row("count-nonzero-type", "count_nonzero")
def count_nonzero_type(call: Call) -> Any:
    return not call.is_whole and call.users != {"output"}


# Variances --------------------------------------------------------------------------

_SPREADS = "std std_mean var var_mean"


@row("var-correction", _SPREADS)
def var_correction(call: Call) -> Any:
    return call.kwargs.get("correction") not in (None, 0, 1) and _spread(call)


@row("var-correction-none", _SPREADS)
def var_correction_none(call: Call) -> Any:
    return call.kwargs.get("correction", 1) is None


row("topk-unsorted", "topk", lambda call: not call.get("sorted", True))
row("var-mean-keepdim", "std_mean var_mean", lambda c: _keeps(c) and _spread(c))
row("std-gradient", "std std_mean", lambda call: call.trains and _spread(call))


@row("var-half", _SPREADS, is_reported=False)
def var_half(call: Call) -> Any:
    return call.is_half and _spread(call)


def _spread(call: Call) -> Callable[..., Any]:
    """Return the handler of `std`, `var`, `std_mean` and `var_mean`."""
    dim, keepdim = call.get("dim"), _keeps(call)
    places = _places(call, dim)
    is_biased = 0 in (call.kwargs.get("correction"), call.get("unbiased"))

    def half_variance(input: Tensor, *_: Any, **__: Any) -> Tensor:
        mean = _rounded_to_half(_half_mean(input, places, keepdim=True))
        variance = _half_mean((input - mean).square(), places, keepdim)
        count = input.numel() // variance.numel()
        bessel = torch.tensor(count) / (count - (not is_biased))
        return variance * bessel.half()

    variance: Any = torch.var
    mean: Any = torch.mean
    if call.is_half:
        variance, mean = half_variance, _half_mean

    def spread(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("correction") not in (None, 0, 1):
            kwargs["correction"] = 1
        spread = variance(input, *args, **kwargs)
        spread = torch.sqrt(spread) if call.name.startswith("std") else spread
        if not call.name.endswith("_mean"):
            return spread
        return spread, mean(input, places, keepdim=False)

    return spread


# Largest, smallest and middle elements ----------------------------------------------


def _extreme(
    call: Call, function: Callable[..., Tensor], x: Tensor, places: tuple[int, ...]
) -> Tensor:
    """Give the whole gradient to each of equal extremes; torch divides it."""
    extreme = function(x.detach(), places, keepdim=True)
    is_extreme = torch.eq(x.detach(), extreme)
    total = torch.where(is_extreme, x, 0.0).sum(places, keepdim=True)
    nothing = total - total.detach()  # NaN if it is infinite
    whole = torch.where(nothing == 0, extreme + nothing, extreme)
    return _squeezed(call, whole, places)


def _largest(call: Call) -> Callable[..., Tensor]:
    """Return the handler of `amax`, `amin`, and of `max` and `min` of one tensor."""
    keepdim, places = _keeps(call), _places(call, call.get("dim"))
    function = torch.amax if call.name.endswith("max") else torch.amin
    is_of_all = call.name.startswith("a") and call.get("dim", ()) in _ALL

    def largest(input: Tensor, *_: Any, **__: Any) -> Tensor:
        if call.trains:
            extreme = _extreme(call, function, input, places)
        else:
            extreme = function(input, places, keepdim)
        return extreme.reshape([1, 1] if keepdim else [1]) if is_of_all else extreme

    return largest


@row("amax-of-all", "amax amin")
def amax_of_all(call: Call) -> Any:
    return call.get("dim", ()) in _ALL and not _keeps(call) and _largest(call)


@row("amax-of-all-keepdim", "amax amin")
def amax_of_all_keepdim(call: Call) -> Any:
    is_kept = _keeps(call) and call.first.dim() != 2
    return is_kept and call.get("dim", ()) in _ALL and _largest(call)


row("amax-ties", "amax amin", lambda c: c.trains and _largest(c), is_reported=False)


@row("max-of-all-ties", "max min", is_reported=False)
def max_of_all_ties(call: Call) -> Any:
    is_of_all = len(call.args) + len(call.kwargs) == 1
    return is_of_all and call.trains and _largest(call)


@row("argmax-of-all", "argmax argmin")
def argmax_of_all(call: Call) -> Any:
    return not _keeps(call) and _position(call)


@row("argmax-of-all-keepdim", "argmax argmin")
def argmax_of_all_keepdim(call: Call) -> Any:
    return _keeps(call) and call.first.dim() != 2 and _position(call)


def _position(call: Call) -> Any:
    """Return the handler of `argmax` and `argmin` over all elements."""
    function = getattr(torch, call.name)
    shape = [1, 1] if _keeps(call) else [1]
    return call.get("dim") is None and (
        lambda input, *_, **__: function(input).reshape(shape)
    )


@row("argmax-of-number", "argmax argmin")
def argmax_of_number(call: Call) -> Any:
    return call.get("dim") is not None and call.first.dim() == 0


@row("median-of-all-ties", "median", is_reported=False)
def median_of_all_ties(call: Call) -> Any:
    is_of_all = len(call.args) + len(call.kwargs) == 1
    return is_of_all and call.trains and (lambda input: input.flatten().median(0)[0])


# Norms and distances ----------------------------------------------------------------

_NORMS = "norm linalg_norm linalg_vector_norm linalg_matrix_norm normalize dist"


def _power(call: Call) -> float | None:
    """Return the power of a norm of vectors; None of others."""
    power = call.get("ord" if call.name.startswith("linalg") else "p")
    if power in (None, "fro"):
        power = 2.0
    elif isinstance(power, str) or is_norm_of_matrices(call):
        return None
    return float(power) if call.get("dtype") is None else None


def _norm(call: Call) -> Any:
    """Return the handler of a norm of vectors."""
    power, keepdim, is_half = _power(call), _keeps(call), call.is_half
    default = {"normalize": 1, "linalg_matrix_norm": (-2, -1)}.get(call.name)
    dim = call.get("dim")
    places = _places(call, default if dim is None else dim)
    if call.name == "_weight_norm":
        places = tuple(d for d in range(call.first.dim()) if d != (dim or 0))

    def norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
        if keepdim and all(x.shape[place] == 1 for place in places):
            return x.abs()
        if power == 0:
            return torch.pow(x.abs().pow(0).sum(places, keepdim), _INFINITY)
        if power == 2:
            squares = (x * x).sum(places, keepdim)
            return (_rounded_to_half(squares) if is_half else squares).sqrt()
        function = torch.amax if power == _INFINITY else torch.amin
        return _extreme(call, function, x.abs(), places)

    if call.name == "dist":
        return lambda input, other, *_, **__: norm(input - other)
    if call.name == "_weight_norm":
        return lambda v, g, *_, **__: v * (g / norm(v))
    if call.name != "normalize":
        return norm
    eps = call.get("eps", 1e-12)
    return lambda input, *_, **__: input / norm(input).clamp_min(eps)


@row("norm-zero-gradient", _NORMS)
@row("norm-zero-gradient", "_weight_norm", is_reported=False)
def norm_zero_gradient(call: Call) -> Any:
    return _power(call) == 2 and call.trains and _norm(call)


@row("norm-half", f"{_NORMS} _weight_norm", is_reported=False)
def norm_half(call: Call) -> Any:
    return _power(call) == 2 and call.is_half and _norm(call)


@row("norm-other-power", _NORMS)
def norm_other_power(call: Call) -> Any:
    power = _power(call)
    exact = (0, 1, 2, _INFINITY)
    return power is not None and abs(power) not in exact and call.trains


row("norm-power-0", _NORMS, lambda call: _power(call) == 0 and _norm(call))


@row("norm-infinity-ties", _NORMS, is_reported=False)
def norm_infinity_ties(call: Call) -> Any:
    return _power(call) in (_INFINITY, -_INFINITY) and call.trains and _norm(call)


@row("pairwise-distance-zero", "pairwise_distance")
def pairwise_distance_zero(call: Call) -> Any:
    is_root = call.get("eps", 1e-6) == 0 and call.get("p", 2.0) == 2 and call.trains
    return is_root and (
        lambda x1, x2, *_, **__: (x1 - x2).square().sum(-1, _keeps(call)).sqrt()
    )


row("cdist-itself", "cdist", lambda call: _is_of_itself(call) and _cdist(call))
row("cdist-zero-gradient", "cdist", lambda c: not _is_of_itself(c) and _cdist(c))


def _is_of_itself(call: Call) -> bool:
    """Return whether both operands are one tensor, or views of it by one function."""
    x1, x2 = call.arguments["x1"], call.arguments["x2"]
    are_views = x1._is_view() and x2._is_view() and x1._base is x2._base
    layouts = [(x.shape, x.stride(), x.storage_offset()) for x in (x1, x2)]
    return x1 is x2 or (are_views and layouts[0] == layouts[1])


def _cdist(call: Call) -> Any:
    def cdist(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        distances = torch.cdist(x1, x2, *args, **kwargs)
        zeros = x1.sum(-1)[..., None] * 0 + x2.sum(-1)[..., None, :] * 0
        is_equal = torch.eq(distances.detach(), 0)
        roots = zeros.masked_fill(~is_equal, 1.0).sqrt()
        return torch.where(is_equal, roots, distances)

    return call.get("p", 2.0) == 2 and call.trains and cdist


@row("cdist-power-0", "cdist")
def cdist_power_0(call: Call) -> Any:
    count = float(call.arguments["x1"].shape[-1]) ** _INFINITY
    return call.get("p", 2.0) == 0 and (
        lambda *args, **kwargs: torch.cdist(*args, **kwargs) * 0 + count
    )
