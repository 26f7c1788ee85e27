# SPDX-License-Identifier: Apache-2.0
"""Fields of an `IPUConfig` that `evaluate` and `predict` may have other values of."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from ipufit.errors import ConfigError, UnknownNameError

from .automatic import AUTO

OVERRIDABLE = (
    "replicas",
    "pipeline",
    "layers_per_ipu",
    "execution",
    "loss_block",
    "stochastic_rounding",
    "partials",
    "available_memory_proportion",
    "num_io_tiles",
    "overlap_io",
    "prefetch_depth",
)
"""Fields that `IPUConfig(inference=...)` takes."""

_ELSEWHERE = {
    "ipus": "evaluate and predict use the stages of training, if no others are named",
    "device_iterations": "give IPUConfig(inference_iterations=...)",
    "micro_batch_size": "give batch_size to evaluate, predict or validation",
    "gradient_accumulation": "inference accumulates nothing",
    "precision": "the weights have one precision, in training and inference",
    "float32_modules": "they have one precision, in training and inference",
}


def check_inference(given: Any) -> dict[str, Any]:
    """Refuse what isn't a mapping of such fields.

    Returns:
        A copy.

    Raises:
        ConfigError: It is no mapping, or names a field that has one value for all.
        UnknownNameError: It names no field.

    Example:
        >>> check_inference({"execution": "sharded"})
        {'execution': 'sharded'}
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"inference={given!r} is no mapping: give values by the names of fields, "
            'as in inference={"execution": "sharded"}.'
        )
    for name in given:
        if name in _ELSEWHERE:
            raise ConfigError(f"inference has {name!r}: {_ELSEWHERE[name]}.")
        if name not in OVERRIDABLE:
            raise UnknownNameError("field of inference", str(name), OVERRIDABLE)
    if given.get("pipeline") == AUTO:
        raise ConfigError(
            "inference has pipeline='auto': evaluate and predict use the stages of "
            "training, if nothing else is given. Name others, or give None for one IPU."
        )
    return dict(given)


def changed_for_inference(config: Any) -> Any:
    """Make the `IPUConfig` of `evaluate` and `predict`, with what `inference` says.

    Other stages need another block for the loss: it is the last one again, unless
    `inference` names it. No pipeline in the place of one is a single stage.

    Args:
        config: An `IPUConfig` with a checked `inference`.

    Raises:
        ConfigError: The fields don't fit together.
    """
    changes = dict(config.inference)
    if not {"pipeline", "layers_per_ipu"}.isdisjoint(changes):
        names = "pipeline", "layers_per_ipu", "ipus", "loss_block"
        defaults: dict[str, Any] = dict.fromkeys(names)
        changes = {**defaults, **changes}
    if config.inference.get("pipeline", ()) is None and config.pipeline is not None:
        # All on one IPU, blocks that the model begins by name, too.
        names = tuple(name for stage in config.stages for name in stage)
        changes["pipeline"] = (names,) if names else None
    own = config.training_options
    if own is not None and own.Distributed.numProcesses > 1:
        changes["process_id"] = own.Distributed.processId
        changes["num_processes"] = own.Distributed.numProcesses
    # Of training alone; one replica of inference needn't share what isn't there.
    changes.update(inference=None, training_options=None, shard_optimizer=False)
    try:
        return dataclasses.replace(config, **changes)
    except ConfigError as error:
        raise ConfigError(f"With inference={config.inference!r}: {error}") from None
