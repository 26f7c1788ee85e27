# SPDX-License-Identifier: Apache-2.0
"""The user's own options of PopTorch: those that contradict a config, and `customize`.

PopTorch has no public getters for most settings; `Options.toDict()` shows them all.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

Customize = Callable[[poptorch.Options, bool], Any]
"""Changes options, or makes others of them; it is told whether they train."""


class _Made(NamedTuple):
    """A field's setter of PopTorch, and the names of its value in `toDict`."""

    setter: str
    keys: tuple[str, ...]


_TRAINING = {
    "gradient_accumulation": _Made(
        "Training.gradientAccumulation", ("gradient_accumulation",)
    ),
    "device_iterations": _Made("deviceIterations", ("device_iterations",)),
    "offload_optimizer": _Made(
        "TensorLocations.setOptimizerLocation", ("location_optimizer",)
    ),
    "shard_optimizer": _Made(
        "TensorLocations.setOptimizerLocation", ("location_optimizer",)
    ),
    "precision": _Made(
        "Precision.enableStochasticRounding", ("enableStochasticRounding",)
    ),
    "profile_dir": _Made("enableProfiling", ("engineOptions",)),
    "recompute": _Made("_Popart.set('autoRecomputation')", ("autoRecomputation",)),
}
_SHARED = {
    "replicas": _Made("replicationFactor", ("replication_factor",)),
    "execution": _Made("setExecutionStrategy", ("execution_mode",)),
    "overlap_io": _Made("setExecutionStrategy", ("execution_mode",)),
    "available_memory_proportion": _Made(
        "setAvailableMemoryProportion", ("available_memory_proportion",)
    ),
    "partials": _Made(
        "Precision.setPartialsType", ("partialsTypeMatMuls", "convolutionOptions")
    ),
    "stochastic_rounding": _Made(
        "Precision.enableStochasticRounding", ("enableStochasticRounding",)
    ),
    "num_io_tiles": _Made("TensorLocations.numIOTiles", ("numIOTiles",)),
    "prefetch_depth": _Made(
        "_Popart.set('defaultPrefetchBufferingDepth')",
        ("defaultPrefetchBufferingDepth",),
    ),
    "cache_dir": _Made("enableExecutableCaching", ("enableEngineCaching", "cachePath")),
    "offline": _Made("useOfflineIpuTarget", ("ipu_version",)),
    "seed": _Made("randomSeed", ("random_seed",)),
}
_INFERENCE = {
    "inference_iterations": _Made("deviceIterations", ("device_iterations",)),
}
MADE_FOR_TRAINING = {**_TRAINING, **_SHARED}
"""Fields that options for training are made of."""

MADE_FOR_INFERENCE = {**_INFERENCE, **_SHARED}
"""Fields that options for inference are made of."""

_PLANNED = {
    "deviceIterations": "device_iterations",
    "replicationFactor": "replication_factor",
    "Training.gradientAccumulation": "gradient_accumulation",
    "Distributed.configureProcessId": "distributed_process_id",
    "Distributed.setEnvVarNames": "num_distributed_processes",
}
"""What data are laid out by: setters, and names in `toDict`."""

_MERGED = ("engineOptions", "convolutionOptions", "matmulOptions")
"""Dicts that a setter of PopTorch replaces as a whole."""


def check_own_options(
    name: str,
    own: poptorch.Options,
    derived: poptorch.Options,
    given: Mapping[str, Any],
) -> None:
    """Refuse own options that leave out, or contradict, what a field asks for.

    Args:
        name: Field of the own options.
        own: The user's options.
        derived: The options that would be made of the fields.
        given: Values of the fields that were given and that such options are made of.

    Raises:
        ConfigError: A field asks for something else than the own options have.

    Example:
        >>> asked = poptorch.Options().replicationFactor(4)
        >>> check_own_options(
        ...     "training_options", poptorch.Options(), asked, {"replicas": 4}
        ... )
        Traceback (most recent call last):
        ipufit.errors.ConfigError: replicas=4, but training_options have replicat...
    """
    has, asks = settings_of(own), settings_of(derived)
    is_inference = name == "inference_options"
    made = MADE_FOR_INFERENCE if is_inference else MADE_FOR_TRAINING
    for field, value in given.items():
        for key in made[field].keys:
            if _holds(has.get(key), asks.get(key)):
                continue
            if field == "seed" and key not in has:
                continue  # the config's is added
            setter = f"options.{made[field].setter}(...)"
            raise ConfigError(
                f"{field}={value!r}, but {name} have {key}={has.get(key)!r} where "
                f"that makes it {asks.get(key)!r}. Own options are taken whole: call "
                f"{setter} on them and leave {field} at its default; or give "
                "customize=, a function that changes the options which ipufit makes, "
                f"instead of {name}."
            )


def settings_of(options: poptorch.Options) -> dict[str, Any]:
    """All settings of options, by PopTorch's names.

    PopTorch shows none until a mode of outputs is chosen; the options stay as they are.

    Example:
        >>> settings_of(poptorch.Options().deviceIterations(3))["device_iterations"]
        3
    """
    if options.defaultOutputMode():
        options = options.clone().outputMode(poptorch.OutputMode.All)
    settings: dict[str, Any] = options.toDict()
    return settings


def _holds(has: Any, asked: Any) -> bool:
    """Whether options have what is asked for, and maybe more."""
    if isinstance(has, dict) and isinstance(asked, dict):
        return all(has.get(key) == value for key, value in asked.items())
    return bool(has == asked) or (has is None and not asked)


def customized(
    customize: Customize | None, options: poptorch.Options, *, is_training: bool
) -> poptorch.Options:
    """Have the user change options that ipufit has made.

    Engine options, and those of convolutions and matrix products, are merged with the
    ones that were there: PopTorch's setters replace all of them.

    Args:
        customize: Changes them in place, or returns other `poptorch.Options` to use.
        options: Options with all that ipufit sets.
        is_training: Whether they are for training.

    Raises:
        ConfigError: The factors that data are laid out by have changed, or a plain
            value came back.

    Example:
        >>> own = lambda options, is_training: options.modelName("mine")
        >>> options = poptorch.Options().outputMode(poptorch.OutputMode.All)
        >>> customized(own, options, is_training=True).toDict()["model_name"]
        'mine'
    """
    if customize is None:
        return options
    before = settings_of(options)
    kept = {key: dict(before[key]) for key in _MERGED if key in before}
    planned = {key: before.get(key) for key in _PLANNED.values()}
    given = customize(options, is_training)
    if isinstance(given, (bool, int, float, str, tuple, list, Mapping)):
        raise ConfigError(
            f"customize returned {given!r}: have it change the options that it gets, "
            "and return nothing, or other poptorch.Options."
        )
    if isinstance(given, poptorch.Options):  # setters return parts of options, too
        options = given
    after = settings_of(options)
    for setter, key in _PLANNED.items():
        if after.get(key) != planned[key]:
            raise ConfigError(
                f"customize has set {key} to {after.get(key)!r}, and data are laid out "
                f"for {planned[key]!r}: leave options.{setter}(...) to ipufit, and "
                "give the fields of IPUConfig (device_iterations, replicas, "
                "gradient_accumulation, process_id)."
            )
    for key, values in kept.items():
        merged = {**values, **after.get(key, {})}
        if merged != after.get(key):
            options._Popart.set(key, merged)
    return options
