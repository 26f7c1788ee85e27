# SPDX-License-Identifier: Apache-2.0
"""The weights of a model on its device.

Nothing here is shared with the host's module. Weights move only through `upload`
and `download`, so that a copy which a script forgets is missing here as it would be
on a pod.
"""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._ground.torch_extras import device_tensor
from ipufit.emulator._layout.replica_groups import ReplicaGroups, element_name
from ipufit.emulator._program.program import Program


class DeviceWeights:
    """The weights of one model on its replicas.

    Parameters are equal on all replicas, so they are stored once; grouped ones once
    for each group. A buffer that the program changes has a copy of its own on each.

    Args:
        program: Has the names of the weights, and which of them it changes.
        host: Host tensors by name; their values are uploaded.
        replicas: The number of replicas.
        groups: The weights, by name, that differ between groups of replicas.

    Attributes:
        trained: The weights that have gradients, with one element for each group of
            a grouped weight.
        groups_of_elements: For each of these elements the number of groups.
    """

    def __init__(
        self,
        program: Program,
        host: dict[str, Tensor],
        replicas: int,
        groups: Mapping[str, ReplicaGroups],
    ) -> None:
        self._volatile = [name in program.volatile_weights for name in host]
        self._is_volatile = any(self._volatile)
        self._groups = groups
        self._used = program.used_weights
        self._replicas: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
        self.trained: dict[str, Tensor] = {}
        self.groups_of_elements: dict[str, int] = {}
        for name in program.weight_names:
            wants_grad = host[name].requires_grad and host[name].is_floating_point()
            is_trained = program.has_loss and wants_grad
            elements = [
                device_tensor(value, copy=True).requires_grad_(is_trained)
                for value in self._elements(name, host)
            ]
            is_own = name in program.updated_weights and not is_trained
            for replica, weights in enumerate(self._replicas):
                element = elements[self._group(name, replica)]
                weights[name] = element.clone() if is_own else element
            if is_trained and name in groups:
                keys = [element_name(name, group) for group in range(len(elements))]
                self.trained.update(zip(keys, elements))
                self.groups_of_elements.update(dict.fromkeys(keys, len(elements)))
            elif is_trained:
                self.trained[name] = elements[0]
        self._arguments = [list(weights.values()) for weights in self._replicas]

    def _elements(self, name: str, host: dict[str, Tensor]) -> list[Tensor]:
        """Give the host's value for each group of replicas; one without groups."""
        value = host[name].detach()
        groups = self._groups.get(name)
        if groups is None:
            return [value]
        return [value[groups.row(group)] for group in range(groups.count)]

    def _group(self, name: str, replica: int) -> int:
        return self._groups[name].members[replica] if name in self._groups else 0

    def of_replicas(self, name: str) -> list[Tensor]:
        """The tensors of one weight, replica by replica."""
        return [weights[name] for weights in self._replicas]

    def arguments(self, replica: int) -> list[Tensor]:
        """The weights in the order in which the program takes them on `replica`."""
        arguments = self._arguments[replica]
        if not self._is_volatile:
            return arguments
        pairs = zip(arguments, self._volatile)
        return [tensor.clone() if changes else tensor for tensor, changes in pairs]

    @torch.no_grad()
    def upload(self, host: dict[str, Tensor]) -> None:
        """Copy the values of some or all of the host's weights to the device."""
        for name in host:
            elements = self._elements(name, host)
            for replica, weights in enumerate(self._replicas):
                element = elements[self._group(name, replica)]
                weights[name].copy_(device_tensor(element))

    @torch.no_grad()
    def download(self, host: dict[str, Tensor]) -> None:
        """Write the values of the first replica, or group by group, to the host."""
        for name, tensor in self._replicas[0].items():
            target = host[name].detach()
            if name not in self._used:
                continue
            if name in self._groups:
                for row, replica in enumerate(self._groups[name].returned):
                    target[row].copy_(self._replicas[replica][name])
            else:
                target.copy_(tensor)
