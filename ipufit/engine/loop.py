# SPDX-License-Identifier: Apache-2.0
"""The loops that train and predict: control flow and nothing else."""

from __future__ import annotations

import math
import warnings
from typing import Any, Iterable, Iterator, Tuple

from ipufit._spans import awaited
from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import Epochs, InferenceBatches
from ipufit.errors import (
    ConfigError,
    DataError,
    DataRanOutWarning,
    NonFiniteLossWarning,
)
from ipufit.state import RunState

from .agreement import Agreement
from .coverage import check_rows, cut
from .evaluation import Evaluation
from .interruption import ended_in_order, until_stopped
from .programs.executors import Executors
from .training import Training
from .validations import Validations

EpochToGo = Tuple[int, bool]
"""The number of an epoch, from 0, and whether it is validated."""


def train(
    training: Training,
    epochs: Iterable[EpochToGo],
    calls: Epochs,
    validation: Evaluation | None,
    hooks: CallbackList,
    run: RunState,
    display: ProgressDisplay,
    validation_calls: int | None = None,
) -> None:
    """Train epoch after epoch, and validate, with hooks in Keras's order.

    Hooks see a call as Keras's see `steps_per_execution` batches: it begins with the
    index of its first update and ends with that of its last. If only displays listen,
    figures are computed when they are to be shown.

    Args:
        training: With its program prepared.
        epochs: The epochs to go.
        calls: The calls of the next epoch, each time it is gone through.
        validation: None for no validation.
        hooks: Callbacks of the run.
        run: State of the run.
        display: Hears of compilations.
        validation_calls: Calls of an epoch from one validation to the next; None for
            none within epochs.

    Raises:
        DataError: An epoch had not one call.
    """
    updates = training.plan.device_iterations
    validations = Validations(validation, validation_calls, hooks, run, display)
    hooks.on_train_begin({})
    heard = "on_train_batch_end", "on_batch_end"
    with ended_in_order(training, hooks, run):
        numbers = training.optimization.numbers
        agreement = Agreement(run.processes, hooks, run, *heard, facts=numbers)
        for epoch, is_validated in until_stopped(epochs, run, agreement.settle_now):
            if not run.calls:  # else it was begun before the run was interrupted
                run.begin_epoch(epoch)
                training.figures.reset()
                hooks.on_epoch_begin(epoch, {})
            to_make = validations.between(calls)
            for call in until_stopped(to_make, run, agreement.settle):
                first = run.calls * updates
                hooks.on_train_batch_begin(first, {})
                training.run(call)
                run.count_call(updates, call.num_real_of_all)
                _warn_if_not_finite(training, run, first)
                logs = agreement.running(training.figures)
                hooks.on_train_batch_end(first + updates - 1, logs)
            _check_length(calls, training, run)
            validated = validations.at_end(calls, is_validated=is_validated)
            training.figures.gather()  # an eviction before saves each process's own
            figures = training.figures.logs()
            figures.update({f"val_{name}": v for name, v in validated.items()})
            figures = dict(sorted(figures.items()))
            hooks.on_epoch_end(epoch, dict(figures))
            run.end_epoch(figures)
            training.optimization.end_epoch()
    training.finish()
    if run.processes.are_several:
        training.executors.share_buffers()
    hooks.on_train_end(dict(run.logs))


def predictions(
    executors: Executors,
    batches: InferenceBatches,
    hooks: CallbackList,
    run: RunState,
) -> Iterator[Any]:
    """The outputs of one call after the other, in order.

    Args:
        executors: With the inference program prepared.
        batches: The calls.
        hooks: Hear of each call.
        run: `run.stop_predicting` ends it.

    Yields:
        Tensors, nested as the module returns them, one row per sample.
    """
    run.stop_predicting = False
    agreement = Agreement(run.processes, hooks, run, "on_predict_batch_end")
    program = executors.inference_program
    hooks.on_predict_begin({})
    for number, call in enumerate(awaited(batches)):
        batch, num_real = call.batch, call.num_real
        if executors.inference_program is not program:
            raise ConfigError(
                "Something else was evaluated or predicted between two parts of "
                "predict(stream=True), with batches of another shape. Take all parts "
                "first, or use one batch_size."
            )
        first = number * batches.passes_per_call
        hooks.on_predict_batch_begin(first, {})
        outputs, _ = executors.infer(batch)
        num_rows = len(batch[0])
        if number == 0:  # every call has the same shapes
            check_rows(outputs, num_rows)
        if num_real < num_rows:
            outputs = cut(outputs, slice(num_real))
        last = first + batches.num_passes(call.num_real_of_all) - 1
        hooks.on_predict_batch_end(last, {"outputs": outputs})
        yield outputs
        agreement.settle()
        if agreement.ends_prediction:
            break
    hooks.on_predict_end({})


def _check_length(calls: Epochs, training: Training, run: RunState) -> None:
    """Warn if the data ran out in the epoch; refuse an epoch without a call."""
    if calls.ran_out:
        updates = run.calls * training.plan.device_iterations
        ending = "Training ends." if calls.is_spent else "The next begins anew."
        if run.processes.is_first:
            warnings.warn(
                f"The data ran out after {updates} updates of epoch {run.epoch + 1}, "
                f"fewer than steps_per_epoch asks for. {ending}",
                DataRanOutWarning,
                stacklevel=6,
            )
        if calls.is_spent:
            run.stop("the data ran out")
    elif not run.calls:
        raise DataError(
            f"Epoch {run.epoch + 1} has not one call: `x` gave fewer samples than "
            f"{training.plan.describe()}. Lower one of these, pass more data, or pad "
            "with fit(drop_last='pad')."
        )


def _warn_if_not_finite(training: Training, run: RunState, first: int) -> None:
    """Warn once if the loss of the call that has begun with an update isn't finite."""
    if math.isfinite(training.figures.loss) or not run.is_finite:
        return
    run.is_finite = False  # once is enough
    losses = training.losses_of_call()
    at = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
    is_known = len(losses) == training.plan.device_iterations
    where = f"{first + at}" if is_known else f"{first} or one of its call"
    warnings.warn(
        f"The training loss is {losses[at]} in epoch {run.epoch + 1}, at update "
        f"{where}. The weights are probably lost: lower the learning rate or look for "
        "infinite values in the data.",
        NonFiniteLossWarning,
        stacklevel=6,
    )
