# SPDX-License-Identifier: Apache-2.0
"""Anchored tensors that are in no graph: gradients, and updated weights and states."""

from __future__ import annotations

from typing import Callable, Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._layout.layout import Outputs
from ipufit.emulator._layout.replica_groups import ReplicaGroups, element_name
from ipufit.emulator._optimizers.device_optimizer import DeviceOptimizer
from ipufit.emulator._program.anchors import UPDATED, Anchors, snapshot


class Watch:
    """Sees the anchored gradients and updates of one call of a training model.

    A gradient is that of one micro-batch on one replica: before gradients are
    accumulated or reduced, and multiplied by the loss scaling, as the tensor of this
    name is on a device (PopART, `tensornames.hpp`). What an update leaves is the same
    for all micro-batches that it is made of.

    Use it as a context manager around the call.

    Args:
        anchors: The tensors to see.
        weights: The device's weights.
        groups: The weights, by name, that differ between groups of replicas.
        num_replicas: The number of replicas.
        gradients: Collects the gradients of each micro-batch.
        updates: Collects the updated tensors, for each micro-batch too.
        share: The divisor of gradients for a running mean, which is taken out again.
    """

    def __init__(
        self,
        anchors: Anchors,
        weights: DeviceWeights,
        groups: Mapping[str, ReplicaGroups],
        num_replicas: int,
        gradients: Outputs,
        updates: Outputs,
        share: float,
    ) -> None:
        self._anchors = anchors
        self._weights = weights
        self._groups = groups
        self._num_replicas = num_replicas
        self._gradients = gradients
        self._updates = updates
        self._share = share
        self._latest: dict[str, Tensor] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Watch:
        for name in set(self._anchors.gradients.values()):
            elements = {id(t): t for t in self._weights.of_replicas(name)}
            for element in elements.values():
                hook = element.register_hook(self._keep(name))  # type: ignore[no-untyped-call,unused-ignore]
                self._hooks.append(hook)
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._latest[name] = gradient

        return keep

    def saw_micro_batch(self, step: int, replica: int) -> None:
        """Take the gradients of one micro-batch; zeros where none was computed."""
        values: list[Tensor] = []
        for name in self._anchors.gradients.values():
            gradient = self._latest.get(name)
            if gradient is None:
                gradient = torch.zeros_like(self._weights.of_replicas(name)[replica])
            # A copy in any case: torch goes on adding to this memory.
            values.append(torch.mul(gradient, self._share))
        self._gradients.add(step, replica, tuple(values))

    def saw_update(self, steps: range, optimizer: DeviceOptimizer) -> None:
        """Take the tensors that the update of the micro-batches of `steps` has left."""
        if not self._anchors.after_updates:
            return
        tensors = optimizer.tensors()
        values = [
            [snapshot(value) for value in self._of_replicas(name, tensors)]
            for name in self._anchors.after_updates.values()
        ]
        for step in steps:
            for replica, of_replica in enumerate(zip(*values)):
                self._updates.add(step, replica, of_replica)

    def _of_replicas(self, name: str, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        if name.startswith(UPDATED):
            return self._weights.of_replicas(name[len(UPDATED) :])
        for weight, groups in self._groups.items():
            if name.endswith(f"___{weight}"):
                return [tensors[element_name(name, g)] for g in groups.members]
        return [tensors[name]] * self._num_replicas

    def tensors(self) -> dict[str, Tensor]:
        """All collected tensors, by the user's names."""
        return {
            **dict(zip(self._anchors.gradients, self._gradients.tensors())),
            **dict(zip(self._anchors.after_updates, self._updates.tensors())),
        }
