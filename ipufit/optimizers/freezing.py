# SPDX-License-Identifier: Apache-2.0
"""Freezing of the layers that come before a named one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from ipufit.errors import ConfigError, UnknownNameError


@dataclass(frozen=True)
class Frozen:
    """Numbers of what `freeze` has frozen, and a sentence of them as text.

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
        """Say it in a sentence."""
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
    return Frozen(
        before,
        len(chosen),
        sum(p.numel() for p in chosen.values()),
        len(trained),
        sum(p.numel() for p in trained),
    )
