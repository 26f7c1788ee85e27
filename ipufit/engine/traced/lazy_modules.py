# SPDX-License-Identifier: Apache-2.0
"""Lazy modules, such as `torch.nn.LazyLinear`: their weights get shapes from data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ipufit.data import Source
from ipufit.engine.weights.modes import mode
from ipufit.engine.weights.precision import change_types
from ipufit.errors import ConfigError

from .calling import call_module


def give_shapes(module: torch.nn.Module, source: Source) -> None:
    """Run a sample through a module if some of its weights have no shapes yet.

    PopTorch needs shapes. The sample is run on the host, in eval mode and without
    gradients, so torch draws the first weights and nothing else.

    Args:
        source: Source of samples; its first one is taken.

    Raises:
        ConfigError: Some weights still have no shapes.
        DataError: `forward` can't take such a sample.

    Example:
        >>> from ipufit.data import as_source
        >>> module = torch.nn.LazyLinear(3)
        >>> give_shapes(module, as_source(torch.zeros(4, 2)))
        >>> module
        Linear(in_features=2, out_features=3, bias=True)
    """
    if not lazy_layers(module):
        return
    leaves = [_as_on_devices(leaf) for leaf in source.example(1, inputs_only=True)]
    weights = [*module.named_parameters(), *module.named_buffers()]
    in_half = {name for name, weight in weights if weight.dtype == torch.float16}
    if in_half:  # in which many operations exist on devices only
        module.float()
    try:
        with mode(module, training=False), torch.no_grad():
            call_module(module, source.structure.inputs.rebuild(leaves))
    finally:
        if in_half:
            now = [*module.named_parameters(), *module.named_buffers()]
            halves = {id(one): torch.float16 for name, one in now if name in in_half}
            change_types(module, halves)
    left = lazy_layers(module)
    if left:
        raise ConfigError(
            f"The weights of {', '.join(left)} have no shapes, after a sample was run "
            "through the module: forward doesn't call these lazy layers. Call them, or "
            "take them out."
        )


def check_shapes(module: torch.nn.Module) -> None:
    """Refuse a module whose weights have no shapes yet.

    Raises:
        ConfigError: No sample has been run through the module's lazy layers.

    Example:
        >>> check_shapes(torch.nn.LazyLinear(3))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: The weights of LazyLinear have no shapes yet: ...
    """
    lazy = lazy_layers(module)
    if lazy:
        raise ConfigError(
            f"The weights of {', '.join(lazy)} have no shapes yet: run a sample "
            "through the module first, as model.summary(x), fit, evaluate and predict "
            "do."
        )


def lazy_layers(module: torch.nn.Module) -> list[str]:
    """Names of the layers that have weights without shapes; the class of the module.

    Only types of weights are looked at: PopTorch fetches all weights from the device
    when somebody touches one that it trains.
    """
    return [
        name or type(module).__name__
        for name, layer in module.named_modules()
        if any(
            issubclass(type(tensor), (UninitializedBuffer, UninitializedParameter))
            for tensors in (layer._parameters, layer._buffers)
            for tensor in tensors.values()
        )
    ]


def _as_on_devices(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float32) if leaf.is_floating_point() else leaf
