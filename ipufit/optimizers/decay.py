# SPDX-License-Identifier: Apache-2.0
"""Parameters that are spared the weight decay, or LAMB's trust ratio."""

from __future__ import annotations

import fnmatch
from typing import Any, Iterable, Sequence

import torch

from ipufit.errors import ConfigError

KINDS = ("bias", "norm")
"""Entries of `no_decay` that aren't patterns of names."""

_BOTH = "bias_and_norm"

_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    getattr(torch.nn, "RMSNorm", torch.nn.LayerNorm),  # torch 2.0 has none
)


def words(given: str | Sequence[str]) -> tuple[str, ...]:
    """Spell out what a user gave: one word or several, `"bias_and_norm"` as two.

    Example:
        >>> words("bias_and_norm"), words(["bias", "embed.*"])
        (('bias', 'norm'), ('bias', 'embed.*'))
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    several: tuple[str, ...] = (given,) if is_one else tuple(given)  # type: ignore[assignment]
    spelled = [KINDS if word == _BOTH else (word,) for word in several]
    return tuple(dict.fromkeys(word for some in spelled for word in some))


def spared(
    module: torch.nn.Module, no_decay: Sequence[str], argument: str = "no_decay"
) -> set[str]:
    """Find the parameters without weight decay.

    Args:
        module: The module that has the parameters.
        no_decay: `"bias"`: those whose last name part is `bias`. `"norm"`: those of
            normalisation layers, which are torch's and classes whose name ends in
            `Norm`. Anything else: a pattern of names, as in `fnmatch`.
        argument: Name of the user's argument, for messages.

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
                f"{argument} has {word!r}, which matches no parameter. Use 'bias', "
                "'norm', 'bias_and_norm' or patterns of names such as "
                f"{', '.join(repr(name) for name, _ in every[:3]) or 'head.*'}."
            )
        chosen |= found
    return {name for name, p in module.named_parameters() if id(p) in chosen}


def parameter_groups(
    module: torch.nn.Module,
    no_decay: Sequence[str],
    no_trust_ratio: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Make the parameter groups of an optimiser: with weight decay and without.

    Args:
        module: The module that has the parameters.
        no_decay: As for `spared`.
        no_trust_ratio: The same, for parameters that LAMB updates as Adam does: a
            `max_weight_norm` of 0 makes their trust ratio 1.

    Returns:
        One group to four, none of them empty. The first has the optimiser's own
        values; `weight_decay` or `max_weight_norm` is 0 in the others.

    Raises:
        ConfigError: No parameter matches one of the patterns.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 1), ["bias"])
        >>> [group.get("weight_decay") for group in groups]
        [None, 0.0]
    """
    undecayed = spared(module, no_decay)
    untrusted = spared(module, no_trust_ratio, "no_trust_ratio")
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for place in ((False, False), (True, False), (True, True), (False, True)):
        zeros = zip(("weight_decay", "max_weight_norm"), place)
        groups[place] = {
            "params": [],
            **{name: 0.0 for name, is_zero in zeros if is_zero},
        }
    for name, parameter in module.named_parameters():
        groups[name in undecayed, name in untrusted]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]] or [{"params": []}]


def groups_in_words(optimizer: torch.optim.Optimizer) -> str:
    """Say how many parameters each group has, and what sets it apart.

    Args:
        optimizer: One that has several groups of `parameter_groups`.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 3), ["bias"])
        >>> print(groups_in_words(torch.optim.AdamW(groups, weight_decay=0.1)))
        weight_decay 0.1: 1 parameter (6 values); weight_decay 0: 1 parameter (3 values)
    """
    groups = optimizer.param_groups
    parts = []
    for group in groups:
        own = [
            f"{name} {group[name]:g}"
            for name in ("weight_decay", "max_weight_norm")
            if len({one.get(name) for one in groups}) > 1
        ]
        number = _counted(len(group["params"]), "parameter")
        values = _counted(sum(p.numel() for p in group["params"]), "value")
        parts.append(f"{', '.join(own)}: {number} ({values})")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _matches(name: str, word: str) -> bool:
    if word == "bias":
        return name.rpartition(".")[2] == "bias"
    return fnmatch.fnmatchcase(name, word)


def _of_norms(module: torch.nn.Module) -> set[int]:
    return {
        id(parameter)
        for layer in module.modules()
        if is_norm(layer)
        for parameter in layer.parameters(recurse=False)
    }


def is_norm(layer: torch.nn.Module) -> bool:
    """Whether it is one of torch's normalisation layers, or named like one.

    Example:
        >>> is_norm(torch.nn.LayerNorm(2)), is_norm(torch.nn.Linear(2, 2))
        (True, False)
    """
    return isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm")
