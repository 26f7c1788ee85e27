# SPDX-License-Identifier: Apache-2.0
"""Parameters that are trained, that decay, and that have a trust ratio."""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import torch

from ipufit.errors import ConfigError, UnknownNameError


@dataclass(frozen=True)
class Frozen:
    """The counts of parameters that `freeze` has frozen, with a sentence as text.

    Attributes:
        before: Name of the first layer that is trained.
        parameters: Number of parameters that are frozen.
        values: Number of values in them.
        trained_parameters: Number of parameters that are trained.
        trained_values: Number of values in these.
    """

    before: str
    parameters: int
    values: int
    trained_parameters: int
    trained_values: int

    def __str__(self) -> str:
        """Return the counts as a sentence."""
        return (
            f"Frozen before {self.before!r}: {self.parameters:,} parameters "
            f"({self.values:,} values); trained: {self.trained_parameters:,} "
            f"({self.trained_values:,} values)"
        )


def freeze(module: torch.nn.Module, *, before: str, statistics: bool = False) -> Frozen:
    """Freeze the parameters of all layers before a named one.

    Layers come in the order in which the module was given them, as
    `module.named_modules()` has them; the named layer and those after it are left as
    they are. A parameter that a later layer shares with an earlier one is frozen. Call
    it before `fit`; `compile` needn't be called again.

    A frozen layer still behaves as in training: a batch norm normalises by the batch,
    and its running statistics move. With `statistics=True` frozen layers are in eval
    mode, and the module in train mode, which `fit` keeps: batch norms use their
    statistics and leave them, and dropout does nothing.

    Args:
        module: The user's module.
        before: Name of the first layer that is trained, such as "layer3" or
            "encoder.layer.8".
        statistics: Whether frozen layers are put into eval mode, too.

    Returns:
        The numbers of parameters; `print` shows a sentence.

    Raises:
        UnknownNameError: The module has no such layer; the nearest is suggested.
        ConfigError: No layer with parameters comes before it; or `module` is none.

    Example:
        >>> from torch import nn
        >>> module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> print(freeze(module, before="2"))
        Frozen before '2': 4 parameters (15 values); trained: 2 (4 values)
    """
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"freeze() got a {type(module).__name__}, which is no torch.nn.Module. "
            "The module of an IPUModel is model.module."
        )
    names = [name for name, _ in module.named_modules() if name]
    if before not in names:
        near = difflib.get_close_matches(str(before), names, n=5)
        known = near or [name for name, _ in module.named_children()]
        raise UnknownNameError("layer", str(before), known)
    kept = {id(layer) for layer in module.get_submodule(before).modules()}
    chosen: dict[int, torch.nn.Parameter] = {}
    layers = []
    for name, layer in module.named_modules():
        if name == before:
            break
        contains_it = not name or before.startswith(f"{name}.")
        if not contains_it and id(layer) not in kept:
            layers.append(layer)
        # The own parameters of what contains the named layer come before it.
        chosen.update({id(p): p for p in layer.parameters(recurse=False)})
    if not chosen:
        raise ConfigError(
            f"Nothing with parameters comes before {before!r}: nothing was frozen. "
            f"Layers are, in this order: {', '.join(names)}."
        )
    for parameter in chosen.values():
        parameter.requires_grad_(False)
    if statistics:
        if not module.training:  # else `fit` would take no part of it for frozen
            module.train()
        for layer in layers:
            layer.training = False
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen_values = sum(p.numel() for p in chosen.values())
    trained_values = sum(p.numel() for p in trained)
    return Frozen(before, len(chosen), frozen_values, len(trained), trained_values)


def check_covers(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Refuse to train weights that the optimiser wasn't given.

    torch would leave them as they are; PopTorch trains them with the optimiser's
    defaults (PopTorch, `CompilerImpl.cpp`), which nobody expects.

    Raises:
        ConfigError: A trainable parameter is in none of the groups.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> check_covers(torch.optim.SGD([module.weight], lr=0.1), module)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: bias: trainable, but not among the optimizer's ...
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [
        name
        for name, p in module.named_parameters()
        # In this order: who looks at a weight that is trained has all of them fetched.
        if id(p) not in given and p.requires_grad
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: trainable, but not among the optimizer's "
            "parameters. An IPU would train them with the optimizer's defaults. Freeze "
            "them with requires_grad_(False), or give them to the optimizer."
        )


_NORMS = (
    torch.nn.modules.batchnorm._NormBase,  # batch and instance norms
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    getattr(torch.nn, "RMSNorm", torch.nn.LayerNorm),  # torch 2.0 has none
)


def is_norm(layer: torch.nn.Module) -> bool:
    """Return whether a layer is one of torch's normalisation layers, or named like one.

    Example:
        >>> is_norm(torch.nn.LayerNorm(2)), is_norm(torch.nn.Linear(2, 2))
        (True, False)
    """
    return isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm")


def words(given: str | Sequence[str]) -> tuple[str, ...]:
    """Split a user's words into a tuple; `"bias_and_norm"` becomes two words.

    Example:
        >>> words("bias_and_norm"), words(["bias", "embed.*"])
        (('bias', 'norm'), ('bias', 'embed.*'))
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    several: tuple[str, ...] = (given,) if is_one else tuple(given)  # type: ignore[assignment]
    both = ("bias", "norm")
    spelled = [both if word == "bias_and_norm" else (word,) for word in several]
    return tuple(dict.fromkeys(word for some in spelled for word in some))


def spared(
    module: torch.nn.Module, no_decay: Sequence[str], argument: str = "no_decay"
) -> set[int]:
    """Return the ids of parameters without weight decay.

    Args:
        module: The module that has the parameters.
        no_decay: `"bias"`: parameters whose last name part is `bias`. `"norm"`:
            parameters of normalisation layers, which are torch's and classes whose name
            ends in `Norm`. Any other word is a pattern of names, as in `fnmatch`.
        argument: Name of the user's argument, for messages.

    Raises:
        ConfigError: No parameter matches one of the patterns.
    """
    # A tied parameter is spared by any of its names.
    every = list(module.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for word in no_decay:
        if word == "norm":
            norms = filter(is_norm, module.modules())
            chosen.update(id(p) for n in norms for p in n.parameters(recurse=False))
        elif word == "bias":
            chosen.update(id(p) for n, p in every if n.rpartition(".")[2] == "bias")
        else:
            found = {id(p) for n, p in every if fnmatch.fnmatchcase(n, word)}
            if not found:
                raise ConfigError(
                    f"{argument} has {word!r}, which matches no parameter. Use 'bias', "
                    "'norm', 'bias_and_norm' or patterns of names such as "
                    f"{', '.join(repr(name) for name, _ in every[:3]) or 'head.*'}."
                )
            chosen |= found
    return chosen


def parameter_groups(
    module: torch.nn.Module,
    no_decay: Sequence[str],
    no_trust_ratio: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimiser: with weight decay and without.

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
    groups: dict[tuple[bool, bool], dict[str, Any]] = {
        (False, False): {"params": []},
        (True, False): {"params": [], "weight_decay": 0.0},
        (True, True): {"params": [], "weight_decay": 0.0, "max_weight_norm": 0.0},
        (False, True): {"params": [], "max_weight_norm": 0.0},
    }
    for parameter in module.parameters():
        key = id(parameter)
        groups[key in undecayed, key in untrusted]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]] or [{"params": []}]


def groups_in_words(optimizer: torch.optim.Optimizer) -> str:
    """Describe how many parameters each group has, and which settings differ.

    Args:
        optimizer: An optimizer with several groups of `parameter_groups`.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 3), ["bias"])
        >>> print(groups_in_words(torch.optim.AdamW(groups, weight_decay=0.1)))
        weight_decay 0.1: 1 parameter (6 values); weight_decay 0: 1 parameter (3 values)
    """

    def counted(number: int, noun: str) -> str:
        return f"{number:,} {noun}{'' if number == 1 else 's'}"

    groups = optimizer.param_groups
    parts = []
    for group in groups:
        own = [
            f"{name} {group[name]:g}"
            for name in ("weight_decay", "max_weight_norm")
            if len({one.get(name) for one in groups}) > 1
        ]
        number = counted(len(group["params"]), "parameter")
        values = counted(sum(p.numel() for p in group["params"]), "value")
        parts.append(f"{', '.join(own)}: {number} ({values})")
    return "; ".join(parts)
