# SPDX-License-Identifier: Apache-2.0
"""States of callbacks in a checkpoint: plain values in one file, arrays in another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files

from .saved_form import REFERENCE, TENSOR, damaged
from .trained import Tensors


def without_arrays(value: Any, tensors: Tensors) -> Any:
    """A state of plain values, in which arrays are replaced by their names.

    Args:
        value: The state.
        tensors: Gets the arrays.

    Example:
        >>> tensors = {}
        >>> without_arrays({"best": np.ones(2), "wait": 1}, tensors)
        {'best': {'$tensor': '0', 'is_array': True}, 'wait': 1}
        >>> tensors
        {'0': tensor([1., 1.], dtype=torch.float64)}
    """
    if isinstance(value, (Tensor, np.ndarray)):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        return {TENSOR: name, "is_array": isinstance(value, np.ndarray)}
    if isinstance(value, dict):
        return {key: without_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_arrays(one, tensors) for one in value]
    return value


def callbacks_of(checkpoint: files.Checkpoint) -> Any:
    """The states of the callbacks in a checkpoint, with their arrays.

    Raises:
        DamagedCheckpointError: An array is missing.
    """
    tensors = checkpoint.tensors.get("callbacks", {})

    def with_arrays(value: Any) -> Any:
        if isinstance(value, dict) and TENSOR in value:
            fault = REFERENCE(value, "the state of a callback")
            if fault is None and value[TENSOR] not in tensors:
                fault = f"callbacks.safetensors lacks {value[TENSOR]}"
            if fault is not None:
                raise damaged(checkpoint, fault)
            tensor = tensors[value[TENSOR]]
            return tensor.numpy() if value["is_array"] else tensor
        if isinstance(value, dict):
            return {key: with_arrays(one) for key, one in value.items()}
        if isinstance(value, list):
            return [with_arrays(one) for one in value]
        return value

    return with_arrays(checkpoint.state["callbacks"])
