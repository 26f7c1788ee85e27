# SPDX-License-Identifier: Apache-2.0
"""A tensor, an array or a number of the user's as a tensor that IPUs can take."""

from __future__ import annotations

import warnings
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit.errors import DataError

from .ranges import as_number, narrowed

_UNSIGNED = [
    getattr(torch, name)
    for name in ("uint16", "uint32", "uint64")
    if hasattr(torch, name)
]
"""Types of newer versions of torch, which PopTorch doesn't have."""


def as_tensor(value: Any, where: str) -> Tensor:
    """Makes a tensor of a tensor, an array or a number, in a type that IPUs have.

    Args:
        value: A tensor, an array or a number.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is something else, or has a number that is too large.

    Example:
        >>> as_tensor(0.5, "`x`")
        tensor(0.5000)
    """
    tensor = dense_tensor(value, where)
    # PopTorch would convert 64-bit floats at every call.
    return narrowed(tensor, where) if tensor.dtype == torch.float64 else tensor


def dense_tensor(value: Any, where: str) -> Tensor:
    """Makes a tensor of a tensor, an array or a number, in its own type.

    Args:
        value: A tensor, an array or a number.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is something else.

    Example:
        >>> dense_tensor(np.float64(0.5), "`x`")
        tensor(0.5000, dtype=torch.float64)
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = _from_numpy(np.asarray(_unmasked(value, where), order="C"), where)
    elif not isinstance(value, Tensor):
        if value is not None and _ismissing_value(value):
            raise missing_value(f"{where} has {value!r}")
        if not isinstance(value, (bool, int, float)):
            raise DataError(
                f"{where} has a {type(value).__name__}, {value!r}: use tensors, NumPy "
                "arrays or numbers."
            )
        value = as_number(value, where)
    tensor: Tensor = value
    if tensor.dtype in _UNSIGNED:
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, a type that PopTorch doesn't "
            "have. Convert it to int64."
        )
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
        raise DataError(
            f"{where} has a tensor of {tensor.dtype}, {tensor.layout} on "
            f"{tensor.device}, which an IPU can't take: pass a dense tensor of real "
            "numbers."
        )
    return tensor.detach() if tensor.requires_grad else tensor


def _from_numpy(array: Any, where: str) -> Tensor:
    """A tensor in the array's memory, which may be read-only: we only read it."""
    if array.dtype.kind == "O":
        for at, value in np.ndenumerate(array):
            if _ismissing_value(value):
                raise missing_value(f"{where} has {value!r} at {list(at)}")
    try:
        if array.dtype.kind not in "biuf":
            raise TypeError("it holds no numbers")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has an array of {array.dtype}, which torch can't hold ({error}). "
            "Convert it to float32 or int64."
        ) from None


def _unmasked(array: Any, where: str) -> Any:
    """The array, unless NumPy has masked some of it: torch sees no masks."""
    masked: Any = np.ma  # whose functions have no types in old NumPy
    if masked.is_masked(array):
        at = np.argwhere(masked.getmaskarray(array))[0].tolist()
        raise DataError(
            f"{where} has a masked array ({masked.count_masked(array)} of {array.size} "
            f"values, the first at {at}), and a tensor has no mask: what is under it "
            "would be trained on. Fill it with .filled(value), or leave those rows "
            "out; to have them count nothing in the loss give sample_weight 0."
        )
    return array


def _ismissing_value(value: Any) -> bool:
    """Whether a value is None, or pandas' NA or NaT."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def missing_value(what: str) -> DataError:
    """The error that tells of a missing value.

    Args:
        what: The holder of the value, and where it is, to begin a sentence.
    """
    return DataError(
        f"{what}, a missing value, which no tensor can hold. Fill it, as with pandas' "
        "fillna(value), or leave the row out, as with dropna()."
    )


def same_rows(leaves: Sequence[Any], where: str) -> list[Tensor]:
    """Tensors that all have one number of rows; a single number stands for every row.

    Args:
        leaves: Tensors, arrays or numbers.
        where: Name of the data in error messages.

    Raises:
        DataError: There are no arrays, none has rows, or their numbers of rows differ.

    Example:
        >>> same_rows([torch.zeros(2, 3), 0.5], "`x`")[1]
        tensor([0.5000, 0.5000])
    """
    tensors = [as_tensor(leaf, where) for leaf in leaves]
    if not tensors:
        raise DataError(f"{where} holds no arrays.")
    for tensor, leaf in zip(tensors, leaves):
        if not tensor.dim() and not isinstance(leaf, (bool, int, float)):
            raise DataError(
                f"{where} holds an array without axes, {leaf!r}: dim 0 counts samples. "
                "To give samples one by one use an IterableDataset."
            )
    lengths = [len(tensor) for tensor in tensors if tensor.dim()]
    if not lengths:
        raise DataError(f"{where} holds a single number: dim 0 counts samples.")
    if len(set(lengths)) > 1:
        raise DataError(
            f"{where} has arrays of different numbers of samples: "
            f"{short_list(lengths)}. Dim 0 must be the same for all."
        )
    return [t if t.dim() else t.expand(lengths[0]).clone() for t in tensors]


def short_list(numbers: Sequence[int]) -> str:
    """A list for error messages, cut after its first numbers.

    Example:
        >>> short_list([4, 5]), short_list([3] * 32)
        ('[4, 5]', '[3, 3, 3, ... 32 in all]')
    """
    if len(numbers) <= 6:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ... {len(numbers)} in all]"
