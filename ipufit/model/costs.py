# SPDX-License-Identifier: Apache-2.0
"""Measures a model's stages for its plan, and its blocks for `pipeline="auto"`.

Few processes need it, so the others don't import what it takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure, Source
from ipufit.engine import NoForwardError, Steps, call_module, call_step
from ipufit.engine.sizes import block_costs, device_bytes, stage_costs, weight_cost
from ipufit.errors import ConfigError
from ipufit.optimizers import weight_states
from ipufit.placement import annotated_blocks
from ipufit.planning.memory import DEVICES, Device, MemorySettings, state_bytes
from ipufit.planning.plan import HostTraffic, ModelPlan
from ipufit.planning.schedule import EpochPlan
from ipufit.planning.split import (
    BlockCost,
    Split,
    best_split,
    refuse_idle_stages,
    smallest_split,
)
from ipufit.scalars import collected

CAPACITY = DEVICES["mk2"].num_bytes
"""Bytes of one IPU, of Mk2 and of Bow."""

_ROWS = 2
"""Samples of the micro-batch that is measured, if the config leaves its size open: the
share of each block in the whole is the same for any number."""

_MOST_NAMES = 8


def plan_of_module(
    module: torch.nn.Module,
    config: IPUConfig,
    optimizer: torch.optim.Optimizer,
    steps: Steps | None,
    source: Source,
    epoch: EpochPlan,
    device: Device,
) -> ModelPlan:
    """Measure a module's stages, and join them with what is known of its calls.

    Args:
        module: The user's module.
        config: The layout.
        optimizer: The optimizer, whose state counts.
        steps: Steps of the model's own; None to call the module.
        source: The data, of which one sample is looked at.
        epoch: The factors of a training call.
        device: The kind of IPU.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such data.
    """
    batch = epoch.batch
    example = source.example(batch.micro_batch_size)
    trained = [p for p in module.parameters() if p.requires_grad]
    cost = stage_costs(
        module,
        example,
        config,
        weight_states(optimizer, trained),
        _measured_call(steps, source.structure, is_fit=True),
    )
    num_stages = max(epoch.stages, len(cost.stages))
    is_pipelined = _is_pipelined(config) and len(cost.stages) > 1
    inference = config.inference_plan(
        batch.micro_batch_size * config.num_inference_replicas,
        own_stages=num_stages if is_pipelined else 1,
    )
    return ModelPlan(
        title=type(module).__name__,
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
    )


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


# Stages that are left open -----------------------------------------------------------


def split_of_module(
    module: torch.nn.Module,
    config: IPUConfig,
    source: Source,
    optimizer: torch.optim.Optimizer | None,
    steps: Steps | None,
) -> tuple[tuple[str, ...], str]:
    """Choose the stages of a module.

    Args:
        module: The user's module.
        config: Leaves its stages open.
        source: Source of samples, of which one is looked at.
        optimizer: The optimizer, whose state counts; None if there is none yet.
        steps: Steps of the model's own; None to call the module.

    Returns:
        Names of the submodules that begin the stages; and the stages in a line.

    Raises:
        ConfigError: There is no such split, or the model begins blocks itself.
        DataError: `forward` can't take such a sample.
    """
    _refuse_blocks(module)
    example = source.example(config.micro_batch_size or _ROWS)
    call = _measured_call(steps, source.structure, is_fit=False)
    with collected():
        costs = block_costs(module, example, config, call)
    held = list(_held_bytes(module, optimizer, config, costs))
    if isinstance(config.ipus, int):
        split = best_split(costs, config.ipus, held, CAPACITY)
        refuse_idle_stages(costs, config.ipus)
    else:
        split = smallest_split(costs, held, CAPACITY)
    uncounted = sorted({name for cost in costs for name in cost.uncounted})
    return split.names, _in_words(split, uncounted)


def _in_words(split: Split, uncounted: Sequence[str]) -> str:
    """Write the stages in a line, for the display that reports compilations.

    Example:
        >>> print(_in_words(Split(("stem", "body"), (3, 7), (0, 0), (8,)), []))
        pipeline='auto': 2 stages, 30% and 70% of the operations, begin at stem and body
    """
    if len(split.names) == 1:
        return "pipeline='auto': the parameters of the model fit on one IPU"
    total = sum(split.flops)
    shares = [f"{part / total:.0%}" if total else "0%" for part in split.flops]
    ending = f" ({', '.join(uncounted)} not counted)" if uncounted else ""
    return (
        f"pipeline='auto': {len(shares)} stages, {_listed(shares)} of the "
        f"operations{ending}, begin at {_listed(split.names)}"
    )


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMES:
        words = [*words[: _MOST_NAMES - 1], f"{len(words) - _MOST_NAMES + 1} more"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _refuse_blocks(module: torch.nn.Module) -> None:
    for place, (name, _) in annotated_blocks(module).items():
        raise ConfigError(
            f"pipeline='auto' chooses where stages begin, and the submodule {place} "
            f"begins the block {name!r} itself (poptorch.BeginBlock). Take it out, "
            "poptorch.removeBlocks(module), or leave pipeline out."
        )


def _held_bytes(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: IPUConfig,
    costs: Sequence[BlockCost],
) -> Iterator[int]:
    """Bytes that each block holds all the time: weights, state and accumulators."""
    parameters = dict(module.named_parameters())
    trained = [one for one in parameters.values() if one.requires_grad]
    states = {} if optimizer is None else weight_states(optimizer, trained)
    shares = config.num_replicas * config.process.count if config.shard_optimizer else 1
    placed = MemorySettings(is_off_chip=config.offload_optimizer, num_shards=shares)
    seen: set[str] = set()
    for cost in costs:
        held = cost.buffer_bytes
        for name in cost.weights:
            if name not in seen:
                seen.add(name)
                state = states.get(id(parameters[name]))
                weight = weight_cost(name, parameters[name], state)
                held += weight.num_bytes + weight.accumulator_bytes
                held += state_bytes(weight.state, placed)
        yield held


def _measured_call(
    steps: Steps | None, structure: SampleStructure, *, is_fit: bool
) -> Callable[[torch.nn.Module, Sequence[Tensor]], Any]:
    """Make a function that calls a module by itself, or in a step.

    It takes a copy of the module, and the tensors of a micro-batch.

    Args:
        steps: Steps of the model's own; None to call the module.
        structure: Nesting of the data.
        is_fit: Whether the data are those of a `fit`. If not, data without targets may
            be those of `predict`, too: then the step of `predict` is called if there is
            one, or the module, and the step of `fit` only if the module has no
            `forward`.

    Example:
        >>> from ipufit.data import as_source
        >>> x = torch.zeros(4, 2)
        >>> call = _measured_call(None, as_source(x).structure, is_fit=False)
        >>> call(torch.nn.Linear(2, 3), [x]).shape
        torch.Size([4, 3])
    """

    def call(module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any:
        inputs, _ = structure.split(tensors)
        if steps is None:
            return call_module(module, inputs)
        if is_fit or structure.has_targets:
            batch = structure.batch(inputs, tensors)
            return call_step(steps.training, module, batch)
        if steps.prediction is not None:
            return call_step(steps.prediction, module, inputs)
        try:
            return call_module(module, inputs)
        except NoForwardError:
            return call_step(steps.training, module, inputs)

    return call
