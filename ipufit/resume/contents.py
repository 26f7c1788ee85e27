# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint arranges the state of a run: groups of tensors, parts by process.

`docs/reference/checkpoint-format.md` lists the groups. Process 0 stores its part of the
state where a single process does. The parts of the other processes are in the group
`processes`, and in `processes` of the state.
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from ipufit import checkpoint as files
from ipufit._kinds import are_numbers, check_saved, damaged, fields, flag, text
from ipufit.data.place import StreamState, under
from ipufit.engine.loop import Training

Tensors = Dict[str, Tensor]
OPTIMIZER_STATE = "ipu_state", "ipu_param"
"""Names in the state of an optimizer of PopTorch, and prefixes in `optimizer`."""

_REFERENCE = fields({"$tensor": text, "is_array": flag}, is_closed=True)
"""The dict that replaces an array in the saved state of a callback."""


def groups_of_module(module: torch.nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """Group the tensors of a module as a checkpoint does.

    Returns:
        The state dict, and the buffers that it leaves out (`persistent=False`), if any.
    """
    kept = module.state_dict()
    others = {name: b for name, b in module.named_buffers() if name not in kept}
    return {"model": kept, "buffers": others} if others else {"model": kept}


def groups_of_training(training: Training) -> dict[str, Mapping[str, Tensor]]:
    """Group the tensors of module, losses and averages as a checkpoint does."""
    groups = groups_of_module(training.executors.module)
    groups["losses"] = tensors_of_losses(training)
    if training.average is not None:
        groups["average"] = training.average.averages
    return groups


def tensors_of_losses(training: Training) -> Tensors:
    """Return the tensors of losses, such as a weight that a callback anneals."""
    losses = modules_of_losses(training)
    return dict([*losses.named_parameters(), *losses.named_buffers()])


def modules_of_losses(training: Training) -> torch.nn.Module:
    """Return the modules of losses in one module, which names their tensors."""
    return torch.nn.ModuleList(training.metrics.objective.modules)


def state_of_average(checkpoint: files.Checkpoint) -> dict[str, Any]:
    """Return the state of the average of the weights, with its tensors."""
    averages = checkpoint.tensors.get("average", {})
    return {**checkpoint.state["average"], "averages": averages}


def in_words(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, str]]:
    """Describe the dtype and shape of each tensor of each group, in order of names.

    A loaded checkpoint has the tensors in this order, too, so a resumed run writes the
    same bytes as an unbroken run.

    Example:
        >>> in_words({"model": {"w": torch.zeros(2, 3)}})
        {'model': {'w': 'float32 [2, 3]'}}
    """
    return {
        group: {
            name: f"{str(one.dtype)[len('torch.') :]} {list(one.shape)}"
            for name, one in sorted(named.items())
        }
        for group, named in tensors.items()
    }


class ProcessPart(NamedTuple):
    """The part of the state that differs by process.

    Attributes:
        random: Random states by name.
        num_blocks: Number of blocks (batches) that each stream has returned.
        metric_sums: Sums of the metrics of the present epoch; None between epochs.
        buffers: Tensors that differ from process 0's, as `"group/name"`.
    """

    random: Mapping[str, Tensor]
    num_blocks: Mapping[str, int]
    metric_sums: dict[str, Any] | None
    buffers: Mapping[str, Tensor] = {}

    def stream(self, name: str) -> StreamState | None:
        """Return the state of a stream; None if no pass has begun.

        Raises:
            DataError: The state of a loader is damaged.
        """
        return StreamState.of(name, self.num_blocks.get(name, 0), self.random)


def parts_of(checkpoint: files.Checkpoint) -> list[ProcessPart]:
    """Return the parts of all processes that wrote a checkpoint, without buffers."""
    state, tensors = checkpoint.state, checkpoint.tensors
    alone = {"num_blocks": state["data"]["num_blocks"], "figures": state["figures"]}
    others = tensors.get("processes", {})
    return [
        ProcessPart(
            under(f"{index}/random/", others) if index else tensors.get("random", {}),
            plain["num_blocks"],
            plain["figures"],
        )
        for index, plain in enumerate(state.get("processes") or [alone])
    ]


def tensors_of_other_processes(parts: Sequence[ProcessPart]) -> Tensors:
    """Return the random states of processes 1 and up, and their buffers that differ."""
    tensors: Tensors = {}
    for index, part in enumerate(parts[1:], 1):
        tensors.update({f"{index}/random/{n}": t for n, t in part.random.items()})
    for name, first in parts[0].buffers.items():
        if not all(files.are_equal(first, part.buffers[name]) for part in parts):
            for index, part in enumerate(parts[1:], 1):
                tensors[f"{index}/{name}"] = part.buffers[name]
    return tensors


def replace_arrays(value: Any, tensors: Tensors) -> Any:
    """Replace the arrays in a state by their names, and add them to the tensors.

    Arrays of texts and objects stay, and are refused when the state is written.

    Example:
        >>> tensors = {}
        >>> replace_arrays({"best": np.ones(2), "wait": 1}, tensors)
        {'best': {'$tensor': '0', 'is_array': True}, 'wait': 1}
        >>> tensors
        {'0': tensor([1., 1.], dtype=torch.float64)}
    """
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    if is_array or isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(value).detach().cpu().clone()
        return {"$tensor": name, "is_array": is_array}
    if isinstance(value, dict):
        return {key: replace_arrays(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        if are_numbers(value):
            return list(value)
        return [replace_arrays(element, tensors) for element in value]
    return value


def callback_states(checkpoint: files.Checkpoint) -> Any:
    """Return the states of the callbacks in a checkpoint, with their arrays.

    Raises:
        DamagedCheckpointError: An array is missing.
    """
    tensors = checkpoint.tensors.get("callbacks", {})

    def with_arrays(value: Any) -> Any:
        if isinstance(value, dict) and "$tensor" in value:
            check_saved(_REFERENCE, value, "the state of a callback")
            if value["$tensor"] not in tensors:
                raise damaged(f"callbacks.safetensors lacks {value['$tensor']}")
            tensor = tensors[value["$tensor"]]
            return tensor.numpy() if value["is_array"] else tensor
        if isinstance(value, dict):
            return {key: with_arrays(one) for key, one in value.items()}
        if isinstance(value, list):
            return [with_arrays(one) for one in value]
        return value

    return with_arrays(checkpoint.state["callbacks"])
