# SPDX-License-Identifier: Apache-2.0
"""Checks of the fields of an `IPUConfig`, each by itself."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, Sequence

from ipufit._poptorch import poptorch
from ipufit.batching import check_positive
from ipufit.errors import ConfigError

from .precision import PRECISIONS

MOST_IPUS = 64
"""IPUs of one process (PopTorch, `CompilerImpl.cpp`: more need several processes)."""

IO_TILES = range(32, 193, 2)
"""Numbers of IO tiles that PopTorch takes."""

_CHOICES = {
    "precision": PRECISIONS,
    "execution": ("pipelined", "sharded"),
    "loader_mode": ("sync", "async", "async_rebatched"),
    "partials": (None, "half", "float"),
    "overlap_io": (None, "accumulation", "device_iterations"),
}


def check_fields(values: Mapping[str, Any]) -> None:
    """Refuse values that are out of range, or of a wrong type.

    Args:
        values: Values of the fields, by name.

    Raises:
        ConfigError: A value is unusable; the message names its field.

    Example:
        >>> check_fields({"seed": 0.5})
        Traceback (most recent call last):
        ipufit.errors.ConfigError: seed=0.5 is not a whole number.
    """
    for name, value in values.items():
        if name in _COUNTS and not (value is None and _COUNTS[name]):
            check_positive(name, value)
        choices = _CHOICES.get(name, (value,))
        if value not in choices:
            known = ", ".join(map(repr, choices))
            is_bfloat16 = name == "precision" and "bf" in str(value).lower()
            why = " IPUs have no bfloat16: use 'float16'." if is_bfloat16 else ""
            raise ConfigError(f"{name}={value!r} is none of {known}.{why}")
        is_valid, fault = _KINDS.get(name, (_is_anything, ""))
        if not is_valid(value):
            raise ConfigError(f"{name}={value!r} is {fault}.")


def check_process(process_id: int | None, num_processes: int | None) -> None:
    """Refuse one field without the other, and a number that is too large.

    Raises:
        ConfigError: The fields don't fit together.

    Example:
        >>> check_process(0, None)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: process_id=0 and num_processes=None: give both, or...
    """
    if (process_id is None) != (num_processes is None):
        raise ConfigError(
            f"process_id={process_id} and num_processes={num_processes}: give both, or "
            "neither to go by the launcher's variables."
        )
    if process_id is None or num_processes is None:
        return
    if process_id < 0 or process_id >= num_processes:
        raise ConfigError(
            f"process_id={process_id} of num_processes={num_processes}: processes "
            f"count from 0 to {num_processes - 1}."
        )


def check_num_ipus(replicas: int, stage_ipus: Sequence[int]) -> None:
    """Refuse more IPUs than one process can have, as far as is known now.

    Args:
        replicas: Replicas of one process.
        stage_ipus: IPU of each stage in a replica; empty if unknown.

    Raises:
        ConfigError: The replicas need more IPUs than that.

    Example:
        >>> check_num_ipus(64, (0, 1))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: replicas=64 with 2 IPUs each, its stages, need 128...
    """
    per_replica = len(set(stage_ipus)) or 1
    total = replicas * per_replica
    if total > MOST_IPUS:
        each = f" with {per_replica} IPUs each, its stages" if stage_ipus else ""
        raise ConfigError(
            f"replicas={replicas}{each}, need {total} IPUs, and a process has "
            f"{MOST_IPUS} at most. Use {MOST_IPUS // per_replica} replicas or fewer, "
            "or fewer stages; gradient_accumulation makes batches larger without more "
            "IPUs."
        )


def _is_anything(value: object) -> bool:
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _is_patterns(value: object) -> bool:
    """Whether it is a pattern of names, or several."""
    if isinstance(value, str):
        return bool(value)
    is_listed = isinstance(value, (tuple, list)) and bool(value)
    return is_listed and all(isinstance(one, str) and one for one in value)  # type: ignore[attr-defined]


def _none_or(*types: Any) -> Callable[[object], bool]:
    return lambda value: value is None or isinstance(value, types)


_COUNTS = {  # whether None is fine too
    "micro_batch_size": True,
    "gradient_accumulation": True,
    "inference_iterations": True,
    "replicas": True,
    "device_iterations": True,
    "num_processes": True,
    "prefetch_depth": True,
}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_workers": (
        lambda value: _is_whole(value) and value >= 0,
        "not a whole number of 0 or more",
    ),
    **{
        name: (lambda value: isinstance(value, bool), "neither True nor False")
        for name in ("offload_optimizer", "shard_optimizer", "offline")
    },
    "stochastic_rounding": (_none_or(bool), "none of True, False and None"),
    "num_io_tiles": (
        lambda value: value is None or (_is_whole(value) and value in IO_TILES),
        "not an even number from 32 to 192",
    ),
    "recompute": (
        lambda value: value is None or _is_patterns(value),
        "neither 'auto', 'off' nor names or patterns of submodules",
    ),
    "float32_modules": (
        lambda value: value is None or _is_patterns(value),
        "neither 'norm', 'loss' nor names or patterns of submodules",
    ),
    "cache_dir": (
        lambda value: value is None or _is_path(value),
        "not a path",
    ),
    "customize": (
        lambda value: value is None or callable(value),
        "not a function of options and whether they train",
    ),
    "loss_block": (_none_or(str), "not a block's name"),
    "profile_dir": (_none_or(str, os.PathLike), "not a path"),
    "seed": (lambda value: value is None or _is_whole(value), "not a whole number"),
    "process_id": (
        lambda value: value is None or _is_whole(value),
        "not a whole number",
    ),
    "training_options": (_none_or(poptorch.Options), "not a poptorch.Options"),
    "inference_options": (_none_or(poptorch.Options), "not a poptorch.Options"),
}
