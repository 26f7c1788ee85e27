# SPDX-License-Identifier: Apache-2.0
"""`batch_plan` and `plan`: what a `fit` would do and take, without running anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Mapping

from ipufit.batching import BatchPlan
from ipufit.callbacks.base import CallbackLike
from ipufit.config import forward_stages
from ipufit.data import Source, example_of, num_trained_on
from ipufit.errors import IpufitError
from ipufit.placement import own_stages
from ipufit.planning.choices import nearest_batch_sizes
from ipufit.planning.schedule import EpochPlan

from .evaluating import require_targets
from .parts import Model, settings_of
from .splitting import settle
from .updates_per_call import update_plan, updates_per_call

if TYPE_CHECKING:
    from ipufit.planning.memory import Device
    from ipufit.planning.plan import ModelPlan


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
    arguments = {name: value for name, value in locals().items() if name != "self"}
    return _epoch_of_fit(self, arguments)[1]


def plan(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    device: str | Device = "mk2",
    callbacks: CallbackLike = None,
    validation_split: float = 0.0,
    steps_per_epoch: int | None = None,
    drop_last: bool | str = True,
) -> ModelPlan:
    """Say what training takes of each IPU and how its pipeline runs, and run nothing.

    The module is called once, with tensors that have shapes and no values: this takes
    seconds, little memory and no IPU. Parameters, buffers, the optimiser's state and
    accumulators are exact; activations and gradients are estimates with bounds. Code
    and temporary data aren't counted, so only a compilation shows whether a model fits.

    Args:
        x: Data as for `fit`.
        y: Targets, as for `fit`. They may be left out if a step of your own doesn't
            need them: only what the host sends depends on them. The plan says if `fit`
            would refuse the data then.
        batch_size: As for `fit`.
        device: Kind of IPU: "mk1", "mk2" or "bow"; or an `ipufit.Device` with figures
            of your own.
        callbacks: As for `batch_plan`.
        validation_split: As for `fit`.
        steps_per_epoch: As for `fit`.
        drop_last: As for `fit`.

    Returns:
        Numbers for each stage and each IPU, and a table of choices. Printed, it is a
        text.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: The batch size is not made of its factors, or the module can't be
            copied.
        DataError: Data that can't be used, or not by the module.
        UnknownNameError: There is no such kind of IPU.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        >>> model = IPUModel(layers, IPUConfig(4, pipeline=["0", "1"]))
        >>> model.compile("adamw", "cross_entropy")
        >>> x, y = torch.rand(1000, 4), torch.randint(0, 3, (1000,))
        >>> plan = model.plan(x, y, batch_size=40)
        >>> [memory.exact for memory in plan.memory], plan.num_ipus, plan.bubble
        ([648, 440], 2, 0.16666666666666666)
    """
    arguments = {
        name: value
        for name, value in locals().items()
        if name not in ("self", "device")
    }
    return plan_of_fit(self, arguments, device)


def plan_of_fit(
    model: Model,
    arguments: Mapping[str, Any],
    device: str | Device,
    *,
    is_spare: bool = False,
) -> ModelPlan:
    """Plan a `fit` with these arguments.

    Args:
        model: The model.
        arguments: Arguments of `fit` by name, of which `x` is needed.
        device: As for `plan`.
        is_spare: Whether that `fit` won't run, so that a generator may lose its first
            batch.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: The batch size is not made of its factors, or the module can't be
            copied.
        DataError: Data that can't be used, or not by the module.
        UnknownNameError: There is no such kind of IPU.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.
    """
    # Few processes ask for a plan, so the others don't import what makes it.
    from ipufit.planning.memory import device_named

    from .measuring import plan_of_model

    settings = settings_of(model)
    kind = device_named(device)
    source, epoch = _epoch_of_fit(model, arguments, is_spare=is_spare)
    plan = plan_of_model(model, source, epoch, kind)
    try:
        require_targets(source, settings.objective, "x", "train")
    except IpufitError as error:  # what is planned doesn't depend on targets
        return replace(plan, refusal=str(error))
    return plan


def _epoch_of_fit(
    model: Model, arguments: Mapping[str, Any], *, is_spare: bool = False
) -> tuple[Source, EpochPlan]:
    """Look at the data of a `fit`, and divide them into calls."""
    source = example_of(
        *(arguments["x"], arguments.get("y"), arguments.get("sample_weight")),
        is_whole=True,
        is_spare=is_spare,
        num_workers=model.config.num_workers,
        processes=model.processes,
    )
    settle(model, source)
    plan = update_plan(model, source, arguments.get("batch_size"))
    callbacks = arguments.get("callbacks")
    choice = updates_per_call(model, source, callbacks, None, arguments, plan)
    of_config, reason = plan, ""
    if choice is not None:
        plan, reason = replace(plan, device_iterations=choice.value), choice.reason
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
    return source, EpochPlan(plan, num_samples, is_padding, stages, nearest, reason)


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
