# SPDX-License-Identifier: Apache-2.0
"""The run of a plan of `fit`: what surrounds the loop."""

from __future__ import annotations

import contextlib
from typing import Iterator

from ipufit.callbacks import History, ProgressDisplay
from ipufit.engine import train
from ipufit.resume import Snapshot, epochs_to_go
from ipufit.state import RunState

from .fit_plan import FitPlan
from .parts import Model
from .run_frame import under_way


def run(model: Model, plan: FitPlan) -> History:
    """Train as planned.

    Args:
        model: The model, whose weights are trained.
        plan: What to do.

    Returns:
        The history of the run.
    """
    training, checkpoint, history = plan.training, plan.checkpoint, History()
    state = RunState(coverage=plan.coverage, params=plan.all_params)
    frame = under_way(model, state, plan.callbacks, plan.params["verbose"], history)
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
        training.optimization.begin_fit(plan.total_updates, updates_per_call)
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
            )
    return history


@contextlib.contextmanager
def _data_open(model: Model, plan: FitPlan) -> Iterator[None]:
    """Close the data in the end, and remember how often they were gone through."""
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
    """Have the programs compiled; the one that trains is attached in the end."""
    if plan.validation is not None:
        plan.validation.prepare(display)
        state.directions.update(plan.validation.figures.directions)
    plan.training.prepare(plan.batches, display)
    state.directions.update(plan.training.figures.directions)
