# SPDX-License-Identifier: Apache-2.0
"""The loops: train, predict. Control flow and nothing else."""

from __future__ import annotations

import math
import warnings
from typing import Any, Mapping

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import InferenceBatches, TrainingBatches
from ipufit.errors import NonFiniteLossWarning
from ipufit.metrics import MetricCollection
from ipufit.state import RunState
from ipufit.types import Logs

from .coverage import check_rows, cut
from .evaluation import Evaluation
from .executors import Executors


def train(
    executors: Executors,
    batches: TrainingBatches,
    plan: BatchPlan,
    figures: MetricCollection,
    hooks: CallbackList,
    run: RunState,
    epochs: Mapping[int, bool],
    validation: Evaluation | None,
    display: ProgressDisplay,
) -> None:
    """Train epoch after epoch, and validate.

    An interrupt ends the run in order: the epoch under way is forgotten,
    `on_train_end` hears the figures of the last one that was complete, and the IPUs
    are free. Then it is raised again.

    Args:
        executors: With the training program prepared.
        batches: The calls of an epoch.
        plan: The factors of a call.
        figures: What is reported.
        hooks: Hear of it.
        run: Counts, and says when to stop.
        epochs: The epochs to come, and whether each is validated.
        validation: On what; None if on nothing.
        display: Hears of compilations.
    """
    logs: Logs = {}
    hooks.on_train_begin({})
    try:
        for epoch, is_validated in epochs.items():
            run.epoch = epoch
            hooks.on_epoch_begin(epoch, {})
            trained = train_epoch(executors, batches, plan, figures, hooks, run)
            if validation is not None and is_validated:
                validation.prepare(display)
                trained = _with_validation(trained, validation.run(hooks))
            hooks.on_epoch_end(epoch, dict(trained))
            logs = trained
            if run.is_stopping:
                break
    except KeyboardInterrupt:
        run.stop("interrupted")
        hooks.on_train_end(dict(logs))
        executors.detach()
        raise
    hooks.on_train_end(dict(logs))


def _with_validation(logs: Logs, validation: Logs) -> Logs:
    prefixed = {f"val_{name}": value for name, value in validation.items()}
    return dict(sorted({**logs, **prefixed}.items()))


def train_epoch(
    executors: Executors,
    batches: TrainingBatches,
    plan: BatchPlan,
    figures: MetricCollection,
    hooks: CallbackList,
    run: RunState,
) -> Logs:
    """Train on every call of an epoch.

    Hooks see a call as Keras's see `steps_per_execution` batches: it begins with the
    index of its first update and ends with that of its last.

    Returns:
        The figures of the epoch so far, if it was stopped.
    """
    figures.reset()
    for call, batch in enumerate(batches):
        first = call * plan.device_iterations
        hooks.on_train_batch_begin(first, {})
        figures.add(executors.train(batch))
        run.updates += plan.device_iterations
        run.samples += plan.samples_per_call
        logs = figures.logs()
        _report_non_finite(logs["loss"], run, first)
        hooks.on_train_batch_end(first + plan.device_iterations - 1, logs)
        if run.is_stopping:
            break
    return figures.logs()


def predict(
    executors: Executors,
    batches: InferenceBatches,
    num_inputs: int,
    hooks: CallbackList,
) -> Any:
    """The outputs of every sample, in order.

    Args:
        executors: With the inference program prepared.
        batches: The calls.
        num_inputs: How many tensors of a batch the program takes.
        hooks: Hear of each call.

    Returns:
        Tensors, nested as the module returns them.
    """
    parts: list[list[Any]] = []
    structure = Structure.of(None)
    hooks.on_predict_begin({})
    for call, (batch, num_real) in enumerate(batches):
        hooks.on_predict_batch_begin(call, {})
        outputs = executors.infer(batch[:num_inputs])
        check_rows(outputs, len(batch[0]))
        outputs = cut(outputs, slice(num_real))
        structure = Structure.of(outputs)
        parts.append(structure.flatten(outputs))
        hooks.on_predict_batch_end(call, {"outputs": outputs})
    hooks.on_predict_end({})
    return structure.rebuild(_joined(leaf) for leaf in zip(*parts))


def _joined(parts: tuple[Any, ...]) -> Any:
    """One output of all calls; what is no tensor is the same in each."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]


def _report_non_finite(loss: float, run: RunState, update: int) -> None:
    if not math.isfinite(loss):
        warnings.warn(
            f"The training loss is {loss} in epoch {run.epoch + 1}, at update {update} "
            "or one of its call. The weights are probably lost: lower the learning "
            "rate or look for infinite values in the data.",
            NonFiniteLossWarning,
            stacklevel=5,
        )
