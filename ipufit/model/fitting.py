# SPDX-License-Identifier: Apache-2.0
"""Plan a `fit`, and refuse unusable arguments before a program compiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Mapping

from ipufit import checkpoint as files
from ipufit.data.datasets import Source
from ipufit.data.sources import fit_sources
from ipufit.engine.loop import Training, Validations
from ipufit.resume.checks import SEEDED, check_same_run
from ipufit.resume.finding import find_checkpoint
from ipufit.resume.settings import described, numeric_settings
from ipufit.types import PathLike

from .arguments import FitArguments
from .calls import CallPlanner


@dataclass(frozen=True, eq=False)
class FitPlan:
    """The plan of a `fit`.

    Attributes:
        training: The training, and the calls of its epochs.
        validated: The validation sets by name; the only set has the name `""`.
        validations: The evaluations of the sets, and when they are made.
        epochs: Indices of the epochs to come.
        updates_per_epoch: Number of updates of an epoch; None if unknown.
        settings: Settings that a resumed run must have too, in words.
        checkpoint: The checkpoint of the run to resume; None for a new run.
    """

    training: Training
    validated: Mapping[str, Source]
    validations: Validations
    epochs: range
    updates_per_epoch: int | None
    settings: Mapping[str, str]
    checkpoint: files.Checkpoint | None


def plan_fit(
    planner: CallPlanner,
    arguments: FitArguments,
    resume: PathLike | Literal[False] | None,
) -> FitPlan:
    """Plan a `fit`, and refuse arguments that can't work.

    Args:
        planner: Plans the calls of the model.
        arguments: Arguments of the `fit`.
        resume: As for `fit`; False for a new run, whatever callbacks have saved.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: Settings that don't fit the model, the data or each other.
        DataError: Data that can't be used.
        CheckpointError: The checkpoint to resume can't be read.
        UnsupportedError: The loss can't take an argument, such as class weights.
    """
    compiled = planner.require_compiled()
    epochs = range(arguments.initial_epoch, arguments.epochs)
    source, validated = fit_sources(
        *arguments.data,
        arguments.validation_split,
        arguments.validation_data,
        shuffle=arguments.shuffle,
        **planner.loading,
    )
    arguments.check_processes(planner.processes, source, validated)
    checkpoint = None
    if resume is not False:
        checkpoint = find_checkpoint(resume, arguments.callbacks)
    rest = replace(arguments, validation_split=0.0, checkpoint=checkpoint)
    training = planner.training(source, rest)
    batches, updates = training.batches, training.plan.device_iterations
    batches.set_epochs(arguments.steps_per_epoch, len(epochs))
    calls = batches.calls_per_epoch
    per_epoch = None if calls is None else calls * updates
    total = None if per_epoch is None else per_epoch * len(epochs)
    between = arguments.calls_between_validations(updates, validated)
    evaluations = planner.validations(
        validated,
        arguments.validation_batch_size,
        arguments.validation_steps,
        training.plan,
        arguments.callbacks,
    )
    for set_ in validated.values():
        planner.refuse_unfit_labels(set_, source)
    optimization = training.optimization
    of_run = {
        "shuffle": arguments.shuffle,
        "drop_last": arguments.drop_last,
        "class_weight": arguments.class_weight,
        "steps_per_epoch": arguments.steps_per_epoch,
        "validation_updates": arguments.validation_updates,
        **numeric_settings(planner.config),
        SEEDED: batches.is_seeded,
        "updates of the schedule": total if optimization.needs_total else None,
        "updates of an epoch": per_epoch if optimization.needs_epochs else None,
    }
    in_words = {name: described(value) for name, value in of_run.items()}
    settings = {**compiled.in_words, **in_words}
    check_same_run(checkpoint, training, source.num_samples, settings)
    return FitPlan(
        training,
        validated,
        Validations(evaluations, arguments.is_validated, between),
        epochs,
        per_epoch,
        settings,
        checkpoint,
    )
