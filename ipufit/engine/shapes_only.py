# SPDX-License-Identifier: Apache-2.0
"""Tensors that have shapes and types, but no values.

They take no memory for weights or activations, compute nothing, and draw nothing from
random generators.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from typing import Any, Callable, Iterator

import torch
from torch import Tensor
from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from ipufit.data import HostRandomState
from ipufit.engine.trace_checks import user_line
from ipufit.engine.weights import unfetched, weights_of
from ipufit.errors import ConfigError, IpufitError, UnsupportedError


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Give all tensors that are made within shapes and types, but no values.

    Torch's part for this takes a second to be imported, so whoever needs no such
    tensors should not come here. Random states are put back at the end: a module may
    draw numbers without torch.

    Raises:
        UnsupportedError: Code within asks for values.

    Example:
        >>> with shapes_only():
        ...     product = torch.ones(1_000_000, 2) @ torch.ones(2, 1_000_000)
        >>> product.shape
        torch.Size([1000000, 1000000])
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    random_state = HostRandomState()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # errors are raised all the same
    # With this library an LSTM is one operator, which saves the library's own data.
    # `torch.backends.mkldnn.flags` would set more than this, and warn.
    had_mkldnn = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    validated = Distribution._validate_args  # needs values; a trace leaves it out, too
    Distribution.set_default_validate_args(False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call,unused-ignore]
    known = KnownShapes()  # type: ignore[no-untyped-call,unused-ignore]
    try:
        with warnings.catch_warnings(), mode, known:
            warnings.simplefilter("ignore")  # they come again when it is traced
            yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, IpufitError) else error
        if cause is not None and _asks_for_values(cause):
            raise UnsupportedError(
                "The costs of a module are measured on tensors that have shapes and "
                "no values, and code computes with values, or makes a tensor whose "
                f"shape depends on them, at {user_line(cause)}. Keep to operations on "
                "tensors of fixed shapes; `check` says what PopTorch refuses. (torch's "
                f"words: {cause})"
            ) from error
        raise
    finally:
        Distribution.set_default_validate_args(validated)
        _set_mkldnn_enabled(had_mkldnn)
        log.disabled = was_disabled
        random_state.put_back()


def _asks_for_values(error: BaseException) -> bool:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    kinds = DataDependentOutputException, DynamicOutputShapeException
    words = ".numpy() is not supp", "unsupported format string passed to FakeTensor"
    return isinstance(error, kinds) or str(error).startswith(words)


def like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type, and a parameter if it is one.

    Example:
        >>> like(torch.nn.Parameter(torch.zeros(2), requires_grad=False)).shape
        torch.Size([2])
    """
    shape, dtype = unfetched(tensor, "shape"), unfetched(tensor, "dtype")
    empty: Tensor = torch.empty(shape, dtype=dtype)
    if isinstance(tensor, torch.nn.Parameter):
        is_trained = bool(unfetched(tensor, "requires_grad"))
        return torch.nn.Parameter(empty, requires_grad=is_trained)
    return empty


def copy_of_shapes(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module within `shapes_only`, with weights of its shapes and types.

    So are tensors that it has as plain attributes, in lists, or anywhere else. Weights
    that PopTorch trains aren't fetched from their device for it.

    Raises:
        ConfigError: The module can't be copied.

    Example:
        >>> with shapes_only():
        ...     copied = copy_of_shapes(torch.nn.Linear(2, 3))
        >>> copied.weight.shape
        torch.Size([3, 2])
    """
    memo: dict[int, Any] = {id(weight): like(weight) for weight in weights_of(module)}
    try:
        with _CopiesOfShapes():  # type: ignore[no-untyped-call,unused-ignore]
            return copy.deepcopy(module, memo)
    except Exception as error:  # a user's attribute may raise anything
        raise ConfigError(
            f"The costs of {type(module).__name__} are measured on a copy without "
            f"values, and it can't be copied: {error}."
        ) from error


class _CopiesOfShapes(TorchFunctionMode):
    """Has `copy.deepcopy` make tensors of shapes and types from those with values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return like(args[0])
        return func(*args, **(kwargs or {}))


class KnownShapes(TorchFunctionMode):
    """Computes some functions by other ones, whose shapes don't depend on values.

    PopTorch compiles them. On tensors without values, torch 2.0 computes none of them,
    and later versions not all.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = NotImplemented
        if func in _INSTEAD:
            result = _INSTEAD[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _repeated(
    input: Tensor,
    repeats: Any,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    if not isinstance(repeats, int) or repeats < 1:
        return NotImplemented
    rows = input.reshape(-1) if dim is None else input
    dim = 0 if dim is None else dim
    if not -rows.dim() <= dim < rows.dim():
        return NotImplemented
    place = dim % rows.dim()
    shape = [*rows.shape[: place + 1], repeats, *rows.shape[place + 1 :]]
    return rows.unsqueeze(place + 1).expand(shape).flatten(place, place + 1)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
    if num_classes < 1 or tensor.dtype != torch.int64:
        return NotImplemented
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if minlength < 1 or input.dim() != 1:
        return NotImplemented
    given = torch.ones_like(input) if weights is None else weights
    zeros = torch.zeros(minlength, dtype=given.dtype, device=input.device)
    return zeros.index_add(0, input, given)


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.repeat_interleave: _repeated,
    Tensor.repeat_interleave: _repeated,
    torch.nn.functional.one_hot: _one_hot,
    torch.bincount: _counted,
    Tensor.bincount: _counted,
}
"""Each gives NotImplemented where the shape depends on values after all."""
