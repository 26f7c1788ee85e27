# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model, each with its targets and weights."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Union

from torch import Tensor

from ipufit._tree import is_record, parts_of
from ipufit.data import Labels
from ipufit.errors import ConfigError, UnsupportedError

from .outputs import bare, named_outputs, only, part_of

OutputKey = Union[str, int, None]
"""Name or position of the output that a loss or metric is for; None for all outputs."""


class Part(NamedTuple):
    """One output with its labels.

    Attributes:
        name: Name of the output; empty if the model has one output.
        output: Tensor, or what else the module returns there.
        target: Target of the same output.
        weights: Weights of its samples; None without weights.
    """

    name: str
    output: Any
    target: Any
    weights: Tensor | None


def find_parts(
    key: OutputKey,
    outputs: Any,
    labels: Labels,
    loss_keys: Sequence[OutputKey],
    *,
    splits: bool,
    is_named: bool,
) -> list[Part]:
    """Find the outputs that a loss or metric is for.

    Args:
        key: The output that it was given for.
        outputs: Everything that the module returned.
        labels: Targets and weights.
        loss_keys: Outputs that losses are given for.
        splits: Without a key it is for each of several outputs, not for all at once.
        is_named: It has a name, such as "mse", and takes the only tensor of an object;
            a function of the user's takes the object.

    Raises:
        ConfigError: The model has no such output.
        DataError: There are no targets for it.
        UnsupportedError: Weights are per output, and the outputs are taken at once.
    """
    several = named_outputs(outputs)
    if several is None:
        _check_single(key, outputs)
        output = bare(outputs) if is_named or key is not None else only(outputs)
        return [Part("", output, only(labels.targets), only(labels.weights))]
    weights = labels.weights
    if key is None and not splits:
        if weights is not None and not isinstance(weights, Tensor):
            raise UnsupportedError(
                "Sample weights are given per output, and a loss or metric takes "
                "all outputs at once: give losses and metrics per output too."
            )
        return [Part("", outputs, labels.targets, weights)]
    names, parts = list(several), []
    for name in _names_of(key, names, labels.targets):
        position = names.index(name)
        target = labels.targets
        if not (isinstance(target, Tensor) and loss_keys in ([name], [position])):
            target = part_of(target, name, position, len(names), "targets")
        its = weights
        if weights is not None and not isinstance(weights, Tensor):
            its = part_of(weights, name, position, len(names), "sample weights")
        parts.append(Part(name, several[name], target, its))
    return parts


def _names_of(key: OutputKey, names: list[str], targets: Any) -> list[str]:
    """Names of the outputs that a key means: without a key, of those with targets."""
    if key is None:
        with_targets = targets if isinstance(targets, dict) else names
        return [name for name in names if name in with_targets] or names
    if isinstance(key, str):
        _check_key(key, names)
        return [key]
    if key >= len(names):
        raise ConfigError(
            f"A loss or metric is given for output {key + 1}, and the model "
            f"returns {len(names)}: {', '.join(names)}."
        )
    return [names[key]]


def _check_single(key: OutputKey, outputs: Any) -> None:
    if isinstance(key, int) and key > 0:
        raise ConfigError(
            f"A loss or metric is given for output {key + 1}, and the model returns "
            "one."
        )
    if isinstance(key, str) and (isinstance(outputs, dict) or is_record(outputs)):
        _check_key(key, list(parts_of(outputs)))


def _check_key(key: str, names: Sequence[Any]) -> None:
    if key not in names:
        raise ConfigError(
            f"A loss or metric is given for output {key!r}, and the model returns "
            f"{', '.join(map(str, names))}."
        )
