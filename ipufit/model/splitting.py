# SPDX-License-Identifier: Apache-2.0
"""The stages that `pipeline="auto"` leaves open, chosen when a model sees data.

They depend on the module, the shapes of samples, the config and the optimiser, and on
nothing else: so all processes choose the same, and so do a resumed run, `build` and
`ipufit compile`.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from ipufit.blocks import annotated_blocks
from ipufit.config import IPUConfig, with_stages
from ipufit.data import SampleStructure, Source, as_source
from ipufit.engine import NoForwardError, call_module, call_step, give_shapes
from ipufit.errors import ConfigError
from ipufit.planning import BlockCost, Split, best_split, smallest_split
from ipufit.scalars import collected

from .parts import Model

_ROWS = 2
"""Samples of the micro-batch that is measured, if the config leaves its size open: the
share of each block in the whole is the same for any number."""

_MOST_NAMES = 8


def settle(model: Model, source: Source) -> None:
    """Have all that depends on shapes of samples be known: lazy weights, and stages.

    Args:
        model: Its config gets the names of stages that it leaves open.
        source: Source of samples.

    Raises:
        ConfigError: Some weights still have no shapes, or there is no such split.
        DataError: `forward` can't take such a sample.
    """
    give_shapes(model.module, source)
    if not model.config.has_open_stages:
        return
    split, costs = _chosen(model, model.config, source)
    now = with_stages(model._given_config, split.names)
    if now.pipeline != model._executors.config.pipeline:
        model._executors.place(now, described(split, costs))
    model.config = with_stages(model.config, split.names)


def resolved(self: Model, config: IPUConfig, x: Any = None) -> IPUConfig:
    """A config of this model with the stages that it leaves open: `config.resolved`."""
    given = self._given_config
    is_chosen = given.has_open_stages and not self.config.has_open_stages
    if x is None and is_chosen and given.ipus == config.ipus:
        return with_stages(config, self.config.pipeline or ())
    source = self._data.source if x is None else as_source(x)
    if source is None:
        raise ConfigError(
            "pipeline='auto' needs the shapes of samples, and this model has seen "
            "none: give data, config.resolved(model, x), or call fit() before."
        )
    give_shapes(self.module, source)
    return with_stages(config, _chosen(self, config, source)[0].names)


def described(split: Split, costs: Sequence[BlockCost]) -> str:
    """The stages in words, for the display that reports compilations.

    Example:
        >>> split = Split(("stem", "body"), (30, 70), (0, 0), (8,))
        >>> described(split, [])
        "pipeline='auto': 2 stages, 30% and 70% of the operations, begin at stem and..."
    """
    if len(split.names) == 1:
        return "pipeline='auto': the parameters of the model fit on one IPU"
    total = sum(split.flops)
    shares = [f"{part / total:.0%}" if total else "0%" for part in split.flops]
    left_out = sorted({name for cost in costs for name in cost.uncounted})
    ending = f" ({', '.join(left_out)} not counted)" if left_out else ""
    return (
        f"pipeline='auto': {len(shares)} stages, {_listed(shares)} of the operations"
        f"{ending}, begin at {_listed(split.names)}"
    )


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMES:
        words = [*words[: _MOST_NAMES - 1], f"{len(words) - _MOST_NAMES + 1} more"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _chosen(
    model: Model, config: IPUConfig, source: Source
) -> tuple[Split, Sequence[BlockCost]]:
    from ipufit.engine.sizes.block_costs import block_costs  # takes a second

    _refuse_blocks(model.module)
    example = source.example(config.micro_batch_size or _ROWS)
    call = _call(model, source.structure)
    costs = block_costs(model.module, example, config, call)
    held = list(_held_bytes(model, config, costs))
    capacity = _capacity()
    if isinstance(config.ipus, int):
        return best_split(costs, config.ipus, held, capacity), costs
    return smallest_split(costs, held, capacity), costs


def _capacity() -> int:
    """Bytes of one IPU: Mk2 and Bow have as many."""
    from ipufit.planning.devices import DEVICES  # few runs need it

    return DEVICES["mk2"].num_bytes


def _refuse_blocks(module: torch.nn.Module) -> None:
    for place, (name, _) in annotated_blocks(module).items():
        raise ConfigError(
            f"pipeline='auto' chooses where stages begin, and the submodule {place} "
            f"begins the block {name!r} itself (poptorch.BeginBlock). Take it out, "
            "poptorch.removeBlocks(module), or leave pipeline out."
        )


def _call(
    model: Model, structure: SampleStructure
) -> Callable[[torch.nn.Module, Sequence[Tensor]], Any]:
    """Calls a module as the model's programs do: by itself, or in a step."""
    settings = model._settings
    steps = None if settings is None else settings.objective.steps

    def call(module: torch.nn.Module, tensors: Sequence[Tensor]) -> Any:
        inputs, _ = structure.split(tensors)
        with collected():
            if steps is not None and structure.has_targets:
                batch = structure.batch(inputs, tensors)
                return call_step(steps.training, module, batch)
            if steps is not None and steps.prediction is not None:
                return call_step(steps.prediction, module, inputs)
            try:
                return call_module(module, inputs)
            except NoForwardError:
                if steps is None:
                    raise
                return call_step(steps.training, module, inputs)

    return call


def _held_bytes(
    model: Model, config: IPUConfig, costs: Sequence[BlockCost]
) -> Iterator[int]:
    """Bytes that each block holds all the time: weights, state and accumulators."""
    settings = model._settings
    per_weight = 0
    if settings is not None:
        optimizer = settings.optimization.optimizer
        state = 0 if config.offload_optimizer else 4 * _states(optimizer)
        if config.shard_optimizer:
            state = -(-state // config.num_replicas)
        accumulator = getattr(optimizer, "accum_type", torch.float32)
        per_weight = state + (2 if accumulator == torch.float16 else 4)
    for cost in costs:
        yield (
            cost.parameter_bytes
            + cost.buffer_bytes
            + cost.trained_parameters * per_weight
        )


def _states(optimizer: torch.optim.Optimizer) -> int:
    """Tensors that an optimiser keeps for each weight, of its shape."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(group.get("momentum")))
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + bool(group.get("centered")) + bool(group.get("momentum"))
    return 2
