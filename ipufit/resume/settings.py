# SPDX-License-Identifier: Apache-2.0
"""Settings in words, by which a run that goes on is known from another run."""

from __future__ import annotations

import functools
import warnings
from dataclasses import asdict, fields
from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit.batching import BatchPlan
from ipufit.config import IPUConfig
from ipufit.distributed import get_process_info
from ipufit.engine import Objective, Training
from ipufit.errors import ConfigError, OtherLayoutWarning
from ipufit.optimizers import Optimization

NOT_SETTINGS = (
    "params",
    "initial_lr",
    # Of torch's own kernels, which IPUs don't use; they come and go with versions.
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
)
_DEPTH = 4
_SEEDED = "samples seeded one by one"  # a setting that depends on processes


def check_same_run(
    checkpoint: files.Checkpoint | None,
    training: Training,
    num_samples: int | None,
    settings: Mapping[str, str],
) -> None:
    """Refuse to go on with other settings than the checkpoint's.

    Micro-batch, gradient accumulation, replicas and processes may be others, if an
    update has as many samples. Settings that the checkpoint doesn't have don't count.

    Args:
        checkpoint: From `Snapshot.take`; None for a new run, which may have any.
        training: Training of the run that is to go on.
        num_samples: Number of samples in the data; None if unknown.
        settings: Further settings of the run, in words.

    Raises:
        ConfigError: The samples of an update or call, the data or the settings are
            others.

    Warns:
        OtherLayoutWarning: What can't go on as it would have.
    """
    if checkpoint is None:
        return
    saved, now = BatchPlan(**checkpoint.state["plan"]), training.plan
    odd = _changes(saved, now, "batch_size", "device_iterations")
    before = checkpoint.state["data"]["num_samples"]
    if before != num_samples:
        odd.append(f"samples were {before} and are {num_samples}")
    was = checkpoint.state.get("settings", {})
    odd += [
        f"{name} was {was[name]} and is {text}"
        for name, text in settings.items()
        if was.get(name, text) != text
        if name != _SEEDED or saved.processes == now.processes
    ]
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with; or, to train on from what was learnt, "
            "model.load(path) and fit() without resume."
        )
    if saved == now or not get_process_info().is_first:
        return
    others = ["random numbers of devices, such as dropout masks"]
    if _changes(saved, now, "replicas", "processes"):
        others.append("running statistics, which go on from the first replica's")
    if saved.processes != now.processes:
        others.append("random numbers of transforms that don't belong to one sample")
    changes = ", ".join(_changes(saved, now, *asdict(now)))
    warnings.warn(
        f"The run goes on in another layout: {changes}. Order of the data, optimizer, "
        "schedule and figures go on, rounded otherwise. Other than they would have "
        f"been are {'; '.join(others)}.",
        OtherLayoutWarning,
        stacklevel=3,
    )


def _changes(saved: BatchPlan, now: BatchPlan, *names: str) -> list[str]:
    return [
        f"{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for name in names
        if getattr(saved, name) != getattr(now, name)
    ]


def compiled_settings(
    objective: Objective, optimization: Optimization
) -> dict[str, str]:
    """Describe the settings of `compile`.

    They are taken when `compile` is called: a loss may count its calls in an attribute,
    and callbacks change learning rates.

    Args:
        objective: Losses and metrics.
        optimization: The optimiser and its schedule.

    Returns:
        Text by name. The code of functions isn't in it, only their names.
    """
    return {
        "loss": described(
            [(key, loss.name, loss.function) for key, loss in objective.losses]
        ),
        "loss_weights": described(objective.loss_weights),
        "metrics": described([(m.full_name, m.metric) for m in objective.measures]),
        **_optimizer_in_words(optimization.optimizer),
        "ema_momentum": described(optimization.ema_momentum),
        "lr_schedule": optimization.schedule,
        "per_batch_size": described(optimization.per_batch_size),
        "schedules": described(optimization.schedules),
    }


def _optimizer_in_words(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Describe the class of an optimiser and its settings."""
    settings: dict[str, Any] = {
        name: [group.get(name) for group in optimizer.param_groups]
        for name in optimizer.param_groups[0]
        if name not in NOT_SETTINGS
    }
    # Otherwise the same settings might go with other parameters.
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    settings["parameters per group"] = sizes
    for name, value in vars(optimizer).items():
        is_plain = isinstance(value, (bool, int, float, str, torch.dtype))
        if is_plain and not name.startswith("_"):
            settings[name] = value
    return {
        "optimizer": type(optimizer).__name__,
        **{f"optimizer's {n}": described(v) for n, v in sorted(settings.items())},
    }


def numeric_settings(config: IPUConfig) -> dict[str, Any]:
    """Return the fields of a config that change the numbers of a training.

    Example:
        >>> numeric_settings(IPUConfig(precision="16.16", partials="half"))
        {'precision': 'float16', 'float32_modules': (), 'stochastic_rounding': True, ...
    """
    return {
        "precision": config.types.word,
        "float32_modules": config.float32_patterns,
        "stochastic_rounding": bool(config.rounds_at_random),
        "partials": config.partials,
    }


def config_in_words(config: IPUConfig) -> dict[str, str]:
    """Describe the fields of a config that were set, for people.

    Example:
        >>> config_in_words(IPUConfig(replicas=2, pipeline=("a", "b")))
        {'replicas': '2', 'pipeline': "['a', 'b']"}
    """
    return {
        field.name: described(getattr(config, field.name), depth=1)
        for field in fields(config)
        if getattr(config, field.name) != field.default
    }


def described(value: Any, depth: int = _DEPTH) -> str:
    """Describe a value in words that are the same in every process.

    Args:
        value: A setting. Objects are described by their class and plain attributes,
            functions by their names, tensors by their values.
        depth: How many objects are described that are attributes of each other.

    Example:
        >>> described({"loss": torch.nn.MSELoss(), "n": (1, None)})
        "{'loss': MSELoss(reduction='mean'), 'n': [1, None]}"
    """
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    if isinstance(value, (Tensor, np.ndarray)):
        array = torch.as_tensor(value).detach().to(torch.float64)
        return f"array({array.tolist()})"
    if isinstance(value, (np.number, np.bool_)):
        return repr(value.item())
    if isinstance(value, Mapping):
        items = (f"{k!r}: {described(v, depth)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple, range)):
        return f"[{', '.join(described(one, depth) for one in value)}]"
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        return f"partial{described(parts, depth)}"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a function, or a class
        return name
    kind = type(value).__qualname__
    return f"{kind}({_attributes(value, depth - 1)})" if depth else kind


def _attributes(value: Any, depth: int) -> str:
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, torch.nn.Module):
        attributes.pop("training", None)
        attributes.update(value.named_buffers(recurse=False))
        attributes.update(value.named_children())
    return ", ".join(
        f"{name}={described(one, depth)}"
        for name, one in sorted(attributes.items())
        if not name.startswith("_")
    )
