# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of a model: its stages measured, beside its data and its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure, Source
from ipufit.engine import Objective
from ipufit.engine.sizes import device_bytes, stage_costs
from ipufit.errors import IpufitError
from ipufit.optimizers.state_types import weight_states
from ipufit.planning.memory import Device, MemorySettings
from ipufit.planning.plan import HostTraffic, ModelPlan
from ipufit.planning.schedule import EpochPlan

from .evaluating import require_targets
from .measured_call import measured_call
from .parts import Model, settings_of


def plan_of_model(
    model: Model, source: Source, epoch: EpochPlan, device: Device
) -> ModelPlan:
    """Measure a model's stages, and join them with what is known of its calls.

    Args:
        model: The model, compiled.
        source: The data, of which one sample is looked at.
        epoch: The factors of a training call.
        device: The kind of IPU.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such data.
    """
    settings, config = settings_of(model), model.config
    batch = epoch.batch
    example = source.example(batch.micro_batch_size)
    trained = [p for p in model.module.parameters() if p.requires_grad]
    optimizer = settings.optimization.optimizer
    cost = stage_costs(
        model.module,
        example,
        config,
        weight_states(optimizer, trained),
        measured_call(model, source.structure, is_fit=True),
    )
    num_stages = max(epoch.stages, len(cost.stages))
    is_pipelined = _is_pipelined(config) and len(cost.stages) > 1
    inference = config.inference_plan(
        batch.micro_batch_size * config.num_inference_replicas,
        own_stages=num_stages if is_pipelined else 1,
    )
    return ModelPlan(
        title=type(model.module).__name__,
        optimizer=type(optimizer).__name__,
        device=device,
        epoch=replace(epoch, stages=num_stages) if is_pipelined else epoch,
        stages=cost.stages,
        settings=_memory_settings(config, batch, is_pipelined),
        inference_iterations=inference.device_iterations,
        traffic=_traffic(
            example, source.structure, cost.output_bytes, batch, inference
        ),
        unused=cost.unused,
        shared=cost.shared,
        refusal=_refusal(source, settings.objective),
    )


def _refusal(source: Source, objective: Objective) -> str:
    """Why `fit` would refuse samples whose targets or weights don't suit the loss.

    What is planned doesn't depend on targets, so a plan without them is of use.
    """
    try:
        require_targets(source, objective, "x", "train")
    except IpufitError as error:
        return str(error)
    return ""


def _memory_settings(
    config: IPUConfig, batch: BatchPlan, is_pipelined: bool
) -> MemorySettings:
    recomputes = config.recompute != "off"
    if config.recompute is None:
        recomputes = is_pipelined
    is_sharded, is_off_chip = config.shard_optimizer, config.offload_optimizer
    least = {}
    if config.training_options is not None or config.customize is not None:
        location = _location(config.build_training_options(batch))
        is_sharded = bool(location.get("useReplicatedTensorSharding", False))
        is_off_chip = not location.get("onChip", True)
        names = {
            "least_off_chip": "minElementsForOffChip",
            "least_sharded": "minElementsForReplicatedTensorSharding",
        }
        least = {ours: location[n] for ours, n in names.items() if n in location}
    return MemorySettings(
        gradient_accumulation=batch.gradient_accumulation,
        is_pipelined=is_pipelined,
        recomputes=recomputes,
        is_off_chip=is_off_chip,
        num_shards=batch.replicas * batch.processes if is_sharded else 1,
        **least,
    )


def _is_pipelined(config: IPUConfig) -> bool:
    """Whether stages, if there are several, are busy at once."""
    others = (
        poptorch.ShardedExecution,
        poptorch.SerialPhasedExecution,
        poptorch.ParallelPhasedExecution,
    )
    return config.is_pipelined and not isinstance(config.pipeline, others)


def _location(options: Any) -> dict[str, Any]:
    """Where own options have the optimiser's state."""
    locations = options.TensorLocations
    found = getattr(locations, "location_optimizer", None)
    return dict(found or {})


def _traffic(
    example: Sequence[Tensor],
    structure: SampleStructure,
    output_bytes: int,
    batch: BatchPlan,
    inference: BatchPlan,
) -> tuple[HostTraffic, ...]:
    """Bytes of a call in one process, for each output mode."""

    def bytes_in(tensors: Sequence[Tensor]) -> int:
        return sum(tensor.numel() * device_bytes(tensor.dtype) for tensor in tensors)

    passes = batch.micro_batches_per_call
    given = bytes_in(example) * passes
    every = output_bytes * passes
    last = output_bytes * batch.replicas
    inferred = inference.device_iterations * inference.replicas
    inputs = bytes_in(example[: structure.num_inputs])
    of_updates = every // batch.gradient_accumulation
    each = f"EveryN({batch.gradient_accumulation})"
    return (
        HostTraffic("training", "Sum", given, last),
        HostTraffic("training", "Final", given, last),
        HostTraffic("training", each, given, of_updates),
        HostTraffic("training", "All", given, every),
        HostTraffic("inference", "All", inputs * inferred, output_bytes * inferred),
    )
