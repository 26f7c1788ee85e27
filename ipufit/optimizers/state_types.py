# SPDX-License-Identifier: Apache-2.0
"""The tensors that an optimiser keeps on a device for each weight, and their types.

Sources: PopTorch's readings of optimisers (`CompilerImpl.cpp`), and PopART's `sgd.hpp`,
`adam.hpp` and `adaptive.hpp`. Hyper-parameters, a few bytes for each weight, aren't
among them.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple

import torch


class StateTensor(NamedTuple):
    """A tensor of the optimiser's state of one weight.

    Attributes:
        slot: PopART's name of it, such as "Accl1".
        num_elements: Number of its elements.
        dtype: Type of its elements.
    """

    slot: str
    num_elements: int
    dtype: torch.dtype


class WeightState(NamedTuple):
    """All that an optimiser keeps for one weight.

    Attributes:
        tensors: The state, which lasts from update to update.
        accumulator: Type of the gradients' sum, where an update has several
            micro-batches; None if a tensor of the state is that sum, too.
    """

    tensors: tuple[StateTensor, ...]
    accumulator: torch.dtype | None


def weight_states(
    optimizer: torch.optim.Optimizer, weights: Iterable[torch.nn.Parameter]
) -> dict[int, WeightState]:
    """Find what an optimiser keeps on a device for each weight.

    Args:
        optimizer: One of `poptorch.optim`, or of those of torch that PopTorch takes.
        weights: Weights that are trained; those of no parameter group are trained with
            the optimiser's defaults.

    Returns:
        The state by `id(weight)`.

    Example:
        >>> from ipufit import poptorch
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> adam = poptorch.optim.Adam([weight], accum_type=torch.float16)
        >>> state = weight_states(adam, [weight])[id(weight)]
        >>> [(t.slot, t.num_elements) for t in state.tensors], state.accumulator
        ([('Accl1', 3), ('Accl2', 3), ('Step', 1)], torch.float16)
    """
    groups = {
        id(weight): group
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    return {
        id(weight): _state(
            optimizer, groups.get(id(weight), optimizer.defaults), weight
        )
        for weight in weights
    }


def _state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    weight: torch.nn.Parameter,
) -> WeightState:
    def type_of(name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(optimizer, name, torch.float32)
        return dtype

    def tensor(slot: str, dtype: torch.dtype) -> StateTensor:
        return StateTensor(slot, weight.numel(), dtype)

    accumulator: torch.dtype | None = type_of("accum_type")
    first, second = (
        type_of(f"{order}_order_momentum_accum_type") for order in ("first", "second")
    )
    if isinstance(optimizer, torch.optim.SGD):
        has_velocity = _may_be_nonzero(optimizer, group, "momentum")
        if getattr(optimizer, "use_combined_accum", False):
            # Its type is the weight's, whatever `accum_type` says.
            own = (tensor("Accl1", weight.dtype),) if has_velocity else ()
            return WeightState(own, None if has_velocity else weight.dtype)
        velocity = tensor("Accl1", type_of("velocity_accum_type"))
        return WeightState((velocity,) if has_velocity else (), accumulator)
    if isinstance(optimizer, torch.optim.RMSprop):
        tensors = [tensor("Accl1", first)]
        if group.get("centered"):
            tensors.append(tensor("Accl2", second))
        if _may_be_nonzero(optimizer, group, "momentum"):
            tensors.append(tensor("Accl3", torch.float32))
        return WeightState(tuple(tensors), accumulator)
    count = StateTensor("Step", 1, torch.float32)
    moments = tensor("Accl1", first), tensor("Accl2", second), count
    return WeightState(moments, accumulator)


def _may_be_nonzero(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str
) -> bool:
    """Whether a value isn't a zero that is compiled in.

    PopTorch's optimisers know which values were given, and those may change later. Of
    torch's a zero is the default, and compiled in.
    """
    attributes = getattr(optimizer, "variable_attrs", None)
    if attributes is not None and not attributes.isConstant(name):
        return True
    return bool(group.get(name))
