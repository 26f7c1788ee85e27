# SPDX-License-Identifier: Apache-2.0
"""The plan of a `fit`, checked before any of it is done, and the run of the plan."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Sequence

from ipufit import _env
from ipufit import checkpoint as files
from ipufit.callbacks import History, ProgressDisplay
from ipufit.callbacks.base import CallbackLike
from ipufit.data import Epochs, TrainingBatches
from ipufit.engine import Evaluation, Training, describe_coverage, train
from ipufit.errors import ConfigError
from ipufit.resume import Snapshot, described, epochs_to_go
from ipufit.state import RunState

from . import compile_only
from .parts import Model
from .run_frame import under_way


@dataclass(frozen=True)
class FitPlan:
    """Everything a `fit` does.

    Attributes:
        training: Program, optimiser and figures of a call.
        batches: The calls of a pass over the data.
        calls: The calls of an epoch, cut from passes.
        epochs: The epochs to come, 0-based, and whether each is validated.
        validation: Program, data and figures to validate with; None for no validation.
        validation_calls: Calls of an epoch from one validation to the next; None for
            none within epochs.
        callbacks: The user's.
        checkpoint: Checkpoint of the run to go on with; None for a new run.
        arguments: Arguments that a resumed run must have too, by name.
        settings: Settings of `compile` in words, which it must have too.
        params: `verbose` and `epochs` as Keras's callbacks see them.
    """

    training: Training
    batches: TrainingBatches
    calls: Epochs
    epochs: Mapping[int, bool]
    validation: Evaluation | None
    validation_calls: int | None
    callbacks: CallbackLike
    checkpoint: files.Checkpoint | None
    arguments: Mapping[str, Any]
    settings: Mapping[str, str]
    params: Mapping[str, Any]

    @property
    def updates_per_epoch(self) -> int | None:
        """Weight updates of an epoch; None if the length of the data is unknown."""
        calls = self.calls.num_calls
        return None if calls is None else calls * self.training.plan.device_iterations

    @property
    def total_updates(self) -> int | None:
        """Weight updates of the whole run; None if the length of data is unknown."""
        updates = self.updates_per_epoch
        return None if updates is None else updates * len(self.epochs)

    @property
    def in_words(self) -> dict[str, str]:
        """All settings as text: those of a resumed run must be the same."""
        optimization = self.training.optimization
        needs_total, needs_epochs = optimization.needs_total, optimization.needs_epochs
        more = {
            **self.arguments,
            "samples seeded one by one": self.batches.is_seeded,
            "updates of the schedule": self.total_updates if needs_total else None,
            "updates of an epoch": self.updates_per_epoch if needs_epochs else None,
        }
        return {**self.settings, **{n: described(value) for n, value in more.items()}}

    @property
    def coverage(self) -> str:
        """Which samples the figures are about; empty if about all."""
        parts = {"": describe_coverage(self.training.options, self.training.plan)}
        if self.validation is not None:
            test = self.validation
            parts["validation "] = describe_coverage(test.options, test.plan)
        return ", ".join(of + text for of, text in parts.items() if text)

    @property
    def all_params(self) -> dict[str, Any]:
        """Keras's `params`, and how many calls and dropped samples an epoch has."""
        return {
            **self.params,
            "steps": self.updates_per_epoch,
            "calls": self.calls.num_calls,
            "dropped_samples": self.batches.num_dropped or 0,
        }


def run(model: Model, plan: FitPlan) -> History:
    """Train as planned, and return the history of the run."""
    if _env.compile_only() is not None:
        parts = plan.training, plan.batches, plan.validation
        return compile_only.fitted(model, *parts, plan.epochs)
    training, checkpoint, history = plan.training, plan.checkpoint, History()
    state = RunState(coverage=plan.coverage, params=plan.all_params)
    given = plan.callbacks, plan.params["verbose"], history
    frame = under_way(model, state, *given)
    model._runs.batch_loop = None
    with frame as (hooks, display):
        model._data.source = plan.batches.source
        validated = None if plan.validation is None else plan.validation.batches.source
        snapshot = Snapshot(
            training, plan.batches, hooks, state, validated, plan.in_words
        )
        if checkpoint is not None:
            snapshot.check(checkpoint)
        updates_per_call = training.plan.device_iterations
        training.optimization.begin_fit(
            plan.total_updates,
            updates_per_call,
            len(plan.epochs),
            training.plan.batch_size,
        )
        if checkpoint is not None:
            snapshot.trained.put_back(checkpoint)
        with _data_open(model, plan):
            _prepare(plan, state, display)
            model.history, model._runs.snapshot = history, snapshot
            train(
                training,
                epochs_to_go(plan.epochs, snapshot, checkpoint, display),
                plan.calls,
                plan.validation,
                hooks,
                state,
                display,
                plan.validation_calls,
            )
    return history


@contextlib.contextmanager
def _data_open(model: Model, plan: FitPlan) -> Iterator[None]:
    """Close the data in the end, and count the passes over them."""
    try:
        yield
    finally:
        number, calls = plan.batches.position
        model._data.num_passes = number + (calls > 0)
        model._runs.snapshot = None
        plan.batches.close()
        if plan.validation is not None:
            plan.validation.batches.close()


def _prepare(plan: FitPlan, state: RunState, display: ProgressDisplay) -> None:
    """Have the programs built; that of the training is attached when both are."""
    for line in plan.training.optimization.news():
        display.noted(line)
    if plan.validation is not None:
        plan.validation.prepare(display)
        state.directions.update(plan.validation.figures.directions)
    plan.training.prepare(plan.batches, display)
    state.directions.update(plan.training.figures.directions)
    if plan.validation is not None:
        _refuse_names_of_validation(plan.training.figures.names)


def _refuse_names_of_validation(names: Sequence[str]) -> None:
    """Refuse figures of the training that History would take for the validation's.

    Raises:
        ConfigError: The name of one begins with `val_`.
    """
    for name in names:
        if name.startswith("val_"):
            raise ConfigError(
                f"The training reports {name!r}, and fit() puts val_ in front of the "
                "figures of validation_data. Give the scalar or metric another name."
            )
