# SPDX-License-Identifier: Apache-2.0
"""Arrays, nested or in frames, as samples in memory."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.errors import DataError

from .columns import frame_values, is_frame
from .datasets import ArrayDataset
from .ranges import check_integers
from .source import IndexedSource
from .structure import NOTHING, SampleStructure
from .values import as_tensor, same_rows, short_list

_MOST_ARRAYS = 8
"""Lists of more arrays are probably lists of samples."""


def from_arrays(
    x: Any, y: Any = None, sample_weight: Any = None, *, name: str
) -> IndexedSource:
    """Samples of nested arrays, with dim 0 counting samples.

    Args:
        x: Inputs.
        y: Targets; None if there are none.
        sample_weight: Weights; None if all samples weigh the same.
        name: Name of the inputs in error messages.

    Raises:
        DataError: The arrays are empty, hold no numbers or too large ones, or their
            lengths differ.
    """
    wheres = (f"`{name}`", "`y`", "`sample_weight`")
    values = (x, y, sample_weight)
    given = [unframed(value, where) for value, where in zip(values, wheres)]
    structure = SampleStructure.of(given)
    for value, where, part in zip(given, wheres, structure.parts):
        if part == NOTHING and value is None:
            continue
        if not part.num_leaves:
            raise DataError(f"{where} holds no arrays: it is {str(value)[:80]}.")
        if any(isinstance(n, (bool, int, float)) for n in part.flatten(value)):
            raise DataError(
                f"{where} holds a single number where an array belongs: dim 0 counts "
                "samples. Make a list of numbers an array, as with torch.tensor."
            )
    leaves = [as_tensor(leaf, f"`{name}`") for leaf in structure.flatten(given)]
    _check_lengths(structure, leaves, name)
    tensors = same_rows(leaves, f"`{name}`")
    if not len(tensors[0]):
        raise DataError(f"`{name}` has no samples.")
    return in_memory(tensors, structure, name)


def in_memory(
    tensors: list[Tensor],
    structure: SampleStructure,
    name: str,
    rows: Tensor | None = None,
) -> IndexedSource:
    """Samples of the leaves of a structure, `[num_samples, ...]`.

    Args:
        tensors: The leaves.
        structure: How samples nest.
        name: Name of the data in error messages.
        rows: Rows of the tensors that are samples; None if all are.

    Raises:
        DataError: An integer needs more than 32 bits.
    """
    checked = tensors
    if rows is not None:  # only integers are looked at
        checked = [t[rows if t.dtype == torch.int64 else rows[:0]] for t in tensors]
    check_integers(checked, structure, name)
    dataset = ArrayDataset(tensors, rows)
    return IndexedSource(dataset, structure, len(dataset), name)


def unframed(value: Any, where: str) -> Any:
    """Nested arrays, with an array in the place of every frame.

    Args:
        value: Nested arrays and frames.
        where: Name of the value in error messages.
    """
    if is_frame(value):
        return frame_values(value, where)
    if isinstance(value, Mapping):
        return {key: unframed(element, where) for key, element in value.items()}
    if type(value) in (tuple, list):
        return type(value)(unframed(element, where) for element in value)
    return value


def _check_lengths(
    structure: SampleStructure, leaves: Sequence[Tensor], name: str
) -> None:
    lengths = [len(leaf) for leaf in leaves if leaf.dim()]
    if len(set(lengths)) <= 1:
        return
    num_inputs, num_targets = structure.num_inputs, structure.targets.num_leaves
    parts = {
        "inputs": lengths[:num_inputs],
        "targets": lengths[num_inputs : num_inputs + num_targets],
        "weights": lengths[num_inputs + num_targets :],
    }
    advice = ""
    if any(p.kind is list and p.num_leaves > _MOST_ARRAYS for p in structure.parts):
        advice = (
            " A list has one array for each input or target; make rows of samples "
            "one array, as with numpy.stack or torch.stack."
        )
    counts = [f"{n} {short_list(some)}" for n, some in parts.items() if some]
    raise DataError(
        f"The arrays of `{name}` have different numbers of samples: "
        f"{', '.join(counts)}. Dim 0 must be the same for all.{advice}"
    )
