# SPDX-License-Identifier: Apache-2.0
"""The updates of a training call, where the config leaves `device_iterations` open."""

from __future__ import annotations

from typing import Any, Mapping

from ipufit import checkpoint as files
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.data import Source, num_trained_on
from ipufit.engine import WatchedGradients, bytes_of, figure_bytes, num_weights
from ipufit.placement import own_stages
from ipufit.planning.choices import (
    MOST_CALL_BYTES,
    MOST_WORK,
    Choice,
    Limit,
    chosen_device_iterations,
)

from .parts import Model, settings_of

_FIGURE_BYTES = 4096
"""Bytes for the figures of a micro-batch but for large ones: losses, means, scalars.

A program that is traced makes known how many there are.
"""

_LEAST_CALLS = 16
"""Calls of a pass over samples that are loaded: some are loaded while others train."""


def update_plan(model: Model, source: Source, batch_size: int | None) -> BatchPlan:
    """The factors of a training call, of one update if nothing else is given.

    Args:
        model: The model.
        source: The data.
        batch_size: Samples of one update; None for those of the data's loader, or of
            the config.

    Raises:
        ConfigError: The batch size is not made of its factors.
    """
    config = model.config
    if batch_size is None and config.micro_batch_size is None:
        batch_size = source.batch_size
    return config.training_plan(batch_size, own_stages(model.module, config))


def training_options(
    model: Model, plan: BatchPlan, gradients: WatchedGradients | None = None
) -> poptorch.Options:
    """PopTorch's options for the training of a compiled model.

    Args:
        model: The model.
        plan: The factors of a call.
        gradients: The gradients that come back; None for none.
    """
    settings, config = settings_of(model), model.config
    optimization = settings.optimization
    return config.build_training_options(
        plan,
        own_stages=own_stages(model.module, config),
        sums_gradients=settings.objective.is_sum,
        returns_outputs=settings.objective.is_streamed,
        scales_automatically=optimization.automatic_loss_scaling,
        divides_early=optimization.needs_running_mean,
        anchors={} if gradients is None else gradients.anchors,
    )


def updates_per_call(
    model: Model,
    source: Source,
    callbacks: CallbackLike,
    checkpoint: files.Checkpoint | None,
    arguments: Mapping[str, Any],
    plan: BatchPlan,
) -> Choice | None:
    """Choose the updates of a call so that a `fit` is the same as with one of them.

    The choice is the same in all processes, and depends on nothing but the arguments.

    Args:
        model: The model.
        source: The data.
        callbacks: As for `fit`.
        checkpoint: Checkpoint of the run to go on with, which keeps its number; None
            for a new run.
        arguments: Further arguments of `fit` by name; `drop_last`, `validation_split`,
            `steps_per_epoch` and `validation_updates` count.
        plan: The factors of one update.

    Returns:
        None if the config or its own options say how many.
    """
    config = model.config
    if config.device_iterations is not None or config.training_options is not None:
        return None
    if checkpoint is not None:
        begun = int(checkpoint.state["plan"]["device_iterations"])
        return Choice(begun, "the run was begun with so many")
    multiples, most = _of_callbacks(model, callbacks)
    most += _of_settings(model)
    most += _of_output_mode(model, plan)
    count, size = source.num_certain, plan.batch_size
    if count is not None and arguments.get("validation_split"):
        count = num_trained_on(count, arguments["validation_split"])
    updates = 0 if count is None else count // size
    if count is None:
        most.append(Limit(1, "the data doesn't say for certain how many samples come"))
    else:
        if arguments.get("drop_last", True) in ("pad", False):
            updates = -(-count // size)
        if not updates:
            return Choice(1, "these data have fewer samples than an update")
        span = "an epoch" if arguments.get("steps_per_epoch") is None else "a pass"
        words = "one update" if updates == 1 else f"{updates} updates"
        multiples.insert(0, Limit(updates, f"the {words} of {span}"))
    for name in ("steps_per_epoch", "validation_updates"):
        value = arguments.get(name)
        if isinstance(value, int) and value > 0:  # what else it may be is refused later
            multiples.append(Limit(value, f"{name}={value}"))
    most += _of_memory(model, source, plan)
    most += _of_loading(model, source, updates, size)
    return chosen_device_iterations(multiples, most)


def _of_callbacks(
    model: Model, callbacks: CallbackLike
) -> tuple[list[Limit], list[Limit]]:
    """Limits for the callbacks of all processes: multiples, then largest numbers."""
    listening = CallbackList(callbacks)
    ends = listening.call_ends()
    is_watching = bool(listening.watched_gradients(model.module))
    if model.processes.are_several:
        everyone = model.processes.gathered((ends, is_watching))
        ends = [end for of_one, _ in everyone for end in of_one]
        is_watching = any(watches for _, watches in everyone)
    ends = list(dict.fromkeys(ends))
    multiples = [
        Limit(every, f"the {every} updates that {name} counts")
        for every, name in ends
        if every > 1
    ]
    most = [Limit(1, f"{name} hears each update") for every, name in ends if every == 1]
    if is_watching:
        most.append(Limit(1, "gradients are watched"))
    return multiples, most


def _of_settings(model: Model) -> list[Limit]:
    """Limits of one update for settings with which something happens after each."""
    settings = settings_of(model)
    reasons = []
    moves = settings.optimization.moves_per_update
    if moves:
        reasons.append(moves)
    if settings.objective.is_streamed:
        reasons.append("outputs come back for a streamed metric, and may be large")
    return [Limit(1, reason) for reason in reasons]


def _of_output_mode(model: Model, plan: BatchPlan) -> list[Limit]:
    """A limit of one update if figures don't come back from every micro-batch.

    Larger calls would give figures of fewer samples, or sums that the device rounds.
    """
    if model.config.customize is None:
        return []
    options = training_options(model, plan)
    mode = poptorch.OutputMode(options.output_mode)
    if mode == poptorch.OutputMode.All:
        return []
    return [Limit(1, f"customize asks for {mode.name}")]


def _of_memory(model: Model, source: Source, plan: BatchPlan) -> list[Limit]:
    """Bounds of what a call holds, and of how long it takes."""
    rows = plan.samples_per_update
    objective, example = settings_of(model).objective, source.example(1)
    large = figure_bytes(model.module, objective, source.structure, example)
    figures = (_FIGURE_BYTES + large) * plan.micro_batches_per_call
    held = rows * bytes_of(source.first()) + figures
    weights = num_weights(model.module)
    work = max(1, rows * weights)
    return [
        Limit(
            max(1, MOST_CALL_BYTES // held),
            "a call's samples and figures take "
            f"{MOST_CALL_BYTES >> 20} MiB of host memory at most",
        ),
        Limit(
            max(1, MOST_WORK // work),
            f"a larger call would take long, with {rows} samples and {weights} weights "
            "per update",
        ),
    ]


def _of_loading(model: Model, source: Source, updates: int, size: int) -> list[Limit]:
    """Bounds with which samples are loaded while others are trained on."""
    if source.is_in_memory:
        return []
    least = max(_LEAST_CALLS, 4 * model.config.num_workers)
    limits = [Limit(max(1, updates // least), f"{least} calls or more share the data")]
    if source.num_ahead is not None:
        batches = max(1, source.num_ahead // (2 * size))
        limits.append(Limit(batches, f"workers load {source.num_ahead} samples ahead"))
    return limits
