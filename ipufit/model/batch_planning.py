# SPDX-License-Identifier: Apache-2.0
"""`batch_plan`: how `fit` would divide data into calls, without running anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Mapping

from ipufit.batching import BatchPlan
from ipufit.callbacks.base import CallbackLike
from ipufit.config.plans import forward_stages
from ipufit.data import Source, example_of, num_trained_on
from ipufit.placement import own_stages
from ipufit.planning.choices import nearest_batch_sizes
from ipufit.planning.schedule import EpochPlan

from .parts import Model
from .splitting import settle
from .updates_per_call import update_plan, updates_per_call


def batch_plan(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    callbacks: CallbackLike = None,
    validation_split: float = 0.0,
    steps_per_epoch: int | None = None,
    drop_last: bool | str = True,
) -> EpochPlan:
    """Say how `fit` with these arguments would divide the data, and run nothing.

    Only lazy layers get their shapes, as they do in `fit`.

    Args:
        x: Data as for `fit`.
        y: Targets, as for `fit`.
        batch_size: As for `fit`.
        callbacks: Callbacks of the `fit` to come: those that hear each update ask for
            calls of one.
        validation_split: As for `fit`.
        steps_per_epoch: As for `fit`.
        drop_last: As for `fit`.

    Returns:
        Every factor, calls and updates of an epoch, the samples left over, and the
        nearest batch sizes that leave none. Printed, it is a few lines.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: The batch size is not made of its factors; the error names the
            nearest that are.
        DataError: Data that can't be used, or a generator, which would lose its first
            batch.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile("adamw", "cross_entropy")
        >>> x, y = torch.rand(1000, 4), torch.randint(0, 3, (1000,))
        >>> plan = model.batch_plan(x, y, batch_size=48)
        >>> plan.updates, plan.dropped_samples, plan.nearest_batch_sizes
        (20, 40, (8, 40, 200, 1000))
    """
    source = example_of(
        *(x, y),
        is_whole=True,
        num_workers=self.config.num_workers,
        processes=self.processes,
    )
    settle(self, source)
    arguments = {
        "batch_size": batch_size,
        "callbacks": callbacks,
        "validation_split": validation_split,
        "steps_per_epoch": steps_per_epoch,
        "drop_last": drop_last,
    }
    return epoch_plan(self, source, arguments)


def epoch_plan(model: Model, source: Source, arguments: Mapping[str, Any]) -> EpochPlan:
    """Divide data into calls, as for `batch_plan`.

    Args:
        model: The model, compiled.
        source: The data.
        arguments: Arguments of `fit` by name; those that aren't there are left out.

    Raises:
        ConfigError: The batch size is not made of its factors.
    """
    plan = update_plan(model, source, arguments.get("batch_size"))
    callbacks = arguments.get("callbacks")
    choice = updates_per_call(model, source, callbacks, None, arguments, plan)
    reason = ""
    of_config = plan
    if choice is not None:
        reason = choice.reason
        plan = replace(plan, device_iterations=choice.value)
    own = own_stages(model.module, model.config)
    derive = partial(model.config.training_plan, own_stages=own)
    stages = 1
    if model.config.is_pipelined and model.config.training_options is None:
        stages = max(forward_stages(model.config), own)
    is_padding = arguments.get("drop_last", True) is not True
    num_samples = _samples_of_epoch(source, arguments, plan)
    nearest: tuple[int, ...] = ()
    if num_samples is not None and not is_padding:
        nearest = nearest_batch_sizes(num_samples, of_config, derive)
    return EpochPlan(
        batch=plan,
        num_samples=num_samples,
        is_padding=is_padding,
        stages=stages,
        nearest_batch_sizes=nearest,
        reason=reason,
    )


def _samples_of_epoch(
    source: Source, arguments: Mapping[str, Any], plan: BatchPlan
) -> int | None:
    """Samples that an epoch is made of; None if the data don't say."""
    count, steps = source.num_samples, arguments.get("steps_per_epoch")
    if count is not None and arguments.get("validation_split"):
        count = num_trained_on(count, arguments["validation_split"])
    if not isinstance(steps, int) or steps < 1:  # what else it may be, fit refuses
        return count
    least = plan.samples_per_call * plan.processes
    is_enough = count is None or count >= least
    return steps * plan.batch_size if is_enough else count
