# SPDX-License-Identifier: Apache-2.0
"""Parameters that are spared the weight decay."""

from __future__ import annotations

import fnmatch
from typing import Any, Sequence

import torch

from ipufit.errors import ConfigError

KINDS = ("bias", "norm")
"""Entries of `no_decay` that aren't patterns of names."""

_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    getattr(torch.nn, "RMSNorm", torch.nn.LayerNorm),  # torch 2.0 has none
)


def spared(module: torch.nn.Module, no_decay: Sequence[str]) -> set[str]:
    """Find the parameters without weight decay.

    Args:
        module: The module that has the parameters.
        no_decay: `"bias"`: those whose last name part is `bias`. `"norm"`: those of
            normalisation layers, which are torch's and classes whose name ends in
            `Norm`. Anything else: a pattern of names, as in `fnmatch`.

    Returns:
        Names as in `module.named_parameters()`.

    Raises:
        ConfigError: No parameter matches one of the patterns.

    Example:
        >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> sorted(spared(module, ["bias"]))
        ['0.bias', '1.bias']
        >>> sorted(spared(module, ["norm"]))
        ['1.bias', '1.weight']
    """
    # A tied parameter is spared by any of its names.
    every = list(module.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for word in no_decay:
        if word == "norm":
            chosen |= _of_norms(module)
            continue
        found = {id(parameter) for name, parameter in every if _matches(name, word)}
        if not found and word not in KINDS:
            raise ConfigError(
                f"no_decay has {word!r}, which matches no parameter. Use 'bias', "
                "'norm' or patterns of names such as "
                f"{', '.join(repr(name) for name, _ in every[:3]) or 'head.*'}."
            )
        chosen |= found
    return {name for name, p in module.named_parameters() if id(p) in chosen}


def parameter_groups(
    module: torch.nn.Module, no_decay: Sequence[str]
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimiser: with weight decay and without.

    Args:
        module: The module that has the parameters.
        no_decay: As for `spared`.

    Returns:
        One group or two, none of them empty. The one without has `weight_decay` 0.

    Raises:
        ConfigError: No parameter matches one of the patterns.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 1), ["bias"])
        >>> [group.get("weight_decay") for group in groups]
        [None, 0.0]
    """
    names = spared(module, no_decay)
    with_decay: list[torch.nn.Parameter] = []
    without: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (without if name in names else with_decay).append(parameter)
    groups: list[dict[str, Any]] = [{"params": with_decay}]
    if without:
        groups.append({"params": without, "weight_decay": 0.0})
    return [group for group in groups if group["params"]] or groups


def _matches(name: str, word: str) -> bool:
    if word == "bias":
        return name.rpartition(".")[2] == "bias"
    return fnmatch.fnmatchcase(name, word)


def _of_norms(module: torch.nn.Module) -> set[int]:
    return {
        id(parameter)
        for layer in module.modules()
        if isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm")
        for parameter in layer.parameters(recurse=False)
    }
