# SPDX-License-Identifier: Apache-2.0
"""Stages of a pipeline, as `IPUConfig` is given them."""

from __future__ import annotations

from typing import Any

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

from .automatic import AUTO

_STRATEGIES = (
    poptorch.PipelinedExecution,
    poptorch.ShardedExecution,
    poptorch.SerialPhasedExecution,
    poptorch.ParallelPhasedExecution,
)


def check_pipeline(pipeline: Any) -> None:
    """Refuse what is neither a sequence of stages nor a strategy of PopTorch.

    Raises:
        ConfigError: It is neither, or names something more than once.

    Example:
        >>> check_pipeline(["encoder", ("encoder", "decoder")])
        Traceback (most recent call last):
        ipufit.errors.ConfigError: pipeline names encoder more than once.
    """
    if isinstance(pipeline, str) and pipeline == AUTO:
        return
    if isinstance(pipeline, str):
        raise ConfigError(
            f"pipeline={pipeline!r} is one name: give a sequence with a name for each "
            f"stage, as in pipeline=({pipeline!r}, ...), or 'auto' to have the model "
            "divided."
        )
    if has_stages(pipeline):
        names = [name for stage in pipeline for name in stage_names(stage)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"pipeline names {', '.join(twice)} more than once.")
    elif pipeline is not None and not isinstance(pipeline, _STRATEGIES):
        raise ConfigError(
            f"pipeline={pipeline!r} is neither a sequence of stages nor a strategy "
            "such as poptorch.PipelinedExecution."
        )


def has_stages(pipeline: Any) -> bool:
    """Whether a pipeline is a sequence of stages."""
    return isinstance(pipeline, (tuple, list))


def stage_names(stage: Any) -> tuple[str, ...]:
    """The names of the blocks or submodules of a stage.

    Raises:
        ConfigError: It is no name, sequence of names or `poptorch.Stage`.
    """
    if isinstance(stage, poptorch.Stage):
        return tuple(stage.blocks)
    names = tuple(stage) if isinstance(stage, (tuple, list)) else (stage,)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"pipeline has the stage {stage!r}: a stage is a name, several of them, "
            "or a poptorch.Stage."
        )
    return names


def stage_ipu(stage: Any, index: int) -> int:
    """The IPU that a stage asks for, or the one of its number."""
    own = getattr(stage, "_ipu", None)  # PopTorch has no public getter
    return index if own is None else int(own)


def strategy_of(pipeline: Any, *, is_pipelined: bool, is_short: bool = False) -> Any:
    """The strategy of PopTorch that runs a pipeline; None for PopTorch's default.

    Args:
        pipeline: Names, sequences of names, or stages of PopTorch, each on the IPU of
            its number unless it asks for another; a ready strategy; or None.
        is_pipelined: Whether all stages are busy at once.
        is_short: Whether a call has too few micro-batches to pipeline the blocks of a
            model without a pipeline.

    Raises:
        ConfigError: The stages are left open.
    """
    if isinstance(pipeline, str):
        raise ConfigError(
            "pipeline='auto' stands for stages that are chosen when a model gets data. "
            "Options can be made of config.resolved(model, x), which has their names."
        )
    if pipeline is None:
        is_default = is_pipelined and not is_short
        return None if is_default else poptorch.ShardedExecution()
    if not has_stages(pipeline):
        return pipeline
    kind = poptorch.PipelinedExecution if is_pipelined else poptorch.ShardedExecution
    return kind(
        *(
            stage
            if isinstance(stage, poptorch.Stage)
            else poptorch.Stage(*stage_names(stage)).ipu(index)
            for index, stage in enumerate(pipeline)
        )
    )
