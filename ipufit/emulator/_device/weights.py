# SPDX-License-Identifier: Apache-2.0
"""The device's side of a compiled model: its weights and their gradients.

Nothing here is shared with the host's module. Weights move only through `upload`
and `download`, so that a copy which a script forgets is missing here as it would be
on a pod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.backward_pass import run_backward
from ipufit.emulator._ground.dtypes import device_tensor
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.replica_groups import ReplicaGroups, element_name
from ipufit.emulator._ops.floating_point import (
    refuse_bad_gradients,
    stops_at_exceptions,
)
from ipufit.emulator._program.program import Program
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType

if TYPE_CHECKING:
    from ipufit.emulator._options.options import Options


class DeviceWeights:
    """The weights of one model on its replicas.

    Parameters are equal on all replicas, so they are stored once; grouped ones once
    for each group. A buffer that the program changes has a copy of its own on each.

    Args:
        program: Says which weights there are, and which change.
        host: Host tensors by name; their values are uploaded.
        replicas: Number of replicas.
        groups: Of the weights that differ between groups of replicas.

    Attributes:
        trained: The weights that have gradients, the elements of grouped ones each by
            itself.
        groups_of_elements: For each trained element the number of groups.
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
        """The host's value for each group of replicas; one if they aren't grouped."""
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
        """What the program takes on `replica`, in order."""
        arguments = self._arguments[replica]
        if not self._is_volatile:
            return arguments
        pairs = zip(arguments, self._volatile)
        return [tensor.clone() if changes else tensor for tensor, changes in pairs]

    @torch.no_grad()
    def upload(self, host: dict[str, Tensor]) -> None:
        """Take the values of those of the host's weights that are given."""
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


class GradientReduction:
    """How the gradients of the micro-batches of an update become one.

    Args:
        divisor: G * R for a mean, 1 for a sum.
        is_running: Divide each gradient before it is added (`Running`) instead of
            their sum afterwards (`Post`).
        loss_scaling: What the loss is multiplied by; the optimiser divides it out.
        groups: For each element of a grouped weight the number of groups. The running
            mean of a group divides by G and the size of the group (PopART,
            `optimizerdecompose.cpp`); a mean of the `Post` kind always by G * R.
        accum_type: In which float16 gradients are added up.
        is_checked: Whether a gradient that isn't finite stops the model.

    Attributes:
        share: What the gradients of a micro-batch are divided by where they are made.
        scale: What the losses are multiplied by.
        divisor: What the sums of gradients are divided by.
    """

    def __init__(
        self,
        divisor: int,
        is_running: bool,
        loss_scaling: float,
        groups: Mapping[str, int],
        accum_type: torch.dtype = torch.float32,
        is_checked: bool = False,
    ) -> None:
        self._is_checked = is_checked
        self._accum_type = accum_type
        self._accumulated: dict[str, Tensor] = {}
        self.divisor = 1 if is_running else divisor
        self.share = divisor if is_running else 1
        self.scale = loss_scaling / self.share
        self._factors = groups if is_running else {}

    @classmethod
    def from_options(
        cls,
        options: Options,
        layout: Layout,
        loss_scaling: float,
        groups: Mapping[str, int],
        accum_type: torch.dtype = torch.float32,
    ) -> GradientReduction:
        """Read the reduction off the options."""
        training = options.Training
        kind = training.accumulation_and_replication_reduction_type
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        is_mean = kind == ReductionType.Mean
        return cls(
            divisor=layout.gradient_accumulation * layout.replicas if is_mean else 1,
            is_running=is_mean and strategy == MeanReductionStrategy.Running,
            loss_scaling=loss_scaling,
            groups=groups,
            accum_type=accum_type,
            is_checked=stops_at_exceptions(options),
        )

    def forget(self) -> None:
        """Drop what a call that failed midway has left."""
        self._accumulated.clear()

    def backward(self, loss: Tensor, factor: float = 1.0) -> None:
        """Add the gradients of one micro-batch; none if nothing is trained.

        Args:
            loss: Of the micro-batch.
            factor: Scales it besides the loss scaling.
        """
        if loss.requires_grad:
            scale = self.scale * factor
            run_backward(loss, torch.full_like(loss, scale))

    def accumulate(self, halves: Mapping[str, Tensor]) -> None:
        """Add the float16 gradients of one micro-batch in the optimiser's type.

        torch would add them up in float16; a device does what `accum_type` says.
        """
        for name, tensor in halves.items():
            if tensor.grad is not None:
                gradient = tensor.grad.to(self._accum_type)
                tensor.grad = None
                if name in self._accumulated:
                    self._accumulated[name] += gradient
                else:
                    self._accumulated[name] = gradient

    def take_gradients(self, trained: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """The reduced gradients; the next update starts from nothing."""
        gradients: dict[str, Tensor | None] = {}
        for name, tensor in trained.items():
            gradients[name] = self._accumulated.pop(name, tensor.grad)
            tensor.grad = None
        for name, factor in self._factors.items():
            gradient = gradients[name]
            if gradient is not None:
                gradient.mul_(factor)
        if self.divisor != 1:
            present = [g for g in gradients.values() if g is not None]
            if present:
                torch._foreach_div_(present, float(self.divisor))
        if self._is_checked:
            refuse_bad_gradients(gradients)
        return gradients
