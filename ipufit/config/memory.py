# SPDX-License-Identifier: Apache-2.0
"""Where tensors live on IPUs, and what memory computing may take."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

from .checks import MOST_IPUS

Config = Any
"""An `IPUConfig`, whose file imports this one."""

RECOMPUTE_WORDS = ("auto", "off")
"""Values of `recompute` that aren't patterns of names."""

# PopART's RecomputationType (`willow/include/popart/sessionoptions.hpp`).
_NO_RECOMPUTATION, _STANDARD, _PIPELINE, _RECOMPUTE_ALL = 0, 1, 3, 4

PARTIALS = {"half": torch.half, "float": torch.float}


def memory_proportions(given: Any, stage_ipus: Sequence[int]) -> dict[str, float]:
    """The share of memory of each IPU for temporary data.

    Args:
        given: A number for all IPUs, a sequence of one per IPU, or None for PopTorch's
            default.
        stage_ipus: IPU of each stage in a replica; empty if unknown. A model that
            begins blocks itself may have any number of them, so that one number is
            given to as many as there can be: PopTorch looks the share up by IPU.

    Raises:
        ConfigError: There is something else, a number out of range, or a sequence of
            another length than there are IPUs.

    Example:
        >>> memory_proportions(0.5, (0, 1))
        {'IPU0': 0.5, 'IPU1': 0.5}
        >>> memory_proportions((0.2, 0.4, 0.4), (0, 1))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: available_memory_proportion=(0.2, 0.4, 0.4) has 3...
    """
    if given is None:
        return {}
    num_ipus = max(stage_ipus, default=MOST_IPUS - 1) + 1
    is_one = _is_number(given)
    shares = [given] * num_ipus if is_one else given
    if not isinstance(shares, (tuple, list)) or not all(map(_is_number, shares)):
        raise ConfigError(
            f"available_memory_proportion={given!r}: give a number, or a sequence "
            "with one per IPU."
        )
    for share in map(float, shares):
        if not 0 <= share <= 1:
            raise ConfigError(
                f"available_memory_proportion={share} is not a share: use numbers "
                "from 0 to 1."
            )
    is_known = bool(stage_ipus)
    if len(shares) > num_ipus or (is_known and len(shares) < num_ipus) or not shares:
        ipus = f"{num_ipus} IPUs" if is_known else f"at most {num_ipus} IPUs"
        raise ConfigError(
            f"available_memory_proportion={given!r} has {len(shares)} numbers, and a "
            f"replica has {ipus}. Give one number for each of them, or a single one."
        )
    return {f"IPU{ipu}": float(share) for ipu, share in enumerate(shares)}


def check_memory(config: Config) -> None:
    """Refuse settings of memory that contradict each other.

    Raises:
        ConfigError: An overlap has no IO tiles, or is asked of a pipeline; or the
            optimiser's state is to be shared by one replica.
    """
    is_pipeline = (
        config.stages or config.has_open_stages
    ) and config.execution != "sharded"
    is_pipeline = is_pipeline or _is_ready_pipeline(config.pipeline)
    if config.overlap_io is not None and config.num_io_tiles is None:
        raise ConfigError(
            f"overlap_io={config.overlap_io!r} needs tiles that load and store while "
            "the others compute: give num_io_tiles, such as 32."
        )
    if config.overlap_io is not None and is_pipeline:
        raise ConfigError(
            f"overlap_io={config.overlap_io!r} doesn't go with a pipeline: PopTorch "
            "refuses it there. Take execution='sharded', or leave overlap_io out."
        )
    if config.shard_optimizer and config.num_replicas * config.process.count == 1:
        raise ConfigError(
            "shard_optimizer=True divides the optimiser's state among replicas, and "
            "there is one. Use more replicas, or offload_optimizer=True to keep the "
            "state off the chip."
        )


def set_memory(options: poptorch.Options, config: Config, own_stages: int = 1) -> None:
    """Set what a config says about memory in options.

    Args:
        options: Options that the config makes.
        config: The layout.
        own_stages: Stages of blocks that the model begins itself.
    """
    if config.offload_optimizer or config.shard_optimizer:
        location = poptorch.TensorLocationSettings()
        if config.offload_optimizer:
            location.useOnChipStorage(False)
        if config.shard_optimizer:
            location.useReplicatedTensorSharding(True)
        options.TensorLocations.setOptimizerLocation(location)
    if config.num_io_tiles is not None:
        options.TensorLocations.numIOTiles(config.num_io_tiles)
    if config.prefetch_depth is not None:
        options._Popart.set("defaultPrefetchBufferingDepth", config.prefetch_depth)
    if config.partials is not None:
        options.Precision.setPartialsType(PARTIALS[config.partials])
    kind = _recomputation(config, own_stages)
    if kind is not None:
        options._Popart.set("autoRecomputation", kind)


def _recomputation(config: Config, own_stages: int) -> int | None:
    """PopART's kind of recomputation; None for PopTorch's choice.

    PopTorch recomputes in pipelines of several IPUs (`Compiler.cpp`), and nowhere else.
    PopART has one kind for these, and refuses it on one IPU; the others do nothing in a
    pipeline (`ir.cpp`, `recompute.cpp`).
    """
    if config.recompute is None:
        return None
    if config.recompute == "off":
        return _NO_RECOMPUTATION
    if _is_ready_pipeline(config.pipeline):
        return None  # only PopTorch knows its IPUs
    has_stages = len(set(config.stage_ipus)) > 1 or own_stages > 1
    if config.is_pipelined and has_stages:
        return _PIPELINE
    return _STANDARD if config.recompute == "auto" else _RECOMPUTE_ALL


def _is_ready_pipeline(pipeline: Any) -> bool:
    """Whether it is PopTorch's pipelined strategy, which its sharded one inherits."""
    is_sharded = isinstance(pipeline, poptorch.ShardedExecution)
    return isinstance(pipeline, poptorch.PipelinedExecution) and not is_sharded


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
