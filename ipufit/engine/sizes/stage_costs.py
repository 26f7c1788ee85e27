# SPDX-License-Identifier: Apache-2.0
"""Measures what each stage of a pipeline holds and computes, by a pass on shapes."""

from __future__ import annotations

from functools import partial
from typing import Any, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._tree import Structure
from ipufit.blocks import started_blocks
from ipufit.config import IPUConfig
from ipufit.engine.observers.observing import tensors_of
from ipufit.engine.traced.recomputing import kept_submodules
from ipufit.engine.weights.wrapping import unfetched
from ipufit.optimizers.state_types import WeightState
from ipufit.placement import blocks_begun
from ipufit.planning.memory import StageCost, StateCost, WeightCost

from .listening import Call, given_like, heard
from .position import Position
from .shapes_only import copy_of_shapes, shapes_only
from .stage_measure import Measure
from .storages import device_bytes


class ModelCost(NamedTuple):
    """The costs of a module in training.

    Attributes:
        stages: Its stages in the order in which they run.
        output_bytes: Bytes of what it returns for one micro-batch.
        unused: Names of parameters that `forward` doesn't use.
        shared: Names of parameters that several stages use; the first has them.
    """

    stages: tuple[StageCost, ...]
    output_bytes: int
    unused: tuple[str, ...]
    shared: tuple[str, ...]


def stage_costs(
    module: torch.nn.Module,
    example: Sequence[Tensor],
    config: IPUConfig,
    states: Mapping[int, WeightState],
    call: Call,
) -> ModelCost:
    """Measure what each stage of a module costs in training.

    A copy without values is called in train mode. It takes little time and memory, and
    the module and all random states stay as they are.

    Args:
        module: The user's module.
        example: Tensors of a micro-batch, of which only shapes and types count.
        config: Names the stages, and the types to compute in.
        states: State of the optimiser for each weight that is trained, by its `id`.
        call: Calls the copy with such tensors.

    Returns:
        One stage at least, and its numbers.

    Raises:
        ConfigError: The module can't be copied.
        DataError: The module can't be called with such tensors.
        UnsupportedError: `forward` computes with values, or makes dynamic shapes.
    """
    weights = [
        weight_cost(name, parameter, states.get(id(parameter)))
        for name, parameter in module.named_parameters()
    ]
    with shapes_only(), started_blocks() as blocks:
        copied = copy_of_shapes(module)
        given = given_like(example, config)
        position = Position(config, blocks)
        measure = Measure(position, given, weights, copied)
        _follow_calls(copied, config, position, measure)
        with heard(copied, config, measure):
            outputs = call(copied, given)
        leaves = list(tensors_of(Structure.of_outputs(outputs).flatten(outputs)))
        return ModelCost(
            stages=measure.stages(),
            output_bytes=sum(
                leaf.numel() * device_bytes(leaf.dtype) for leaf in leaves
            ),
            unused=measure.unused(),
            shared=measure.shared(),
        )


def weight_cost(
    name: str, parameter: torch.nn.Parameter, state: WeightState | None
) -> WeightCost:
    """The costs of a parameter on a device, with what an optimiser keeps for it.

    Args:
        name: Its name.
        parameter: Its shape and type count.
        state: The state and the accumulator; None if it isn't trained.

    Example:
        >>> weight_cost("w", torch.nn.Parameter(torch.zeros(2, 3)), None).num_bytes
        24
    """
    shape, dtype = unfetched(parameter, "shape"), unfetched(parameter, "dtype")
    count, num_bytes = shape.numel(), shape.numel() * device_bytes(dtype)
    if state is None:
        return WeightCost(name, count, num_bytes)
    accumulator = state.accumulator
    return WeightCost(
        name,
        count,
        num_bytes,
        state=tuple(
            StateCost(one.num_elements, one.num_elements * device_bytes(one.dtype))
            for one in state.tensors
        ),
        accumulator_bytes=count * device_bytes(accumulator) if accumulator else 0,
        gradient_bytes=num_bytes,
    )


def _follow_calls(
    module: torch.nn.Module, config: IPUConfig, position: Position, measure: Measure
) -> None:
    """Have a position follow the calls of submodules, and a measure hear of them."""
    begins, ends = blocks_begun(module, config)
    kept = set(kept_submodules(module, config.recompute_patterns))

    def begin(_module: Any, _args: Any, name: str) -> None:
        position.begin(begins.get(name))
        is_leaf = next(_module.children(), None) is None
        if is_leaf or name in begins:
            measure.name(name)

    def end(_module: Any, _args: Any, output: Any, name: str) -> None:
        if name in kept:
            measure.keep(output)
        position.begin(ends.get(name))

    for name, child in module.named_modules():
        if name:
            child.register_forward_pre_hook(partial(begin, name=name))
            child.register_forward_hook(partial(end, name=name))
