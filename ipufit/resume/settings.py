# SPDX-License-Identifier: Apache-2.0
"""Settings in words, by which a run that goes on is known from another run."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit.config import IPUConfig
from ipufit.engine import Objective
from ipufit.optimizers import Optimization

_DEPTH = 4
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


def compiled_settings(
    objective: Objective, optimization: Optimization
) -> dict[str, str]:
    """The settings of `compile` in words.

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
    """The class of an optimiser, and each setting of its groups and of the whole."""
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
    """The fields of a config that change the numbers of a training.

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
    """The fields of a config that were set, for people who look into a checkpoint.

    Example:
        >>> config_in_words(IPUConfig(replicas=2, pipeline=("a", "b")))
        {'replicas': '2', 'pipeline': "['a', 'b']"}
    """
    return {
        field.name: described(getattr(config, field.name), depth=1)
        for field in fields(config)
        if getattr(config, field.name) != field.default
    }


def check_settings(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences between settings.

    Args:
        saved: Settings by name; those that this version doesn't know are passed over.
        now: Settings by name.

    Returns:
        Sentences without an end, such as `"shuffle was True and is False"`.

    Example:
        >>> check_settings({"shuffle": "True"}, {"shuffle": "False"})
        ['shuffle was True and is False']
    """
    return [
        f"{name} was {saved[name]} and is {text}"
        for name, text in now.items()
        if name in saved and saved[name] != text
    ]


def described(value: Any, depth: int = _DEPTH) -> str:
    """A value in words that are the same in every process.

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
