# SPDX-License-Identifier: Apache-2.0
"""The optimiser's parameter group of each of a model's tensors."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor


def group_indices(
    optimizer: torch.optim.Optimizer, named_tensors: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Find the optimiser's group of each of a model's tensors.

    Args:
        optimizer: The host's object.
        named_tensors: The model's parameters and buffers.

    Returns:
        For each name the number of the group that holds its tensor, itself or another
        one of the same memory; None if no group does.

    Raises:
        KeyError: If a group holds a tensor that isn't the model's.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD([model.bias], lr=0.1)
        >>> group_indices(optimizer, dict(model.named_parameters()))
        {'weight': None, 'bias': 0}
    """
    by_identity: dict[int, int] = {}
    by_memory: dict[int, int] = {}
    own_identities = {id(tensor) for tensor in named_tensors.values()}
    own_memory = {tensor.data_ptr() for tensor in named_tensors.values()} - {0}
    for index, group in enumerate(optimizer.param_groups):
        for number, tensor in enumerate(group["params"]):
            pointer = tensor.data_ptr()
            if id(tensor) not in own_identities and pointer not in own_memory:
                raise KeyError(
                    f"Parameter {number} of the optimizer's group {index}, of shape "
                    f"{tuple(tensor.shape)}, is neither a parameter nor a buffer of "
                    "the model. Build the optimizer from the model's parameters."
                )
            by_identity[id(tensor)] = index
            if pointer:
                by_memory[pointer] = index
    return {
        name: by_identity.get(id(tensor), by_memory.get(tensor.data_ptr()))
        for name, tensor in named_tensors.items()
    }
