# SPDX-License-Identifier: Apache-2.0
"""Types of numbers that torch's kernels refuse, and its tensors without values don't.

A matrix product of whole and floating-point numbers, a softmax of whole ones, `1 -
mask`: each has a shape, so it passes on fake tensors, and fails where it is computed.
"""

from __future__ import annotations

import re
from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ipufit.emulator._tracing.half import original
from ipufit.emulator._tracing.operation import map_tensors, tensors_in

_MOST_ELEMENTS = 2**22
"""Elements of operands that are computed with: milliseconds, and some MiB."""

_BITWISE = frozenset(
    f"{form}{name}{end}"
    for name in ("and", "or", "xor", "lshift", "rshift")
    for form, end in (("__", "__"), ("__r", "__"), ("__i", "__"), ("bitwise_", ""))
)
_OF_TYPES = re.compile(
    r"dtype|scalar type|not implemented for '|bool tensor|Boolean|floating point"
)


def check_types(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call a function of torch's on zeros, if types of its operands are unusual.

    Args:
        function: The function, which has taken fake tensors.
        args: Its arguments.
        kwargs: Its named arguments.

    Raises:
        RuntimeError: torch refuses such types.

    Example:
        >>> whole, mask = torch.ones(2, 2, dtype=torch.int64), torch.ones(2) > 0
        >>> check_types(torch.matmul, (torch.ones(3, 2), torch.ones(2, 2)), {})
        >>> check_types(torch.matmul, (torch.ones(3, 2), whole), {})
        Traceback (most recent call last):
        RuntimeError: expected m1 and m2 to have the same dtype, but got: float != lo...
        >>> check_types(torch.Tensor.__rsub__, (mask, 1), {})
        Traceback (most recent call last):
        RuntimeError: Subtraction, the `-` operator, with a bool tensor is not suppor...
    """
    plain = original(function)
    operands = list(tensors_in((args, kwargs)))
    is_unusual = getattr(plain, "__name__", "") in _BITWISE or not all(
        tensor.is_floating_point() for tensor in operands
    )
    is_small = sum(tensor.numel() for tensor in operands) <= _MOST_ELEMENTS
    if not (operands and is_unusual and is_small and _is_of_torch(plain)):
        return
    with no_dispatch(), torch.no_grad():  # type: ignore[no-untyped-call,unused-ignore]
        given, named = map_tensors((args, kwargs), _zeros)
        try:
            function(*given, **named)
        except (RuntimeError, NotImplementedError) as error:
            if _OF_TYPES.search(str(error)):
                raise RuntimeError(str(error)) from None
        except Exception:  # noqa: BLE001 - of values, which are others here
            pass


def _is_of_torch(function: Callable[..., Any]) -> bool:
    """Whether a function is torch's, and calls none of the user's."""
    owner = getattr(function, "__objclass__", None)
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package == "torch" or (owner is not None and issubclass(Tensor, owner))


def _zeros(tensor: Tensor) -> Tensor:
    size, strides = tuple(tensor.shape), tensor.stride()
    zeros: Tensor = torch.empty_strided(size, strides, dtype=tensor.dtype).zero_()
    return zeros
