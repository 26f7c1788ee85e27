# SPDX-License-Identifier: Apache-2.0
"""The rows of a call that come back under an output mode.

`Final` and `EveryN` return some micro-batches only; targets are cut to those rows,
and every report says how many rows it covers (PopTorch user guide, "Efficient data
batching").
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import Structure, tree_map
from ipufit.batching import BatchPlan
from ipufit.errors import UnsupportedError


def returned_rows(options: poptorch.Options, plan: BatchPlan) -> Tensor | None:
    """The rows of a call whose results come back, in the order of the results.

    Args:
        options: Options of the program.
        plan: Factors of the call, whose dim 0 is laid out `[D, G, R, B]`.

    Returns:
        Indices into dim 0, or None for all rows in order.

    Example:
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.Final)
        >>> returned_rows(options, BatchPlan(2, device_iterations=3))
        tensor([4, 5])
    """
    mode = poptorch.OutputMode(options.output_mode)
    if mode in (poptorch.OutputMode.All, poptorch.OutputMode.Sum):
        return None
    steps = plan.device_iterations * plan.gradient_accumulation
    period = (
        steps if mode == poptorch.OutputMode.Final else options.output_return_period
    )
    per_step = plan.replicas * plan.micro_batch_size
    rows = torch.arange(plan.samples_per_call).reshape(steps, per_step)
    return torch.flatten(rows[period - 1 :: period])


def describe_coverage(options: poptorch.Options, plan: BatchPlan) -> str:
    """Which samples of each call figures are about; empty if about all.

    Example:
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.Final)
        >>> describe_coverage(options, BatchPlan(2, device_iterations=3))
        'OutputMode.Final: 2 of every 6 samples'
    """
    rows = returned_rows(options, plan)
    if rows is None or len(rows) == plan.samples_per_call:
        return ""
    name = poptorch.OutputMode(options.output_mode).name
    return f"OutputMode.{name}: {len(rows)} of every {plan.samples_per_call} samples"


def check_rows(outputs: Any, num_rows: int) -> None:
    """Refuse outputs that don't have one row per sample.

    A value per micro-batch can't be told apart from rows, cut or joined.

    Raises:
        UnsupportedError: An output is a scalar or has another number of rows.

    Example:
        >>> check_rows((torch.zeros(4, 3), None), num_rows=4)
    """
    for leaf in Structure.of_outputs(outputs).flatten(outputs):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != num_rows):
            raise UnsupportedError(
                f"The module returned a tensor of shape {tuple(leaf.shape)} for "
                f"{num_rows} samples. Outside training every output needs one row per "
                "sample: return batched tensors only, or leave this one out in eval "
                "mode."
            )


def cut(values: Any, rows: Any) -> Any:
    """The `rows` of nested tensors: a slice, a mask or indices.

    Example:
        >>> cut({"a": torch.arange(4), "b": None}, slice(2))
        {'a': tensor([0, 1]), 'b': None}
    """
    return tree_map(lambda x: x[rows] if isinstance(x, Tensor) else x, values)


def in_passes(values: Any, rows_per_pass: int) -> list[Any]:
    """Nested tensors cut into those of passes, of which the last may have fewer rows.

    Example:
        >>> in_passes({"a": torch.arange(3)}, rows_per_pass=2)
        [{'a': tensor([0, 1])}, {'a': tensor([2])}]
    """
    leaves = Structure.of_outputs(values).flatten(values)
    count = max((len(leaf) for leaf in leaves if isinstance(leaf, Tensor)), default=1)
    firsts = range(0, max(count, 1), rows_per_pass)
    return [cut(values, slice(first, first + rows_per_pass)) for first in firsts]


def joined(parts: Iterable[Any]) -> Any:
    """The rows of all parts in one: tensors, nested as in each of them.

    Example:
        >>> joined([(torch.zeros(2), None), (torch.ones(1), None)])
        (tensor([0., 0., 1.]), None)
    """
    structure = Structure.of_outputs(None)
    leaves: list[list[Any]] = []
    for part in parts:
        structure = Structure.of_outputs(part)
        leaves.append(structure.flatten(part))
    return structure.rebuild(_joined(leaf) for leaf in zip(*leaves))


def _joined(parts: tuple[Any, ...]) -> Any:
    """One leaf of all parts; what is no tensor is the same in each."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(parts)
