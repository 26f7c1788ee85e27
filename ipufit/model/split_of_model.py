# SPDX-License-Identifier: Apache-2.0
"""Measures a model's blocks, and divides them into the stages of `pipeline="auto"`."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

import torch

from ipufit.blocks import annotated_blocks
from ipufit.config import IPUConfig
from ipufit.data import Source
from ipufit.engine.sizes import block_costs, weight_cost
from ipufit.errors import ConfigError
from ipufit.optimizers.state_types import weight_states
from ipufit.planning.memory import DEVICES, MemorySettings, state_bytes
from ipufit.planning.split import (
    BlockCost,
    Split,
    best_split,
    refuse_idle_stages,
    smallest_split,
)
from ipufit.scalars import collected

from .measured_call import measured_call
from .parts import Model

CAPACITY = DEVICES["mk2"].num_bytes
"""Bytes of one IPU, of Mk2 and of Bow."""

_ROWS = 2
"""Samples of the micro-batch that is measured, if the config leaves its size open: the
share of each block in the whole is the same for any number."""

_MOST_NAMES = 8


class ModelSplit(NamedTuple):
    """The stages of a model, and what was left out in counting.

    Attributes:
        split: The stages.
        uncounted: Operators that compute much and have no formula.
    """

    split: Split
    uncounted: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The stages in a line, for the display that reports compilations.

        Example:
            >>> print(ModelSplit(Split(("stem", "body"), (3, 7), (0, 0), (8,))))
            pipeline='auto': 2 stages, 30% and 70% of the operations, begin at stem ...
        """
        names, flops = self.split.names, self.split.flops
        if len(names) == 1:
            return "pipeline='auto': the parameters of the model fit on one IPU"
        total = sum(flops)
        shares = [f"{part / total:.0%}" if total else "0%" for part in flops]
        ending = f" ({', '.join(self.uncounted)} not counted)" if self.uncounted else ""
        return (
            f"pipeline='auto': {len(shares)} stages, {_listed(shares)} of the "
            f"operations{ending}, begin at {_listed(names)}"
        )


def split_of_model(model: Model, config: IPUConfig, source: Source) -> ModelSplit:
    """Choose the stages of a model.

    Args:
        model: The model, compiled or not. The state of its optimiser counts.
        config: Leaves its stages open.
        source: Source of samples, of which one is looked at.

    Raises:
        ConfigError: There is no such split, or the model begins blocks itself.
        DataError: `forward` can't take such a sample.
    """
    _refuse_blocks(model.module)
    example = source.example(config.micro_batch_size or _ROWS)
    call = measured_call(model, source.structure, is_fit=False)
    with collected():
        costs = block_costs(model.module, example, config, call)
    held = list(_held_bytes(model, config, costs))
    if isinstance(config.ipus, int):
        split = best_split(costs, config.ipus, held, CAPACITY)
        refuse_idle_stages(costs, config.ipus)
    else:
        split = smallest_split(costs, held, CAPACITY)
    left_out = {name for cost in costs for name in cost.uncounted}
    return ModelSplit(split, tuple(sorted(left_out)))


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
    model: Model, config: IPUConfig, costs: Sequence[BlockCost]
) -> Iterator[int]:
    """Bytes that each block holds all the time: weights, state and accumulators."""
    settings = model._settings
    parameters = dict(model.module.named_parameters())
    trained = [one for one in parameters.values() if one.requires_grad]
    states = {}
    if settings is not None:
        states = weight_states(settings.optimization.optimizer, trained)
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
