# SPDX-License-Identifier: Apache-2.0
"""A copy of a module whose tensors have shapes and types, but no values.

It takes no memory for weights or activations, computes nothing, and draws nothing from
random generators. The user's module stays as it is, its buffers included.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor
from torch._C import _get_mkldnn_enabled, _set_mkldnn_enabled
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from ipufit.data import HostRandomState
from ipufit.engine.observers.autograd import user_line
from ipufit.engine.weights.wrapping import unfetched, weights_of
from ipufit.errors import ConfigError, IpufitError, UnsupportedError

from .known_shapes import KnownShapes


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

    before = HostRandomState()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True  # errors are raised all the same
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call,unused-ignore]
    known = KnownShapes()  # type: ignore[no-untyped-call,unused-ignore]
    try:
        with warnings.catch_warnings(), without_mkldnn(), _unvalidated(), mode, known:
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
        log.disabled = was_disabled
        before.put_back()


def _asks_for_values(error: BaseException) -> bool:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    kinds = DataDependentOutputException, DynamicOutputShapeException
    words = ".numpy() is not supp", "unsupported format string passed to FakeTensor"
    return isinstance(error, kinds) or str(error).startswith(words)


@contextlib.contextmanager
def _unvalidated() -> Iterator[None]:
    """Let `torch.distributions` take arguments without values, as a trace does."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Have torch run within without a library of the processor, and then as before.

    With it an LSTM is one operator, which saves the library's own data.
    `torch.backends.mkldnn.flags` would set more than this, and warn.

    Example:
        >>> with without_mkldnn():
        ...     _get_mkldnn_enabled()
        False
    """
    before = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    try:
        yield
    finally:
        _set_mkldnn_enabled(before)


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


def like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and type, and a parameter if it is one.

    Example:
        >>> like(torch.nn.Parameter(torch.zeros(2), requires_grad=False)).shape
        torch.Size([2])
    """
    shape, dtype = unfetched(tensor, "shape"), unfetched(tensor, "dtype")
    is_trained = bool(unfetched(tensor, "requires_grad"))
    empty: Tensor = torch.empty(shape, dtype=dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=is_trained)
    return empty


def all_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and types.

    Example:
        >>> [one.shape for one in all_like([torch.zeros(2), torch.zeros(3)])]
        [torch.Size([2]), torch.Size([3])]
    """
    return [like(tensor) for tensor in tensors]


class _CopiesOfShapes(TorchFunctionMode):
    """Has `copy.deepcopy` make tensors of shapes and types from those with values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return like(args[0])
        return func(*args, **(kwargs or {}))
