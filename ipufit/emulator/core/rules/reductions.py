# SPDX-License-Identifier: Apache-2.0
"""Rules of sums, means, largest elements, norms, distances and other reductions."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from ..graph import as_list, base_name, function_name
from ..operators import Call, row, rule
from .elementwise import of_whole_numbers

_UNGIVEN = object()


def _reduced(call: Call) -> tuple[Any, bool]:
    """Return `dim` and `keepdim` of a reduction."""
    given = call.arguments
    return given.get("dim", _UNGIVEN), bool(given.get("keepdim", False))


def _places(call: Call, dim: Any) -> tuple[int, ...]:
    """Return the reduced dimensions as numbers from 0 on."""
    rank = call.tensors()[0].dim()
    wanted = as_list(dim) if rank and isinstance(dim, (int, list, tuple)) else []
    return tuple(d % rank for d in wanted) or tuple(range(rank))


def _rounded_to_half(x: Tensor) -> Tensor:
    """Round a sum as the device stores it, with the gradient of the sum."""
    return x + (x.detach().half().to(x.dtype) - x.detach())


def _half_mean(x: Tensor, places: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return a mean of float16 as the device computes it: it stores the sum first."""
    total = _rounded_to_half(x.sum(places, keepdim))
    return total / (x.numel() / total.numel())


def _is_half(call: Call) -> bool:
    return call.tensors()[0].dtype == torch.float16


# Sums and means ---------------------------------------------------------------------


@rule("mean-whole", "mean")
def mean_whole(call: Call) -> Any:
    return call.is_whole and of_whole_numbers("The mean", "x.float().mean()")


row("sum-dim-none", "sum mean", lambda call: _reduced(call)[0] is None)


@rule("sum-all-keepdim", "sum", "mean", "logsumexp")
def sum_all_keepdim(call: Call) -> Any:
    dim, keepdim = _reduced(call)
    if not keepdim or dim not in ((), []):
        return None
    function = getattr(torch, call.name)
    return lambda *args, **kwargs: function(*args, **kwargs).reshape(())


@rule("sum-whole-as-float", "sum", "prod")
def sum_whole_as_float(call: Call) -> Any:
    if not call.is_whole or not call.result.is_floating_point():
        return None
    if call.users != {"output"}:
        return True
    function = getattr(torch, call.name)
    return lambda *args, **kwargs: function(*args, **{**kwargs, "dtype": torch.int32})


@rule("mean-half", "mean", is_reported=False)
def mean_half(call: Call) -> Any:
    if not _is_half(call) or "dtype" in call.kwargs:
        return None
    dim, keepdim = _reduced(call)
    places = _places(call, dim)
    return lambda input, *_, **__: _half_mean(input, places, keepdim)


@rule("mean-half-squares", "mean")
def mean_half_squares(call: Call) -> Any:
    squares = call.argument_node("input")
    if not mean_half(call) or squares is None:
        return None
    name, factors = base_name(function_name(squares)), [*squares.args, None][:2]
    is_power = name in ("pow", "__pow__") and factors[1] == 2
    is_product = name in ("mul", "__mul__", "multiply") and factors[0] is factors[1]
    return name == "square" or is_power or is_product


@rule("logsumexp-infinite", "logsumexp", is_reported=False)
def logsumexp_infinite(call: Call) -> Any:
    dim, keepdim = _reduced(call)
    if not call.tensors()[0].is_floating_point() or dim in ((), []):
        return None

    def logsumexp(input: Tensor, *_: Any, **__: Any) -> Tensor:
        largest = input.detach().amax(dim, keepdim=True)
        total = (input - largest).exp().sum(dim, keepdim=True)
        found = total.log() + largest
        return found if keepdim else _squeezed(found, _places(call, dim))

    return logsumexp


def _squeezed(x: Tensor, places: tuple[int, ...]) -> Tensor:
    for place in sorted(places, reverse=True):
        x = x.squeeze(place)
    return x


@rule("count-nonzero-type", "count_nonzero")
def count_nonzero_type(call: Call) -> Any:
    return not call.is_whole and call.users != {"output"}


# Variances --------------------------------------------------------------------------

_SPREADS = "std", "std_mean", "var", "var_mean"


@rule("var-correction", *_SPREADS)
def var_correction(call: Call) -> Any:
    return call.kwargs.get("correction") not in (None, 0, 1) and _spread(call)


@rule("var-correction-none", *_SPREADS)
def var_correction_none(call: Call) -> Any:
    return call.kwargs.get("correction", 1) is None


row("topk-unsorted", "topk", lambda call: not call.arguments.get("sorted", True))


@rule("var-mean-keepdim", "std_mean", "var_mean")
def var_mean_keepdim(call: Call) -> Any:
    given = call.arguments
    return bool(given.get("keepdim")) and _spread(call)


row("std-gradient", "std std_mean", lambda call: call.trains and _spread(call))


@rule("var-half", *_SPREADS, is_reported=False)
def var_half(call: Call) -> Any:
    return _is_half(call) and _spread(call)


def _spread(call: Call) -> Callable[..., Any]:
    """Return the handler of `std`, `var`, `std_mean` and `var_mean`."""
    dim, keepdim = _reduced(call)
    places = _places(call, dim)
    is_biased = 0 in (call.kwargs.get("correction"), call.arguments.get("unbiased"))

    def half_variance(input: Tensor, *_: Any, **__: Any) -> Tensor:
        mean = _rounded_to_half(_half_mean(input, places, keepdim=True))
        variance = _half_mean((input - mean).square(), places, keepdim)
        count = input.numel() // variance.numel()
        bessel = torch.tensor(count) / (count - (not is_biased))
        return variance * bessel.half()

    variance, mean = (
        (half_variance, _half_mean) if _is_half(call) else (torch.var, torch.mean)
    )

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
    function: Callable[..., Tensor], x: Tensor, places: tuple[int, ...], keepdim: bool
) -> Tensor:
    """Give the whole gradient to each of equal extremes; torch divides it."""
    extreme = function(x.detach(), places, keepdim=True)
    is_extreme = torch.eq(x.detach(), extreme)
    total = torch.where(is_extreme, x, 0.0).sum(places, keepdim=True)
    nothing = total - total.detach()  # NaN if it is infinite
    found = torch.where(nothing == 0, extreme + nothing, extreme)
    return found if keepdim else _squeezed(found, places)


def _largest(call: Call) -> Callable[..., Tensor]:
    """Return the handler of `amax`, `amin`, and of `max` and `min` of one tensor."""
    dim, keepdim = _reduced(call)
    places = _places(call, dim)
    function = torch.amax if call.name.endswith("max") else torch.amin
    is_of_all = call.name.startswith("a") and dim in (_UNGIVEN, (), [])
    shape = [1, 1] if keepdim else [1]

    def largest(input: Tensor, *_: Any, **__: Any) -> Tensor:
        if call.trains:
            found = _extreme(function, input, places, keepdim)
        else:
            found = function(input, places, keepdim)
        return found.reshape(shape) if is_of_all else found

    return largest


@rule("amax-of-all", "amax", "amin")
def amax_of_all(call: Call) -> Any:
    dim, keepdim = _reduced(call)
    return dim in (_UNGIVEN, (), []) and not keepdim and _largest(call)


@rule("amax-of-all-keepdim", "amax", "amin")
def amax_of_all_keepdim(call: Call) -> Any:
    dim, keepdim = _reduced(call)
    is_of_all = dim in (_UNGIVEN, (), []) and keepdim
    return is_of_all and call.tensors()[0].dim() != 2 and _largest(call)


@rule("amax-ties", "amax", "amin", is_reported=False)
def amax_ties(call: Call) -> Any:
    return call.trains and _largest(call)


@rule("max-of-all-ties", "max", "min", is_reported=False)
def max_of_all_ties(call: Call) -> Any:
    is_of_all = len(call.args) + len(call.kwargs) == 1
    return is_of_all and call.trains and _largest(call)


@rule("argmax-of-all", "argmax", "argmin")
def argmax_of_all(call: Call) -> Any:
    return not _reduced(call)[1] and _position(call)


@rule("argmax-of-all-keepdim", "argmax", "argmin")
def argmax_of_all_keepdim(call: Call) -> Any:
    is_kept = _reduced(call)[1] and call.tensors()[0].dim() != 2
    return is_kept and _position(call)


def _position(call: Call) -> Any:
    """Return the handler of `argmax` and `argmin` over all elements."""
    dim, keepdim = _reduced(call)
    if dim is not None and dim is not _UNGIVEN:
        return None
    function = getattr(torch, call.name)
    shape = [1, 1] if keepdim else [1]
    return lambda input, *_, **__: function(input).reshape(shape)


@rule("argmax-of-number", "argmax", "argmin")
def argmax_of_number(call: Call) -> Any:
    has_dim = _reduced(call)[0] not in (None, _UNGIVEN)
    return has_dim and call.tensors()[0].dim() == 0


@rule("median-of-all-ties", "median", is_reported=False)
def median_of_all_ties(call: Call) -> Any:
    is_of_all = len(call.args) + len(call.kwargs) == 1
    if not is_of_all or not call.trains:
        return None
    return lambda input: input.flatten().median(0)[0]


# Norms and distances ----------------------------------------------------------------

_NORMS = "norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "normalize"


def _vector_norm(call: Call) -> tuple[float, tuple[int, ...], bool] | None:
    """Return power, dimensions and `keepdim` of a norm of vectors; None of others."""
    name = call.name
    if name == "normalize":
        given = call.arguments
        power, dim, keepdim = given.get("p", 2.0), given.get("dim", 1), True
    else:
        power_name = "p" if name == "norm" else "ord"
        given = call.arguments
        power, dim = given.get(power_name), given.get("dim")
        keepdim = given.get("keepdim", False)
        is_matrix = name == "linalg_matrix_norm"
        if name == "linalg_norm" and power is not None:
            rank = call.tensors()[0].dim() if dim is None else len(as_list(dim))
            is_matrix = rank == 2
        if is_matrix and power not in (None, "fro"):
            return None
        if name == "linalg_matrix_norm":
            dim = (-2, -1) if dim is None else dim
        power = 2.0 if power in (None, "fro") else power
    if given.get("dtype") is not None or isinstance(power, str):
        return None
    return float(power), _places(call, dim), keepdim


def _norm(call: Call, power: float, places: tuple[int, ...], keepdim: bool) -> Any:
    """Return the handler of a norm."""
    is_half = _is_half(call)

    def norm(x: Tensor) -> Tensor:
        if keepdim and all(x.shape[place] == 1 for place in places):
            return x.abs()
        if power == 0:
            counts = x.abs().pow(0).sum(places, keepdim)
            return torch.pow(counts, float("inf"))
        if power == 2:
            squares = (x * x).sum(places, keepdim)
            return (_rounded_to_half(squares) if is_half else squares).sqrt()
        function = torch.amax if power > 0 else torch.amin
        return _extreme(function, x.abs(), places, keepdim)

    if call.name != "normalize":
        return lambda input, *_, **__: norm(input)
    eps = call.arguments.get("eps", 1e-12)
    return lambda input, *_, **__: input / norm(input).clamp_min(eps)


@rule("norm-zero-gradient", *_NORMS)
def norm_zero_gradient(call: Call) -> Any:
    found = _vector_norm(call)
    return found and found[0] == 2 and call.trains and _norm(call, *found)


@rule("norm-half", *_NORMS, is_reported=False)
def norm_half(call: Call) -> Any:
    found = _vector_norm(call)
    return found and found[0] == 2 and _is_half(call) and _norm(call, *found)


@rule("norm-other-power", *_NORMS)
def norm_other_power(call: Call) -> Any:
    found = _vector_norm(call)
    return found and abs(found[0]) not in (0, 1, 2, float("inf")) and call.trains


@rule("norm-power-0", *_NORMS)
def norm_power_0(call: Call) -> Any:
    found = _vector_norm(call)
    return found and found[0] == 0 and _norm(call, *found)


@rule("norm-infinity-ties", *_NORMS, is_reported=False)
def norm_infinity_ties(call: Call) -> Any:
    found = _vector_norm(call)
    return (
        found and abs(found[0]) == float("inf") and call.trains and _norm(call, *found)
    )


@rule("pairwise-distance-zero", "pairwise_distance")
def pairwise_distance_zero(call: Call) -> Any:
    given = call.arguments
    if given.get("eps", 1e-6) != 0 or given.get("p", 2.0) != 2 or not call.trains:
        return None
    keepdim = given.get("keepdim", False)
    return lambda x1, x2, *_, **__: (x1 - x2).square().sum(-1, keepdim).sqrt()


@rule("cdist-itself", "cdist")
def cdist_itself(call: Call) -> Any:
    return _is_same(call) and cdist_of_rows(call)


@rule("cdist-zero-gradient", "cdist")
def cdist_of_others(call: Call) -> Any:
    return not _is_same(call) and cdist_of_rows(call)


def _is_same(call: Call) -> bool:
    """Return whether both operands are one tensor, or views of it by one function."""
    given = call.arguments
    x1, x2 = given["x1"], given["x2"]
    are_views = x1._is_view() and x2._is_view() and x1._base is x2._base
    layouts = [(x.shape, x.stride(), x.storage_offset()) for x in (x1, x2)]
    return x1 is x2 or (are_views and layouts[0] == layouts[1])


def cdist_of_rows(call: Call) -> Any:
    if call.arguments.get("p", 2.0) != 2 or not call.trains:
        return None

    def cdist(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = torch.cdist(x1, x2, *args, **kwargs)
        zeros = x1.sum(-1)[..., None] * 0 + x2.sum(-1)[..., None, :] * 0
        is_equal = torch.eq(found.detach(), 0)
        roots = zeros.masked_fill(~is_equal, 1.0).sqrt()
        return torch.where(is_equal, roots, found)

    return cdist


@rule("cdist-power-0", "cdist")
def cdist_power_0(call: Call) -> Any:
    given = call.arguments
    if given.get("p", 2.0) != 0:
        return None
    counted = float(given["x1"].shape[-1]) ** float("inf")
    return lambda *args, **kwargs: torch.cdist(*args, **kwargs) * 0 + counted
