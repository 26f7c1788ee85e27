# SPDX-License-Identifier: Apache-2.0
"""The training of a model on data: its plan, options, program and calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Mapping, Optional, Sequence

from ipufit import checkpoint as files
from ipufit.batching import BatchPlan
from ipufit.data import Position, Source, TrainingBatches
from ipufit.engine import Objective, Training, WatchedGradients
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.optimizers import check_covers
from ipufit.planning.choices import Choice
from ipufit.resume import position_of

from .evaluating import check_processes, loading_of, require_targets
from .parts import Model, settings_of
from .splitting import settle
from .updates_per_call import training_options, update_plan

Choose = Callable[[BatchPlan], Optional[Choice]]
"""Chooses the updates of a call for the factors of one; None keeps those factors."""


def _one_update(plan: BatchPlan) -> None:
    """Choose nothing, so that a call has the updates of the config, or one."""


def training_of(
    model: Model,
    source: Source,
    batch_size: int | None,
    *,
    shuffle: bool,
    drop_last: bool | str,
    class_weight: Mapping[int, float] | None,
    checkpoint: files.Checkpoint | None = None,
    watched: Sequence[str] = (),
    num_passes: int | None = None,
    choose: Choose = _one_update,
) -> tuple[Training, TrainingBatches]:
    """The training of a compiled model on data, and the calls of a pass.

    Args:
        model: The model.
        source: The data.
        batch_size: Samples of one update; None for those of the data's loader, or of
            the config.
        shuffle: As for `fit`.
        drop_last: As for `fit`.
        class_weight: As for `fit`.
        checkpoint: Checkpoint of the run to go on with, in its order of samples; None
            for a new run.
        watched: Names of parameters whose gradients come back.
        num_passes: Number of the next pass over the data; None for that of the model.
        choose: Chooses the updates of a call, where the config leaves them open; by
            default it is one.

    Raises:
        ConfigError: The optimiser lacks a weight, or the batch size a factor.
        DataError: Targets are missing.
        UnsupportedError: The loss can't take weights or padding, or gradients are
            watched that the device scales as it likes.
    """
    if not isinstance(shuffle, bool):
        raise ConfigError(f"shuffle={shuffle!r} is neither True nor False.")
    settings = settings_of(model)
    optimization = settings.optimization
    check_covers(optimization.optimizer, model.module)
    require_targets(source, settings.objective, "x", "train")
    _check_weighting(settings.objective, class_weight, drop_last)
    settle(model, source)
    config = model.config
    plan = update_plan(model, source, batch_size)
    check_processes(model, plan)
    if checkpoint is None:
        number = model._data.num_passes if num_passes is None else num_passes
        seed, start = config.seed, Position(number)
    else:
        seed, start = checkpoint.state["data"]["seed"], position_of(checkpoint)
    if watched and optimization.automatic_loss_scaling:
        raise UnsupportedError(
            "Gradients are watched, and the loss scaling is automatic: only the "
            "device knows what it has multiplied them by. Use a fixed loss_scaling."
        )
    gradients = WatchedGradients.of(model.module, watched)
    choice = choose(plan)
    if choice is not None:
        plan = replace(plan, device_iterations=choice.value)
    options = training_options(model, plan, gradients)
    batches = TrainingBatches(
        source,
        plan,
        options,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        class_weight=class_weight,
        mixing=settings.mixing,
        loading=loading_of(config),
        start=start,
        processes=model.processes,
    )
    training = Training(
        model._executors,
        plan,
        options,
        optimization,
        batches.structure,
        settings.training_figures,
        settings.average,
        gradients,
        choice,
    )
    return training, batches


def _check_weighting(
    objective: Objective, class_weight: Any, drop_last: bool | str
) -> None:
    """Refuse weights of classes, or padding, that a loss can't take.

    Raises:
        ConfigError: `drop_last` is something else.
        UnsupportedError: The module returns its own loss.
    """
    if not isinstance(drop_last, bool) and drop_last != "pad":
        raise ConfigError(
            f"drop_last={drop_last!r} is neither True nor 'pad': samples that don't "
            "fill a call are left out, or the call is padded."
        )
    for what, is_given in (
        ("class_weight", class_weight is not None),
        (f"drop_last={drop_last!r}", drop_last is not True),
    ):
        if is_given and objective.owns_loss:
            if objective.steps is None:
                whose, instead = (
                    "the module returns its own loss",
                    "compile() with a loss",
                )
            else:
                whose = "the model's step returns the mean loss"
                instead = "Pass sample_weight to fit(), which the step gets"
                if class_weight is None:
                    instead = "Choose factors that divide the number of samples"
            raise UnsupportedError(
                f"{what} was given, but {whose}, in which samples can't be told apart. "
                f"{instead}, or leave it out."
            )
