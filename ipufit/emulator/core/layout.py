# SPDX-License-Identifier: Apache-2.0
"""The layout of a call: the rows of each micro-batch, and the results returned.

Dim 0 of every input is read as `[D, G, R, B]`: device iteration slowest, then
accumulation step, then replica, then sample. Outputs come back in the same order; the
output mode selects the micro-batches whose outputs do (PopTorch user guide, "Efficient
data batching"; PopART, `stepiosplitter.cpp`, `dataflow.hpp`).

A parameter whose values differ between groups of replicas has a leading dimension on
the host, one element for each group. A replica holds the element of its group, and the
module is traced with one element. Replicas sum gradients within their group only
(PopTorch user guide, "Grouping tensor weights across replicas").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Dict, Iterable, Mapping, NamedTuple

import torch
from torch import Tensor

from ..enums import CommGroupType, OutputMode, VariableRetrievalMode
from ..errors import Error, createPoptorchError
from .float16 import device_tensor, host_tensor
from .recording import named_weights

if TYPE_CHECKING:
    from ..options import Options


class Layout:
    """The factors D, G and R of a call.

    Args:
        options: The options to read them from.

    Attributes:
        device_iterations: D.
        gradient_accumulation: G.
        replicas: R.
        steps: Number of micro-batches that one replica runs in a call, `D * G`.
        input_groups: Number of groups of replicas that share rows; R without
            `inputReplicaGrouping`.
        input_blocks: Number of micro-batches that the rows of a call are cut into.
        micro_batches: The indices of all micro-batches of a call, `step * R + replica`.
        micro_batches_per_update: Number of micro-batches of one update, `G * R`.
        mode: The output mode: Final, EveryN, All or Sum.

    Example:
        >>> from ipufit.emulator import Options
        >>> options = Options().replicationFactor(4)
        >>> Layout(options.inputReplicaGrouping(2, CommGroupType.Orthogonal)).groups
        [0, 1, 0, 1]
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.device_iterations: int = options.device_iterations
        self.gradient_accumulation: int = options.Training.gradient_accumulation
        self.replicas: int = options.replication_factor
        self.steps = self.device_iterations * self.gradient_accumulation
        self.input_groups = self.replicas // options.input_group_size
        self.input_blocks = self.steps * self.input_groups
        self.micro_batches = range(self.steps * self.replicas)
        self.micro_batches_per_update = self.gradient_accumulation * self.replicas
        self.mode = OutputMode(options.output_mode)

    @cached_property
    def returned_steps(self) -> range:
        """The steps whose outputs come back, from 0 in a call.

        With `Sum` this is the last step, whose outputs are the sums over all steps.
        """
        if self.mode is OutputMode.EveryN:
            # Counts micro-batches, not device iterations, once G > 1 (PopART,
            # `anchorreturntype_test.py`, against the words of its header).
            period = self._options.output_return_period
            return range(period - 1, self.steps, period)
        is_all = self.mode is OutputMode.All
        return range(0 if is_all else self.steps - 1, self.steps)

    def describe(self) -> str:
        """Return the factors as text for error messages."""
        return (
            f"device iterations ({self.device_iterations}) * input groups "
            f"({self.input_groups}, of {self.replicas} replicas) * gradient "
            f"accumulation ({self.gradient_accumulation})"
        )

    @cached_property
    def groups(self) -> list[int]:
        """The input group of each replica."""
        is_orthogonal = self._options.input_cgt == CommGroupType.Orthogonal
        return _group_of_each(self.replicas, self.input_groups, is_orthogonal)


def _group_of_each(replicas: int, count: int, is_orthogonal: bool) -> list[int]:
    size = replicas // count
    return [r % count if is_orthogonal else r // size for r in range(replicas)]


class Inputs:
    """The inputs of one call, cut into micro-batches.

    With groups of replicas and several steps the rows are read `[D, G, groups, B]`,
    the natural extension of the layout without groups; PopTorch's own arithmetic
    gives members of one group different rows there.

    Args:
        tensors: The caller's tensors, of the combined batch size.
        written: Indices of the tensors that the program changes in place.
        reads_memory: Whether the program reads memory by strides of its own, which
            finds other micro-batches beside the rows of one.

    Attributes:
        taken: Time stamp at which each micro-batch was taken, in seconds.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: list[Tensor],
        written: tuple[int, ...] = (),
        *,
        reads_memory: bool = False,
    ) -> None:
        self.taken: list[float] = []
        self._layout = layout
        self._tensors = tensors
        self._written = written
        self._on_device = [
            device_tensor(tensor.detach(), copy=tensor.is_inference())
            for tensor in tensors
        ]
        self._copies: list[tuple[Tensor, ...]] = []
        self._is_copied = bool(written) or reads_memory

    @cached_property
    def _blocks(self) -> list[tuple[Tensor, ...]]:
        """The rows of each micro-batch, cut at the first use."""
        count = self._layout.input_blocks
        if count == 1 or not self._on_device:  # 0-d tensors too
            return [tuple(self._on_device)] * count
        return list(zip(*map(torch.unbind, self.stacked(0, count))))

    def rows(self, index: int) -> tuple[Tensor, ...]:
        """Return the rows of a micro-batch."""
        self.taken.append(perf_counter())
        step, replica = divmod(index, self._layout.replicas)
        group = self._layout.groups[replica]
        rows = self._blocks[step * self._layout.input_groups + group]
        if self._is_copied:
            whole = torch.contiguous_format
            rows = tuple(torch.clone(row, memory_format=whole) for row in rows)
            self._copies.append(rows)
        return rows

    def stacked(self, first: int, count: int) -> list[Tensor]:
        """Return the rows of micro-batches, with a first dimension of these."""
        total = self._layout.input_blocks
        stacked = [
            tensor.view(total, tensor.shape[0] // total, *tensor.shape[1:])
            for tensor in self._on_device
        ]
        return [tensor[first : first + count].contiguous() for tensor in stacked]

    def note_fold(self, started: float, count: int) -> None:
        """Set the time stamps of `count` micro-batches that ran at once.

        Args:
            started: Time stamp at which the fold began, in seconds.
            count: Number of micro-batches.
        """
        share = (perf_counter() - started) / count
        self.taken += [started + index * share for index in range(count)]

    def write_back(self) -> None:
        """Copy the program's changes of its inputs into the caller's tensors.

        PopTorch copies such tensors back after the run (`PoplarExecutable.cpp`).
        Nothing is copied from replicas that share their rows.

        Raises:
            Error: The program has changed the shape of an input.
        """
        is_shared = self._layout.input_groups < self._layout.replicas
        for index in () if is_shared else self._written:
            rows = _join(tuple(copies[index] for copies in self._copies))
            tensor = self._tensors[index].detach()
            try:
                whole = rows.expand(tensor.shape)
            except RuntimeError as error:
                raise createPoptorchError(
                    f"The model changes the shape of an input in place, from "
                    f"{list(tensor.shape)} to {list(rows.shape)}, and what is changed "
                    "in place is copied back into the caller's tensor. Change the "
                    "shape of a new one: `x = x.unsqueeze(1)`, not `x.unsqueeze_(1)`."
                ) from error
            tensor.copy_(whole)


class Outputs:
    """Collects the results of micro-batches that an output mode selects.

    Args:
        layout: The layout of the call.
    """

    def __init__(self, layout: Layout) -> None:
        self._mode, self._replicas = layout.mode, layout.replicas
        self._returned = layout.returned_steps
        self._kept: list[list[Tensor]] = []

    def add(self, index: int, tensors: tuple[Tensor, ...]) -> None:
        """Store the results of one micro-batch; called in the order of the layout."""
        step, replica = divmod(index, self._replicas)
        if self._mode is OutputMode.Sum:
            if step == 0:
                self._kept.append([tensor.detach().clone() for tensor in tensors])
            else:
                for total, tensor in zip(self._kept[replica], tensors):
                    total += tensor.detach()
        elif step in self._returned:
            self._kept.append([tensor.detach() for tensor in tensors])

    def add_stacked(self, first: int, stacked: Iterable[Tensor]) -> None:
        """Store the results of micro-batches from the index `first` on."""
        stacked = [tensor.detach() for tensor in stacked]
        if self._mode is OutputMode.All:
            self._kept.append([t.flatten(0, 1) if t.dim() > 1 else t for t in stacked])
            return
        for index, tensors in enumerate(zip(*map(torch.unbind, stacked)), first):
            self.add(index, tensors)

    def tensors(self) -> list[Tensor]:
        """Return the results of the call as new tensors, of at most 32 bits."""
        joined = [_join(blocks) for blocks in zip(*self._kept)]
        return list(map(host_tensor, joined))


def _join(blocks: tuple[Tensor, ...]) -> Tensor:
    if len(blocks) == 1:
        return torch.clone(blocks[0], memory_format=torch.contiguous_format)
    # Folds make vectors of scalars.
    return torch.cat(torch.atleast_1d(*blocks))  # type: ignore[no-untyped-call,unused-ignore]


def synthetic_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Return inputs of the same shapes and types, equal in each call.

    Returns:
        Normally distributed numbers. Integers are zero: they may be indices.

    Example:
        >>> synthetic_inputs([torch.ones(2, dtype=torch.int32)])
        [tensor([0, 0], dtype=torch.int32)]
    """
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        if tensor.is_floating_point()
        else torch.zeros_like(tensor)
        for tensor in tensors
    ]


Tensors = Dict[str, Tensor]
"""Tensors by name."""

_SLOT = re.compile("^[A-Za-z0-9]+___(specific___)?")
"""What precedes the name of a parameter in keys of a state, such as `Accl1___`."""


class Grouping(NamedTuple):
    """The arguments of `replicaGrouping`."""

    comm_group_type: CommGroupType
    shards: int
    variable_retrieval_mode: VariableRetrievalMode


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
        members = tuple(_group_of_each(replicas, count, is_orthogonal))
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
    resolved: dict[str, ReplicaGroups] = {}
    for name, grouping in groupings.items():
        groups = resolved[name] = ReplicaGroups.of(grouping, replicas)
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


# Optimizers ---------------------------------------------------------------------


def element_name(name: str, group: int) -> str:
    """Name the element of a parameter that one group has.

    Example:
        >>> element_name("weight", 2)
        'weight..2'
    """
    return f"{name}..{group}"  # no name of a weight has two dots in a row


def join_state(
    state: Mapping[str, Tensors], groups: Mapping[str, ReplicaGroups]
) -> dict[str, Tensors]:
    """Translate the state of a device's optimizer to the host's.

    The device has a state for each group's element of a parameter. The host has one
    state for the whole parameter, with a leading dimension. Hyper-parameters get no
    leading dimension: all groups share them.

    Example:
        >>> groups = {"w": ReplicaGroups(members=(0, 1), returned=(0, 1))}
        >>> elements = {"Step___w..0": torch.ones(()), "Step___w..1": torch.ones(())}
        >>> join_state({"ipu_state": elements, "ipu_param": {}}, groups)
        {'ipu_state': {'Step___w': tensor([1., 1.])}, 'ipu_param': {}}
    """
    joined: dict[str, Tensors] = {"ipu_state": {}, "ipu_param": {}}
    for part, of_host in joined.items():
        of_device = state[part]
        for key, tensor in of_device.items():
            name = key.partition("..")[0]
            members = groups.get(_SLOT.sub("", name, 1))
            if members is not None and part == "ipu_state":
                keys = [element_name(name, group) for group in members.members]
                tensor = torch.stack([of_device[keys[r]] for r in members.returned])
            of_host[name] = tensor
    return joined


def split_state(
    state: Mapping[str, Tensors], groups: Mapping[str, ReplicaGroups]
) -> dict[str, Tensors]:
    """Translate the state of the host's optimizer to the device's.

    Raises:
        Error: A tensor has no value for each group.
    """
    split: dict[str, Tensors] = {"ipu_state": {}, "ipu_param": {}}
    for part, of_device in split.items():
        for key, tensor in state[part].items():
            members = groups.get(_SLOT.sub("", key, 1))
            if members is None:
                of_device[key] = tensor
                continue
            rows, has_rows = len(members.returned), part == "ipu_state"
            if has_rows and (tensor.dim() == 0 or tensor.shape[0] != rows):
                raise Error(
                    f"The optimizer state {key} is of shape {tuple(tensor.shape)}, "
                    f"but its first dimension must be {rows}, that of the "
                    "parameter.",
                    type="poptorch_cpp_error",
                )
            for group in range(members.count):
                element = tensor[members.row(group)] if has_rows else tensor
                of_device[element_name(key, group)] = element
    return split
