# SPDX-License-Identifier: Apache-2.0
"""The memory that figures of training take, found by a call for one sample."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit.data import SampleStructure
from ipufit.engine.objective.objective import AnyMetric, Objective
from ipufit.engine.objective.outputs import split_own_loss
from ipufit.engine.objective.steps import StepResult
from ipufit.metrics import Metric

from .output_bytes import called, first_of_zeros, of_zeros, quiet

_BYTES_OF_SUM = 4 + 8
"""Bytes of a sum on the host: float32 as it comes back, and float64 added up."""


def figure_bytes(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    example: Sequence[Tensor],
) -> int:
    """Bytes on the host for the sums of metrics of one micro-batch, if they are many.

    A training program returns these sums for each micro-batch, and the host keeps what
    they come to after each. A metric may have many of them: a matrix of all pairs of
    classes has a million for a thousand classes. Only the metric knows, so it computes
    those of one sample, from what a copy of the module gives for zeros.

    Args:
        module: The user's module.
        objective: Losses and metrics.
        structure: Nesting of a batch.
        example: Tensors of a batch, of which only shapes and types count.

    Returns:
        0 if all metrics are means, which have two sums, or streamed. The module isn't
        called then. 0, too, if the module can't be copied, or not be called so.

    Example:
        >>> from ipufit.data import as_source
        >>> from ipufit.engine import resolve_objective
        >>> module = torch.nn.Linear(3, 5)
        >>> source = as_source(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64))
        >>> for metric in ("accuracy", "f1"):
        ...     objective = resolve_objective("cross_entropy", metrics=[metric])
        ...     example = source.example(4)
        ...     print(figure_bytes(module, objective, source.structure, example))
        0
        240
    """
    if not any(_may_be_large(measure.metric) for measure in objective.measures):
        return 0
    try:
        with quiet():
            given = first_of_zeros(example)
            result = called(of_zeros(module), objective.evaluated, structure, given)
            outputs = _outputs(result, owns_loss=objective.owns_loss)
            labels = structure.labels(given)
            count: int = sum(
                measure.metric.sums(part.output, part.target, weights).numel()
                for _, measure, part, weights in objective.measured(outputs, labels)
                if isinstance(measure.metric, Metric)
            )
    except Exception:  # noqa: BLE001 - a user's code may raise anything
        return 0
    return _BYTES_OF_SUM * count


def _may_be_large(metric: AnyMetric) -> bool:
    """Whether a figure is another than the quotient of two sums."""
    return isinstance(metric, Metric) and type(metric).result is not Metric.result


def _outputs(result: Any, *, owns_loss: bool) -> Any:
    """The outputs among what came back."""
    if isinstance(result, StepResult):
        return result.outputs
    return split_own_loss(result)[1] if owns_loss else result
