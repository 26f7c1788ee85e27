# SPDX-License-Identifier: Apache-2.0
"""Describe the settings of a run in words, which a resumed run must share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit.config import IPUConfig
from ipufit.engine.objective import Objective
from ipufit.optimizers import Optimization

_DEPTH = 4


def compiled_settings(
    objective: Objective, optimization: Optimization
) -> dict[str, str]:
    """Describe the settings of `compile`.

    Called by `compile`, before a run changes the settings: a loss may count its calls
    in an attribute, and callbacks change learning rates.

    Args:
        objective: Losses and metrics.
        optimization: The optimizer and its schedule.

    Returns:
        The settings in words, by name. Functions are described by their names only.
    """
    return {
        "loss": described(
            [(key, loss.name, loss.function) for key, loss in objective.losses]
        ),
        "loss_weights": described(objective.loss_weights),
        "metrics": described([m.full_name for m in objective.metrics]),
        "settings of metrics": described([m.metric for m in objective.metrics]),
        "optimizer": type(optimization.optimizer).__name__,
        **{
            f"optimizer's {name}": described(value)
            for name, value in sorted(optimization.values.settings.items())
        },
        "ema_momentum": described(optimization.ema_momentum),
        "lr_schedule": optimization.schedule,
        "schedules": described(optimization.schedules),
    }


def numeric_settings(config: IPUConfig) -> dict[str, Any]:
    """Return the fields of a config that change the numbers that training computes.

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
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }


def described(value: Any, depth: int = _DEPTH) -> str:
    """Describe a value in words that are the same in every process.

    Args:
        value: A setting. Objects are described by their class and plain attributes,
            functions by their names, tensors by their values.
        depth: Number of levels of attributes of attributes that are described.

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
