# SPDX-License-Identifier: Apache-2.0
"""The loops: train, predict. Control flow and nothing else."""

from __future__ import annotations

import math
import warnings
from typing import Any, Callable, Iterator, Mapping

from ipufit.callbacks import CallbackList, ProgressDisplay
from ipufit.data import Epochs, InferenceBatches, Moment, set_random_state
from ipufit.errors import (
    ConfigError,
    DataError,
    DataRanOutWarning,
    NonFiniteLossWarning,
)
from ipufit.state import EVICTED, RunState
from ipufit.types import Logs

from .coverage import check_rows, cut
from .evaluation import Evaluation
from .interruption import heard_eviction
from .programs.executors import Executors
from .training import Training


def train(
    training: Training,
    epochs: Mapping[int, bool],
    batches: Epochs,
    hooks: CallbackList,
    run: RunState,
    validation: Evaluation | None,
    display: ProgressDisplay,
    resume: Callable[[], None] | None = None,
) -> None:
    """Train epoch after epoch, and validate.

    A run that is resumed goes on where it was: epochs that were done are left out,
    and `on_epoch_begin` isn't called for the one under way, except for the display.

    An interrupt ends the run in order: the epoch under way is forgotten,
    `on_train_end` hears the figures of the last one that was complete, and the IPUs
    are free. Then it is raised again. SIGTERM does the same but for raising, if a
    callback saves then.

    Args:
        training: With its program prepared.
        epochs: The epochs to come, and whether each is validated.
        batches: The calls of an epoch.
        hooks: Hear of it.
        run: Counts, and says when to stop.
        validation: On what; None if on nothing.
        display: Hears of compilations.
        resume: Puts the state of the interrupted run back; None for a new one.
    """
    logs: Logs = {}
    hooks.on_train_begin({})
    if resume is not None:
        resume()
        if run.calls:
            display.on_epoch_begin(run.epoch, {})
    try:
        with heard_eviction(run):
            for epoch, is_validated in epochs.items():
                if resume is not None and (epoch < run.epoch or run.is_stopping):
                    continue
                if not run.calls:
                    run.epoch, run.is_epoch_done = epoch, False
                    training.figures.reset()
                    hooks.on_epoch_begin(epoch, {})
                trained = train_epoch(training, batches, hooks, run)
                if run.stop_reason == EVICTED:
                    break  # the epoch goes on in another process
                if validation is not None and is_validated:
                    before = Moment(batches.generators) if run.heeds_eviction else None
                    validation.prepare(display)
                    validated = validation.run(hooks, run)
                    if before is not None and run.is_evicted:
                        # It is made anew by the process that goes on.
                        set_random_state(before.state(), batches.generators)
                        run.heed_eviction()
                        break
                    trained = _with_validation(trained, validated)
                    run.directions.update(validation.figures.directions)
                hooks.on_epoch_end(epoch, dict(trained))
                run.calls, run.is_epoch_done = 0, True
                run.act()
                run.heed_eviction()
                logs = trained
                if run.is_stopping:
                    break
    except KeyboardInterrupt:
        run.stop("interrupted")
        hooks.on_train_end(dict(logs))
        training.executors.detach()
        raise
    training.finish()
    hooks.on_train_end(dict(logs))


def _with_validation(logs: Logs, validation: Logs) -> Logs:
    prefixed = {f"val_{name}": value for name, value in validation.items()}
    return dict(sorted({**logs, **prefixed}.items()))


def train_epoch(
    training: Training,
    batches: Epochs,
    hooks: CallbackList,
    run: RunState,
) -> Logs:
    """Train on every call of an epoch.

    Hooks see a call as Keras's see `steps_per_execution` batches: it begins with the
    index of its first update and ends with that of its last. If only displays listen,
    figures are computed when they are to be shown.

    Returns:
        The figures of the epoch so far, if it was stopped.

    Raises:
        DataError: There was not one call.
    """
    updates = training.plan.device_iterations
    is_heard = hooks.hears("on_train_batch_end", "on_batch_end")
    for number, call in enumerate(batches, run.calls):
        first = number * updates
        hooks.on_train_batch_begin(first, {})
        training.run(call)
        run.calls += 1
        run.updates += updates
        run.samples += call.num_real
        _report_non_finite(training.figures.loss, run, first)
        is_wanted = is_heard or hooks.are_displays_due()
        logs = training.figures.running() if is_wanted else {}
        hooks.on_train_batch_end(first + updates - 1, logs)
        run.act()
        run.heed_eviction()
        if run.is_stopping:
            break
    if batches.ran_out:
        _report_ran_out(batches, run, run.calls * updates)
    elif not run.calls:
        raise DataError(
            f"Epoch {run.epoch + 1} has not one call: `x` gave fewer samples than "
            f"{training.plan.describe()}. Lower one of these, pass more data, or pad "
            "with fit(drop_last='pad')."
        )
    return training.figures.logs()


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
    program = executors.inference_program
    hooks.on_predict_begin({})
    for number, (batch, num_real) in enumerate(batches):
        if executors.inference_program is not program:
            raise ConfigError(
                "Something else was evaluated or predicted between two parts of "
                "predict(stream=True), with batches of another shape. Take all parts "
                "first, or use one batch_size."
            )
        first = number * batches.passes_per_call
        hooks.on_predict_batch_begin(first, {})
        outputs, _ = executors.infer(batch[: batches.structure.num_inputs])
        num_rows = len(batch[0])
        if number == 0:  # later ones are alike
            check_rows(outputs, num_rows)
        if num_real < num_rows:
            outputs = cut(outputs, slice(num_real))
        last = first + batches.num_passes(num_real) - 1
        hooks.on_predict_batch_end(last, {"outputs": outputs})
        yield outputs
        if run.stop_predicting:
            break
    hooks.on_predict_end({})


def _report_ran_out(batches: Epochs, run: RunState, updates: int) -> None:
    ending = "Training ends." if batches.is_spent else "The next begins anew."
    warnings.warn(
        f"The data ran out after {updates} updates of epoch {run.epoch + 1}, fewer "
        f"than steps_per_epoch asks for. {ending}",
        DataRanOutWarning,
        stacklevel=5,
    )
    if batches.is_spent:
        run.stop("the data ran out")


def _report_non_finite(loss: float, run: RunState, update: int) -> None:
    if not math.isfinite(loss) and run.is_finite:
        run.is_finite = False  # once is enough
        warnings.warn(
            f"The training loss is {loss} in epoch {run.epoch + 1}, at update {update} "
            "or one of its call. The weights are probably lost: lower the learning "
            "rate or look for infinite values in the data.",
            NonFiniteLossWarning,
            stacklevel=5,
        )
