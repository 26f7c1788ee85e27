# SPDX-License-Identifier: Apache-2.0
"""The structure of samples, and the conversion of their leaves to tensors."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit._tree import ConstantChangedError, Structure
from ipufit.errors import DataError

NOTHING = Structure(tuple)
"""The structure of targets or weights that samples don't have."""


class Labels(NamedTuple):
    """The part of a batch that outputs are compared with.

    Attributes:
        targets: Nested tensors; `()` if the samples have no targets.
        weights: Sample weights: one tensor, or nested as the outputs. None without
            weights.
        share: Weight of each row in the loss of its update, `[rows]`. Padding has 0 and
            the other rows more than 1, so that the loss is the mean over unpadded rows.
            None without padding.
    """

    targets: Any = ()
    weights: Any = None
    share: Tensor | None = None


@dataclass(frozen=True)
class SampleStructure:
    """The structure of the inputs, targets and weights of a sample or a batch.

    Attributes:
        inputs: Structure of the inputs.
        targets: Structure of the targets; without leaves if there are none.
        weights: Structure of the sample weights; without leaves if there are none.
        is_padded: Whether a batch has a tensor with the share of each row after these.
        is_mixed: Whether a batch ends with the tensor of `ipufit.mixing.Coefficients`.

    Example:
        >>> structure = SampleStructure(Structure.of({"a": 0}), Structure.of(0))
        >>> structure.split([1, 2])
        ({'a': 1}, Labels(targets=2, weights=None, share=None))
    """

    inputs: Structure
    targets: Structure = NOTHING
    weights: Structure = NOTHING
    is_padded: bool = False
    is_mixed: bool = False

    @classmethod
    def of(cls, parts: Sequence[Any]) -> SampleStructure:
        """Return the structure of `(inputs,)` or `(inputs, targets[, weights])`."""
        given = [NOTHING if part is None else Structure.of(part) for part in parts]
        inputs, targets, weights = [*given, NOTHING, NOTHING][:3]
        return cls(inputs, targets, weights)

    @property
    def num_inputs(self) -> int:
        """Number of tensors that are inputs; they come first in a batch."""
        return self.inputs.num_leaves

    @property
    def has_targets(self) -> bool:
        """Whether samples have targets."""
        return self.targets.num_leaves > 0

    @property
    def has_weights(self) -> bool:
        """Whether samples have weights."""
        return self.weights.num_leaves > 0

    @property
    def parts(self) -> tuple[Structure, Structure, Structure]:
        """Structures of the inputs, the targets and the weights."""
        return self.inputs, self.targets, self.weights

    def split(self, tensors: Sequence[Any]) -> tuple[Any, Labels]:
        """Split the tensors of a batch into nested inputs and labels."""
        return self.inputs.rebuild(tensors[: self.num_inputs]), self.labels(tensors)

    @property
    def num_given(self) -> int:
        """Number of tensors of a sample: inputs, targets and weights."""
        return sum(part.num_leaves for part in self.parts)

    def batch(self, inputs: Any, tensors: Sequence[Any]) -> Any:
        """Nest a batch as the data does: inputs, or `(inputs, targets[, weights])`.

        Args:
            inputs: Nested inputs.
            tensors: Tensors of the batch; those of the inputs are passed over.

        Example:
            >>> SampleStructure.of((0, (1, 2))).batch("x", [0, 1, 2])
            ('x', (1, 2))
        """
        if not self.has_targets and not self.has_weights:
            return inputs
        labels = self.labels(tensors)
        parts = (inputs, labels.targets)
        return (*parts, labels.weights) if self.has_weights else parts

    def labels(self, tensors: Sequence[Any]) -> Labels:
        """Take nested targets, weights and shares from the tensors of a batch."""
        rest = iter(tensors[self.num_inputs :])
        targets = self.targets.rebuild(rest)
        weights = self.weights.rebuild(rest) if self.has_weights else None
        return Labels(targets, weights, next(rest) if self.is_padded else None)

    def mixing(self, tensors: Sequence[Any]) -> Any:
        """Return the mixing coefficients of a batch; None without any."""
        return tensors[-1] if self.is_mixed else None

    def flatten(self, parts: Sequence[Any]) -> list[Any]:
        """Flatten `(inputs, targets, weights)`; missing ones may be left out.

        Raises:
            TypeError: The parts nest differently from this structure.
            ConstantChangedError: A constant, such as a string, has another value.
        """
        names = ("inputs", "targets", "sample weights")
        given = [*parts, None, None]
        leaves: list[Any] = []
        for name, structure, part in zip(names, self.parts, given):
            if part is None and structure == NOTHING:
                continue
            if part is None:
                raise TypeError(f"it has no {name}")
            leaves.extend(structure.flatten(part, name))
        return leaves

    def flatten_like(self, first: str, parts: Sequence[Any], where: str) -> list[Any]:
        """Flatten a sample or batch that must nest as the first one does.

        Args:
            first: Name of the first in error messages, such as "sample 0".
            parts: `(inputs, targets, weights)`.
            where: Name of these parts in error messages.

        Raises:
            DataError: They nest differently, or have another constant.
        """
        try:
            return self.flatten(parts)
        except ConstantChangedError as error:
            raise DataError(
                f"{where} has another constant than {first}: {error}. A compiled "
                "model has it baked in. Pass numbers, which become tensors, or leave "
                "it out."
            ) from None
        except TypeError as error:
            raise DataError(
                f"{where} nests differently from {first}: {error}."
            ) from None


_LEAST, _MOST = -(2**31), 2**31 - 1
_LARGEST = torch.finfo(torch.float32).max


def as_tensor(value: Any, where: str) -> Tensor:
    """Convert a tensor, an array or a number to a tensor of an IPU's type.

    Args:
        value: A tensor, an array or a number.
        where: Name of the value in error messages.

    Raises:
        DataError: The value is something else, or has a number that is too large.

    Example:
        >>> as_tensor(0.5, "`x`")
        tensor(0.5000)
    """
    return narrow(checked_tensor(value, where))


def narrow(tensor: Tensor) -> Tensor:
    """Convert float64 to float32; other tensors are returned themselves."""
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def checked_tensor(value: Any, where: str) -> Tensor:
    """Convert a value as `as_tensor` does, but leave float64 as it is.

    Raises:
        DataError: As in `as_tensor`.
    """
    tensor = dense_tensor(value, where)
    if tensor.dtype != torch.float64:
        return tensor
    in_32_bits = torch.as_tensor(tensor, dtype=torch.float32)
    is_infinite = torch.isinf(in_32_bits)
    if is_infinite.any():
        at = is_infinite.logical_and(torch.isfinite(tensor)).nonzero()
        if len(at):
            index = at[0].tolist()
            raise _too_large(float(tensor[tuple(index)]), where, f" at {index}")
    return tensor


def _too_large(value: float, where: str, at: str = "") -> DataError:
    return DataError(
        f"{where} has {value}{at}: an IPU has floats of 32 bits, up to {_LARGEST:.6g}, "
        "and that is infinite in them. Scale the values."
    )


def dense_tensor(value: Any, where: str) -> Tensor:
    """Convert a tensor, an array or a number to a tensor of its own type.

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
        value = _from_numpy(np.asanyarray(value), where)
    elif not isinstance(value, Tensor):
        if value is not None and _is_missing(value):
            raise missing_value(f"{where} has {value!r}")
        if not isinstance(value, (bool, int, float)):
            raise DataError(
                f"{where} has a {type(value).__name__}, {value!r}: use tensors, NumPy "
                "arrays or numbers."
            )
        if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
            raise _too_large(value, where)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise DataError(
                f"{where} has {value}: an IPU has integers of 32 bits, from {_LEAST} "
                f"to {_MOST}."
            )
        value = torch.as_tensor(value)
    tensor: Tensor = value
    if str(tensor.dtype) in ("torch.uint16", "torch.uint32", "torch.uint64"):
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
    """Return a tensor in the array's memory, which is only read."""
    masked: Any = np.ma  # whose functions have no types in old NumPy
    if masked.is_masked(array):
        at = np.argwhere(masked.getmaskarray(array))[0].tolist()
        raise DataError(
            f"{where} has a masked array ({masked.count_masked(array)} of {array.size} "
            f"values, the first at {at}), and a tensor has no mask: what is under it "
            "would be trained on. Fill it with .filled(value), or leave those rows "
            "out; to have them count nothing in the loss give sample_weight 0."
        )
    if array.dtype.kind == "O":
        for index, value in np.ndenumerate(array):
            if _is_missing(value):
                raise missing_value(f"{where} has {value!r} at {list(index)}")
    try:
        if array.dtype.kind not in "biuf":
            raise TypeError("it holds no numbers")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            return torch.from_numpy(np.asarray(array, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where} has an array of {array.dtype}, which torch can't hold ({error}). "
            "Convert it to float32 or int64; names of classes to their numbers, as "
            "with numpy.unique(names, return_inverse=True)."
        ) from None


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, or pandas' NA or NaT."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def missing_value(what: str) -> DataError:
    """Build the error for a missing value.

    Args:
        what: The holder of the value, and where it is, to begin a sentence.
    """
    return DataError(
        f"{what}, a missing value, which no tensor can hold. Fill it, as with pandas' "
        "fillna(value), or leave the row out, as with dropna()."
    )


def same_rows(leaves: Sequence[Any], where: str) -> list[Tensor]:
    """Convert leaves to tensors of one number of rows; a number stands for every row.

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
    """Format a list for error messages, cut after its first numbers.

    Example:
        >>> short_list([4, 5]), short_list([3] * 32)
        ('[4, 5]', '[3, 3, 3, ... 32 in all]')
    """
    if len(numbers) <= 6:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:3]))}, ... {len(numbers)} in all]"


def check_integers(
    batch: Sequence[Tensor],
    structure: SampleStructure,
    name: str,
    sample_of: Callable[[int], int] = int,
) -> None:
    """Refuse rows with an integer that 32 bits can't hold.

    Args:
        batch: The leaves of the structure; tensors that follow them have no integers.
        structure: Structure of a sample.
        name: Name of the data in error messages.
        sample_of: Returns the index of the sample in a row of the batch.

    Raises:
        DataError: An integer is too large or too small.

    Example:
        >>> check_integers([torch.tensor([3, 2**32])], SampleStructure.of([0]), "x")
        Traceback (most recent call last):
        ipufit.errors.DataError: Sample 1 of `x` has 4294967296 in its inputs: an IPU...
    """
    for number, tensor in enumerate(batch):
        if tensor.dtype != torch.int64 or not tensor.numel():
            continue
        least, most = torch.aminmax(tensor)
        if least.item() >= _LEAST and most.item() <= _MOST:
            continue
        is_wrong = tensor.lt(_LEAST).logical_or(tensor.gt(_MOST))
        at = tuple(is_wrong.nonzero()[0].tolist())
        parts = zip(structure.parts, ("inputs", "targets", "sample weights"))
        names = [path for part, name in parts for path in part.paths(name)]
        as_cut = int(tensor[at].to(torch.int32))
        raise DataError(
            f"Sample {sample_of(at[0])} of `{name}` has {int(tensor[at])} in its "
            f"{names[number]}: an IPU has integers of 32 bits, from "
            f"{_LEAST} to {_MOST}, and would take {as_cut} for it. Subtract an offset, "
            "number the values from 0, or pass them as float32 if they are quantities."
        )


Columns = Sequence[str]


def is_frame(value: Any) -> bool:
    """Check whether a value is a frame or series of pandas, or alike.

    Example:
        >>> is_frame(np.zeros(3))
        False
    """
    return hasattr(value, "to_numpy") and hasattr(value, "iloc")


def frame_values(frame: Any, where: str) -> Any:
    """Convert a frame to an array `[rows, columns]`, or a series to `[rows]`.

    Raises:
        DataError: A column holds no numbers, or has missing values.
    """
    names = getattr(frame, "columns", None)
    columns = {None: frame} if names is None else {name: frame[name] for name in names}
    for name, column in columns.items():
        _refuse_missing(
            column, where, "" if name is None else f" in its column {name!r}"
        )
    array = frame.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    if names is None:
        raise DataError(
            f"{where} is a series of {array.dtype}, which holds no numbers. Encode it "
            "as numbers."
        )
    kinds = {
        str(name): column.to_numpy().dtype.kind for name, column in columns.items()
    }
    bad = [name for name, kind in kinds.items() if kind not in "biuf"]
    if bad:
        raise DataError(
            f"{where} has columns that hold no numbers: {', '.join(bad)}. Encode them "
            "as numbers, or leave them out."
        )
    return array.astype(np.float64)  # numbers and booleans together


def _refuse_missing(column: Any, where: str, of: str) -> None:
    """Refuse pandas' NA, which an array would hold as NaN or an object."""
    # NumPy's other types have no NA: a missing number is NaN, which is a number.
    may_lack = hasattr(column.dtype, "na_value") or column.dtype == object
    if not may_lack or not column.isna().any():
        return
    if np.asarray(column.dropna().tolist()).dtype.kind in "biuf":
        row = int(column.isna().to_numpy().argmax())
        raise missing_value(f"{where} has NA{of} in row {row}")


def column_names(y: Any) -> Columns | None:
    """Return the columns that `y` names as targets; None if it is data.

    Example:
        >>> column_names("price"), column_names(["a", "b"]), column_names([1.0])
        (['price'], ['a', 'b'], None)
    """
    if isinstance(y, str):
        return [y]
    if isinstance(y, (list, tuple)) and y and all(isinstance(n, str) for n in y):
        return list(y)
    return None


def split_columns(
    row: Any, names: Columns, is_single: bool, where: str
) -> tuple[Any, Any]:
    """Split a value with named columns into inputs and targets.

    Args:
        row: A mapping, or a frame.
        names: Names of the target columns.
        is_single: Whether the target is the one column itself, not a dict of it.
        where: Name of the row in error messages.

    Raises:
        DataError: A column is missing, or none is left for the inputs.

    Example:
        >>> split_columns({"a": 1, "b": 2}, ["b"], True, "`x`")
        ({'a': 1}, 2)
    """
    if not hasattr(row, "keys") or not hasattr(row, "__getitem__"):
        raise DataError(
            f"y={list(names)} names columns, and {where} has none: it is a "
            f"{type(row).__name__}. Pass rows as dicts, or the targets themselves."
        )
    missing = [name for name in names if name not in row]
    if missing:
        known = ", ".join(map(str, row.keys()))
        raise DataError(f"{where} has no column {missing[0]!r}. It has: {known}.")
    if is_frame(row):
        inputs = without_columns(row, names)
    else:
        inputs = {key: row[key] for key in row if key not in names}
    if not len(inputs.keys()):
        raise DataError(
            f"y={list(names)} names all columns of {where}: none is left for inputs."
        )
    return inputs, row[names[0]] if is_single else {name: row[name] for name in names}


def without_columns(value: Any, names: Columns) -> Any:
    """Leave columns out of a dict or a frame; return anything else unchanged.

    Args:
        value: A sample, or something that holds many samples.
        names: Columns to leave out, if they exist.

    Example:
        >>> without_columns({"a": 1, "label": 2}, ["label", "weight"])
        {'a': 1}
    """
    if not names:
        return value
    if isinstance(value, Mapping):
        return {key: value[key] for key in value if key not in names}
    if is_frame(value) and hasattr(value, "columns"):
        return value[[name for name in value.columns if name not in names]]
    return value
