# SPDX-License-Identifier: Apache-2.0
"""`pipeline="auto"`: stages that ipufit chooses, on a number of IPUs.

They are chosen from the costs of the model's submodules, which data show. Until then a
config has no names of stages.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence, TypeVar

from ipufit.errors import ConfigError

AUTO = "auto"
"""Leaves the stages to ipufit, or the number of their IPUs."""

ConfigT = TypeVar("ConfigT")
Config = Any
"""An `IPUConfig`, whose file has `resolved` as a method."""


def check_ipus(ipus: Any, pipeline: Any, *, has_own_options: bool) -> None:
    """Refuse a number of IPUs that nothing is divided over.

    Args:
        ipus: The value of the field.
        pipeline: The stages.
        has_own_options: Whether there are whole options of the user's.

    Raises:
        ConfigError: It is no number and not "auto", or stages aren't left open; or own
            options have stages of their own.

    Example:
        >>> check_ipus(4, ["encoder", "decoder"], has_own_options=False)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: ipus=4 goes with pipeline='auto', and pipeline=['e...
    """
    is_number = isinstance(ipus, int) and not isinstance(ipus, bool) and ipus > 0
    if ipus not in (None, AUTO) and not is_number:
        raise ConfigError(
            f"ipus={ipus!r} is neither a whole number of 1 or more nor 'auto'."
        )
    if pipeline != AUTO:
        if ipus is None:
            return
        raise ConfigError(
            f"ipus={ipus!r} goes with pipeline='auto', and pipeline={pipeline!r}. "
            "Stages with names have an IPU each, and a model without stages has one: "
            "leave ipus out, or give pipeline='auto'."
        )
    if has_own_options:
        raise ConfigError(
            "pipeline='auto' makes the execution strategy of the options, and whole "
            "options of your own have theirs. Give customize= instead, a function that "
            "changes the options that ipufit makes; or name the stages."
        )


def expected_ipus(pipeline: Any, ipus: Any) -> range:
    """The IPUs of the stages that are still to be chosen, as far as that is known.

    Example:
        >>> expected_ipus("auto", 4), expected_ipus("auto", "auto")
        (range(0, 4), range(0, 0))
    """
    is_known = pipeline == AUTO and isinstance(ipus, int)
    return range(ipus) if is_known else range(0)


def with_stages(config: ConfigT, names: Sequence[str]) -> ConfigT:
    """A config with the stages that were chosen, as if a user had named them.

    Args:
        config: Leaves its stages open.
        names: Name of the submodule that begins each stage. A single stage needs none.

    Example:
        >>> from ipufit import IPUConfig
        >>> with_stages(IPUConfig(pipeline="auto", ipus=2), ["0", "2"])
        IPUConfig(pipeline=['0', '2'])
    """
    pipeline = list(names) if len(names) > 1 else None
    changed: ConfigT = dataclasses.replace(config, pipeline=pipeline, ipus=None)  # type: ignore[type-var]
    return changed


def resolved(self: Config, model: Any, x: Any = None) -> Config:
    """This config with the names of the stages that `pipeline="auto"` stands for.

    They are those that `fit`, `evaluate` and `predict` of the model choose. So a config
    can be printed, kept and changed by hand. Nothing is compiled for it.

    Args:
        model: A compiled `IPUModel`; the optimizer's state counts for the memory.
        x: Data as for `fit`, of which shapes count; by default those of the model's
            last run.

    Returns:
        An equal config with `pipeline=[names]`, or without stages if there is one;
        itself if its stages aren't left open.

    Raises:
        ConfigError: There is no such data, or no such split.

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        >>> config = IPUConfig(pipeline="auto", ipus=2)
        >>> model = IPUModel(layers, config)
        >>> config.resolved(model, torch.zeros(8, 4))
        IPUConfig(pipeline=['0', '2'])
    """
    return model._resolved(self, x) if self.has_open_stages else self
