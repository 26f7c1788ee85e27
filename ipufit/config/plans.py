# SPDX-License-Identifier: Apache-2.0
"""Plans of calls: what a config leaves open is derived from the batch size."""

from __future__ import annotations

from typing import Any

from ipufit.batching import BatchPlan, derive_plan

Config = Any
"""An `IPUConfig`, whose file has the first two functions as methods."""


def training_plan(
    self: Config,
    batch_size: int | None = None,
    own_stages: int = 1,
    device_iterations: int | None = None,
) -> BatchPlan:
    """Derive the factors of a training call.

    Args:
        batch_size: Samples per weight update; None to take the product of the
            factors given, or 32 if none is.
        own_stages: Stages of blocks that the model begins itself: they count where
            gradient accumulation is left open.
        device_iterations: Updates per call, if the config leaves them open; 1 by
            default.

    Raises:
        ConfigError: The factors don't multiply up to `batch_size`.

    Example:
        >>> from ipufit import IPUConfig
        >>> IPUConfig(replicas=4).training_plan(batch_size=32).micro_batch_size
        8
    """
    own = self.training_options
    stages = forward_stages(self)
    if self.gradient_accumulation is None:
        stages = max(stages, own_stages)
    return derive_plan(
        batch_size,
        micro_batch_size=self.micro_batch_size,
        gradient_accumulation=(
            self.gradient_accumulation
            if own is None
            else own.Training.gradient_accumulation
        ),
        replicas=self.num_replicas,
        processes=self.process.count,
        device_iterations=(
            self.device_iterations or device_iterations or 1
            if own is None
            else own.device_iterations
        ),
        stages=stages if own is None and self.is_pipelined else 1,
    )


def inference_plan(
    self: Config,
    batch_size: int,
    own_stages: int = 1,
    inference_iterations: int | None = None,
) -> BatchPlan:
    """Derive the factors of an inference call, with iterations for all stages.

    Args:
        batch_size: Samples of one forward pass on every replica.
        own_stages: Stages of blocks that the model begins itself.
        inference_iterations: Forward passes per call, if the config leaves them open;
            its `device_iterations` by default, or else 1.

    Example:
        >>> from ipufit import IPUConfig
        >>> IPUConfig(pipeline=("a", "b", "c")).inference_plan(8).device_iterations
        3
    """
    own = self.inference_options
    iterations = max(
        self.inference_iterations
        or inference_iterations
        or self.device_iterations
        or 1,
        _least_inference_iterations(self.inference_config),
        own_stages,
    )
    return derive_plan(
        batch_size,
        micro_batch_size=None,
        gradient_accumulation=1,
        replicas=self.num_inference_replicas,
        processes=self.process.count,
        device_iterations=iterations if own is None else own.device_iterations,
    )


def forward_stages(config: Config) -> int:
    """Forward stages as PopTorch counts them (`CompilerImpl.cpp`).

    They begin on IPU 0: a first stage elsewhere makes one more.
    """
    changes: int = config.num_stages + (config.stage_ipus[:1] not in ((), (0,)))
    return changes


def _least_inference_iterations(config: Config) -> int:
    if config.stages:
        return forward_stages(config) if config.is_pipelined else 1
    if config.pipeline is not None and config.gradient_accumulation is not None:
        # The stages of a strategy are unknown, but training with G micro-batches
        # per update allows at most (G + 1) / 2 of them.
        return int(config.gradient_accumulation + 1) // 2
    return 1
