# SPDX-License-Identifier: Apache-2.0
"""Whatever holds the user's samples becomes one kind of dataset.

Its items are flat tuples of tensors, inputs first, then targets: what PopTorch's
loaders can carry. `Source` remembers how they nested.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Sequence, Sized, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ipufit._tree import Structure
from ipufit.errors import DataError

NOTHING = Structure(tuple)
"""The structure of targets that aren't there."""


class StackedRows(tuple):  # type: ignore[type-arg]
    """Rows gathered by index already, which needn't be collated."""

    __slots__ = ()


@dataclass(frozen=True)
class Source:
    """Samples, and how their tensors nest.

    Attributes:
        dataset: Map-style; items are flat tuples, inputs first, then targets.
        inputs: How the inputs nest.
        targets: How the targets nest; no leaves if there are none.
        num_samples: How many there are.
    """

    dataset: Dataset[Any]
    inputs: Structure
    targets: Structure
    num_samples: int

    @property
    def has_targets(self) -> bool:
        """Whether samples come with targets."""
        return self.targets.num_leaves > 0

    def require_targets(self, name: str, purpose: str) -> None:
        """Refuse samples without targets.

        Raises:
            DataError: There are none.
        """
        if not self.has_targets:
            raise DataError(
                f"`{name}` has no targets to {purpose} with: pass y, or a dataset of "
                "pairs (input, target)."
            )

    def example(self, rows: int, *, has_targets: bool = True) -> list[Tensor]:
        """The first sample, repeated: what a batch of `rows` looks like."""
        sample = self.dataset[0]
        leaves = sample if has_targets else sample[: self.inputs.num_leaves]
        return [torch.stack([leaf] * rows) for leaf in leaves]


def as_source(x: Any, y: Any = None, *, name: str = "x") -> Source:
    """Take a dataset, or arrays of inputs and targets.

    Args:
        x: A map-style `Dataset` of samples `input` or `(input, target)`; or tensors
            or NumPy arrays, nested in tuples, lists or dicts, with samples in dim 0.
        y: The targets, if `x` is arrays.
        name: What messages call the data.

    Returns:
        The samples.

    Raises:
        DataError: Of a kind that can't be used, empty, or of unequal lengths.

    Example:
        >>> source = as_source(torch.zeros(5, 2), torch.zeros(5))
        >>> source.num_samples, source.has_targets
        (5, True)
    """
    if type(x) is TensorDataset and len(x.tensors) <= 2:  # a subclass may do more
        _refuse_targets(x, y, name)
        return _from_arrays(*x.tensors, name=name)
    if isinstance(x, IterableDataset) or not _is_dataset_or_arrays(x):
        raise DataError(
            f"`{name}` is {_describe(x)}. Pass tensors, NumPy arrays, or a map-style "
            "torch Dataset (with __getitem__ and __len__)."
        )
    if isinstance(x, Dataset):
        _refuse_targets(x, y, name)
        return _from_dataset(x, name)
    return _from_arrays(x, y, name=name)


def fit_sources(
    x: Any, y: Any, validation_split: float, validation_data: Any
) -> tuple[Source, Source | None]:
    """What `fit` trains on, and what it validates on if anything.

    Args:
        x: As for `as_source`.
        y: As for `as_source`.
        validation_split: As for `split_validation`; 0 for none.
        validation_data: A dataset or a pair (x, y), which goes before the split.

    Returns:
        Both.

    Raises:
        DataError: As `as_source` and `split_validation` do, or there are no targets.

    Example:
        >>> x, y = torch.zeros(4, 1), torch.zeros(4)
        >>> train, validation = fit_sources(x, y, 0.5, None)
        >>> train.num_samples, validation.num_samples
        (2, 2)
    """
    validation = None
    if validation_split and validation_data is None:
        source, validation = split_validation(x, y, validation_split)
    else:
        source = as_source(x, y)
    source.require_targets("x", "train")
    if validation_data is not None:
        pair = validation_data
        if not isinstance(pair, (tuple, list)):
            pair = (validation_data,)
        elif len(pair) != 2:
            raise DataError(
                f"`validation_data` has {len(pair)} parts: pass a dataset, or a pair "
                "(x, y)."
            )
        validation = as_source(*pair, name="validation_data")
    if validation is not None:
        validation.require_targets("validation_data", "validate")
    return source, validation


def split_validation(x: Any, y: Any, fraction: float) -> tuple[Source, Source]:
    """Put the last samples aside, before any shuffling, as Keras does.

    Args:
        x: Arrays of inputs.
        y: Arrays of targets.
        fraction: Of the samples that validate; between 0 and 1.

    Returns:
        Training and validation samples: `floor(n * (1 - fraction))`, and the rest.

    Raises:
        DataError: Not arrays, or one part would be empty.

    Example:
        >>> x, y = torch.zeros(10, 1), torch.zeros(10)
        >>> [part.num_samples for part in split_validation(x, y, 0.3)]
        [7, 3]
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise DataError(f"validation_split={fraction!r} is not a number.")
    whole = as_source(x, y)
    if not isinstance(whole.dataset, ArrayDataset):
        raise DataError(
            f"validation_split={fraction} needs arrays, and `x` is {_describe(x)}. "
            "Split it with torch.utils.data.random_split and pass validation_data."
        )
    at = int(whole.num_samples * (1.0 - fraction)) if 0 < fraction < 1 else 0
    if not at:
        raise DataError(
            f"validation_split={fraction} of {whole.num_samples} samples leaves {at} "
            "for training: use a fraction between 0 and 1 that leaves some to each."
        )
    tensors = whole.dataset.tensors
    parts = ([t[:at] for t in tensors], [t[at:] for t in tensors])
    train, validation = (
        Source(ArrayDataset(part), whole.inputs, whole.targets, len(part[0]))
        for part in parts
    )
    return train, validation


class ArrayDataset(Dataset):  # type: ignore[type-arg]
    """Samples in memory, gathered by index instead of one by one.

    Args:
        tensors: Of equal lengths.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample."""
        return tuple(tensor[index] for tensor in self.tensors)

    def __getitems__(self, indices: list[int]) -> StackedRows:
        """A batch of samples at once: torch's loaders ask for it if it's there."""
        rows = torch.as_tensor(indices)
        return StackedRows(tensor[rows] for tensor in self.tensors)


class FlatDataset(Dataset):  # type: ignore[type-arg]
    """The user's dataset with its samples flattened.

    Args:
        dataset: The user's.
        sample: How a sample nests.
    """

    def __init__(self, dataset: Dataset[Any], sample: Structure) -> None:
        self._dataset = dataset
        self._sample = sample

    def __len__(self) -> int:
        """The number of samples."""
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample; numbers become tensors."""
        sample = self._dataset[int(index)]
        try:
            leaves = self._sample.flatten(sample)
        except TypeError as error:
            raise DataError(
                f"Sample {int(index)} of the dataset nests differently from sample 0: "
                f"{error}."
            ) from None
        return tuple(_as_tensor(leaf, f"sample {int(index)}") for leaf in leaves)


def _from_arrays(x: Any, y: Any = None, *, name: str) -> Source:
    inputs = Structure.of(x)
    targets = NOTHING if y is None else Structure.of(y)
    leaves = inputs.flatten(x) + (targets.flatten(y) if y is not None else [])
    tensors = [_as_tensor(leaf, f"`{name}`") for leaf in leaves]
    if not tensors:
        raise DataError(f"`{name}` holds no arrays.")
    for tensor in tensors:
        if tensor.dim() == 0:
            raise DataError(f"`{name}` holds a single number: dim 0 counts samples.")
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise DataError(
            f"The arrays of `{name}` have different numbers of samples: inputs "
            f"{lengths[: inputs.num_leaves]}, targets {lengths[inputs.num_leaves :]}. "
            "Dim 0 must be the same for all."
        )
    if not lengths[0]:
        raise DataError(f"`{name}` has no samples.")
    return Source(ArrayDataset(tensors), inputs, targets, lengths[0])


def _from_dataset(dataset: Dataset[Any], name: str) -> Source:
    num_samples = len(cast(Sized, dataset))
    if not num_samples:
        raise DataError(f"`{name}` has no samples.")
    sample = dataset[0]
    has_targets = isinstance(sample, (tuple, list)) and len(sample) == 2
    if isinstance(sample, (tuple, list)) and not has_targets:
        raise DataError(
            f"Samples of `{name}` have {len(sample)} parts; they must be an input, or "
            "a pair (input, target) whose parts may nest."
        )
    structure = Structure.of(sample)
    inputs, targets = structure.children if has_targets else (structure, NOTHING)
    flat = FlatDataset(dataset, structure)
    flat[0]  # bad samples are refused here, not in the middle of a run
    return Source(flat, inputs, targets, num_samples)


def _as_tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, (np.ndarray, np.generic)):
        value = _from_numpy(np.asarray(value, order="C"), where)
    elif not isinstance(value, Tensor):
        if not isinstance(value, (bool, int, float)):
            raise DataError(
                f"{where} has a {type(value).__name__}, {value!r}: use tensors, NumPy "
                "arrays or numbers."
            )
        value = torch.as_tensor(value)
    if value.requires_grad:
        value = value.detach()
    # An IPU has no 64-bit floats; PopTorch would convert them at every call.
    wide = value.dtype == torch.float64
    return torch.as_tensor(value, dtype=torch.float32 if wide else None)


def _from_numpy(array: Any, where: str) -> Tensor:
    """The same memory as a tensor; read-only memory too, because we only read it."""
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


def _is_dataset_or_arrays(x: Any) -> bool:
    if isinstance(x, Dataset):
        return hasattr(x, "__len__") and hasattr(x, "__getitem__")
    return isinstance(x, (Tensor, np.ndarray)) or (
        isinstance(x, (tuple, list, dict)) and len(x) > 0
    )


def _refuse_targets(x: Any, y: Any, name: str) -> None:
    if y is not None:
        raise DataError(
            f"`y` was given beside {_describe(x)}, whose samples contain the targets. "
            "Pass one of the two."
        )


def _describe(x: Any) -> str:
    return f"a {type(x).__module__}.{type(x).__qualname__}".replace("builtins.", "")
