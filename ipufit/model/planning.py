# SPDX-License-Identifier: Apache-2.0
"""`plan`: what training takes of each IPU, and how its pipeline runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from ipufit.callbacks.base import CallbackLike
from ipufit.data import example_of

from .batch_planning import epoch_plan
from .parts import Model, settings_of
from .splitting import settle

if TYPE_CHECKING:
    from ipufit.planning.memory import Device
    from ipufit.planning.plan import ModelPlan


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
        "x": x,
        "y": y,
        "batch_size": batch_size,
        "callbacks": callbacks,
        "validation_split": validation_split,
        "steps_per_epoch": steps_per_epoch,
        "drop_last": drop_last,
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

    from .plan_of_model import plan_of_model

    settings_of(model)
    kind = device_named(device)
    source = example_of(
        *(arguments["x"], arguments.get("y"), arguments.get("sample_weight")),
        is_whole=True,
        is_spare=is_spare,
        num_workers=model.config.num_workers,
        processes=model.processes,
    )
    settle(model, source)
    epoch = epoch_plan(model, source, arguments)
    return plan_of_model(model, source, epoch, kind)
