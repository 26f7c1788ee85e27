# SPDX-License-Identifier: Apache-2.0
"""What a run was told, in words: to tell one that goes on from another run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from ipufit.config import IPUConfig
from ipufit.errors import ConfigError
from ipufit.optimizers import Updates

from .objective import Objective

_DEPTH = 4


def settings_of(
    objective: Objective, updates: Updates, fitted: Mapping[str, Any]
) -> dict[str, str]:
    """The settings on which a run's numbers depend, each in words.

    Plan, data, module, optimiser and callbacks are compared by themselves.

    Args:
        objective: Losses and metrics.
        updates: The optimiser and its schedule.
        fitted: Arguments of `fit`, by name.

    Returns:
        Text by name. The code of functions isn't in it, only their names.
    """
    return {
        "loss": described(
            [(key, loss.name, loss.function) for key, loss in objective.losses]
        ),
        "loss_weights": described(objective.loss_weights),
        "metrics": described([(m.full_name, m.metric) for m in objective.measures]),
        "lr_schedule": updates.schedule,
        **{name: described(value) for name, value in fitted.items()},
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
    """What differs.

    Args:
        saved: From `settings_of`; names that this version doesn't know are passed over.
        now: The same.

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
            functions by their names, tensors by what they hold.
        depth: Of attributes that are objects.

    Example:
        >>> described({"loss": torch.nn.MSELoss(), "n": (1, None)})
        "{'loss': MSELoss(reduction='mean'), 'n': [1, None]}"
    """
    if value is None or isinstance(value, (bool, int, float, str)):
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


def refuse(differences: list[str]) -> None:
    """Refuse to go on with another run's state.

    Raises:
        ConfigError: There are differences.
    """
    if differences:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(differences)}. Use the "
            "settings and data that it began with; or, to train on from what was "
            "learnt, model.load(path) and fit() without resume."
        )
