# SPDX-License-Identifier: Apache-2.0
"""Parameters whose values differ between groups of replicas.

On the host such a parameter has a leading dimension, one element for each group. A
replica holds the element of its group, and the module is traced with one element.
Replicas sum gradients within their group only (PopTorch user guide, "Grouping tensor
weights across replicas").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Iterable, Mapping, NamedTuple

import torch
from torch import Tensor

from ipufit.emulator._tracing.recording import named_weights
from ipufit.emulator.enums import CommGroupType, VariableRetrievalMode
from ipufit.emulator.errors import Error, createPoptorchError, require

Tensors = Dict[str, Tensor]
"""Tensors by name."""

_SLOT = re.compile("[A-Za-z0-9]+___(specific___)?")


class Grouping(NamedTuple):
    """The arguments of `replicaGrouping`."""

    comm_group_type: CommGroupType
    shards: int
    variable_retrieval_mode: VariableRetrievalMode

    def check(self) -> Grouping:
        """Check the types of the arguments, and return the grouping.

        Raises:
            AssertionError: An argument has another type.
        """
        require(
            isinstance(self.comm_group_type, CommGroupType),
            f"{self.comm_group_type!r}: use CommGroupType.",
        )
        require(
            isinstance(self.shards, int),
            f"The number of replicas in a group is an int: {self.shards!r}.",
        )
        require(
            isinstance(self.variable_retrieval_mode, VariableRetrievalMode),
            f"{self.variable_retrieval_mode!r}: use VariableRetrievalMode.",
        )
        return self


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of replicas that share a value of one parameter.

    Attributes:
        members: Number of each replica's group.
        returned: For each row of the host's tensor the replica whose value is copied
            into it.

    Example:
        >>> grouping = Grouping(
        ...     CommGroupType.Orthogonal, 2, VariableRetrievalMode.OnePerGroup
        ... )
        >>> groups = ReplicaGroups.of(grouping, replicas=6)
        >>> groups.members, groups.returned
        ((0, 1, 2, 0, 1, 2), (0, 1, 2))
    """

    members: tuple[int, ...]
    returned: tuple[int, ...]

    @classmethod
    def of(cls, grouping: Grouping, replicas: int) -> ReplicaGroups:
        """Divide replicas into groups.

        Raises:
            Error: The size of a group doesn't divide their number.
        """
        kind, size, mode = grouping
        if kind is CommGroupType.All:
            size = replicas
        elif kind is CommGroupType.NoGrouping:
            size = 1
        if size < 1 or replicas % size:
            raise createPoptorchError(
                f"{replicas} replicas (Options.replicationFactor) can't be put into "
                f"groups of {size}: `shards` of replicaGrouping must divide them."
            )
        count = replicas // size
        is_orthogonal = kind is CommGroupType.Orthogonal
        members = tuple(
            replica % count if is_orthogonal else replica // size
            for replica in range(replicas)
        )
        one_per_group = tuple(members.index(group) for group in range(count))
        is_all = mode is VariableRetrievalMode.AllReplicas
        return cls(members, tuple(range(replicas)) if is_all else one_per_group)

    @property
    def count(self) -> int:
        """Number of groups."""
        return max(self.members) + 1

    def row(self, group: int) -> int:
        """Return the row of the host's tensor from which a group gets its value.

        With `AllReplicas` a group has several rows; the first one counts.
        """
        return self.returned.index(self.members.index(group))


def resolve_groupings(
    groupings: Mapping[str, Grouping], module: torch.nn.Module, replicas: int
) -> dict[str, ReplicaGroups]:
    """Return the groups of each parameter, and check the shapes of its host tensor.

    Raises:
        Error: A tensor can't be split between its groups.
    """
    weights = named_weights(module) if groupings else {}
    resolved = {
        name: ReplicaGroups.of(grouping, replicas)
        for name, grouping in groupings.items()
    }
    for name, groups in resolved.items():
        weight, rows = weights[name], len(groups.returned)
        if weight.dim() == 0:
            raise createPoptorchError(
                "Scalars cannot be passed as per-replica weight tensor values: "
                f"parameter {name} has no dimension for its {groups.count} groups "
                "of replicas."
            )
        if weight.shape[0] != rows:
            raise createPoptorchError(
                f"Parameter {name} is of shape {tuple(weight.shape)}, but its "
                f"first dimension must be {rows}: its replicas form {groups.count} "
                f"groups, and {rows} values are read back."
            )
        if not weight.is_contiguous():
            raise createPoptorchError(
                f"Parameter {name} differs between replicas, so it must be "
                "contiguous: create it from `tensor.contiguous()`."
            )
        if not weight.is_floating_point():
            raise createPoptorchError(
                f"Parameter {name} is of {weight.dtype}, which is compiled in: "
                "only floating-point parameters can differ between replicas."
            )
    return resolved


def hold_one_element(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Replace grouped parameters by one element each.

    Args:
        module: The module whose parameters are replaced.
        names: Names of the grouped parameters.
    """
    weights = named_weights(module)
    elements = {
        id(weights[name]): torch.nn.Parameter(
            weights[name].detach()[0], requires_grad=weights[name].requires_grad
        )
        for name in names
    }
    for owner in module.modules() if elements else ():
        for key, value in owner._parameters.items():
            owner._parameters[key] = elements.get(id(value), value)


# Optimisers ---------------------------------------------------------------------


def element_name(name: str, group: int) -> str:
    """Name the element of a parameter that one group has.

    Example:
        >>> element_name("weight", 2)
        'weight..2'
    """
    return f"{name}..{group}"  # no name of a weight has two dots in a row


class GroupedState:
    """Translates optimiser states between the device and the host.

    The device has a state for each group's element of a parameter. The host has one
    state for the whole parameter, with a leading dimension.

    Args:
        groups: Groups of each grouped parameter, by its name.

    Example:
        >>> state = GroupedState({"w": ReplicaGroups(members=(0, 1), returned=(0, 1))})
        >>> elements = {"Step___w..0": torch.ones(()), "Step___w..1": torch.ones(())}
        >>> state.joined({"ipu_state": elements, "ipu_param": {}})
        {'ipu_state': {'Step___w': tensor([1., 1.])}, 'ipu_param': {}}
    """

    def __init__(self, groups: Mapping[str, ReplicaGroups]) -> None:
        self._groups = groups

    def group_index(self, index: Mapping[str, int | None]) -> dict[str, int | None]:
        """Map each element to the parameter group of its parameter."""
        translated = dict(index)
        for name, groups in self._groups.items():
            for group in range(groups.count):
                translated[element_name(name, group)] = index[name]
        return translated

    def joined(self, state: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Translate a state of the device to the host's.

        Hyper-parameters get no leading dimension: all groups share them.
        """
        tensors, values = dict(state["ipu_state"]), dict(state["ipu_param"])
        for name, groups in self._groups.items():
            keys = [element_name(name, group) for group in range(groups.count)]
            for slot in _slots(tensors, keys[0]):
                elements = [tensors.pop(slot + key) for key in keys]
                tensors[slot + name] = torch.stack(
                    [elements[groups.members[replica]] for replica in groups.returned]
                )
            for slot in _slots(values, keys[0]):
                values[slot + name], *_ = [values.pop(slot + key) for key in keys]
        return {"ipu_state": tensors, "ipu_param": values}

    def split(self, state: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Translate a state of the host to the device's.

        Raises:
            Error: A tensor has no value for each group.
        """
        tensors, values = dict(state["ipu_state"]), dict(state["ipu_param"])
        for name, groups in self._groups.items():
            for slot in _slots(tensors, name):
                tensor = tensors.pop(slot + name)
                rows = len(groups.returned)
                if tensor.dim() == 0 or tensor.shape[0] != rows:
                    raise Error(
                        f"The optimizer state {slot + name} is of shape "
                        f"{tuple(tensor.shape)}, but its first dimension must be "
                        f"{rows}, that of the parameter.",
                        type="poptorch_cpp_error",
                    )
                for group in range(groups.count):
                    key = element_name(slot + name, group)
                    tensors[key] = tensor[groups.row(group)]
            for slot in _slots(values, name):
                value = values.pop(slot + name)
                for group in range(groups.count):
                    values[element_name(slot + name, group)] = value
        return {"ipu_state": tensors, "ipu_param": values}


def _slots(tensors: Tensors, name: str) -> list[str]:
    """List the prefixes of keys that end with `name`, such as `Accl1___`."""
    slots = [key[: -len(name)] for key in tensors if key.endswith(name)]
    return [slot for slot in slots if _SLOT.fullmatch(slot)]
