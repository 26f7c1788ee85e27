# SPDX-License-Identifier: Apache-2.0
"""Which rows of a call come back under an output mode.

`Final` and `EveryN` return some micro-batches only; targets are cut to those rows,
and whatever is reported says how many it covers (PopTorch user guide, "Efficient data
batching").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit._tree import tree_map
from ipufit.batching import BatchPlan


def returned_rows(options: poptorch.Options, plan: BatchPlan) -> Tensor | None:
    """The rows of a call whose results come back, in the order of the results.

    Args:
        options: Of the program.
        plan: Its factors; dim 0 of a call is laid out `[D, G, R, B]`.

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


def cut(values: Any, rows: Any) -> Any:
    """The `rows` of nested tensors: a slice, a mask or indices.

    Example:
        >>> cut({"a": torch.arange(4)}, slice(2))
        {'a': tensor([0, 1])}
    """
    return tree_map(lambda tensor: tensor[rows], values)
