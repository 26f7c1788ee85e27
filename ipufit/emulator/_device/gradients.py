# SPDX-License-Identifier: Apache-2.0
"""Compute gradients, and reduce those of the micro-batches of an update to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch
from torch import Tensor

from ipufit.emulator._device.backward_pass import run_backward
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._processes import GradientSums
from ipufit.emulator._program.floating_point import (
    refuse_bad_gradients,
    stops_at_exceptions,
)
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType

if TYPE_CHECKING:
    from ipufit.emulator._device.weights import DeviceWeights
    from ipufit.emulator._optimizers.settings import OptimizerSettings
    from ipufit.emulator._options.options import Options


class GradientReduction:
    """Computes gradients, adds up those of an update, and takes their sum or mean.

    Args:
        trained: The device's weights that get gradients.
        divisor: P * G * R for a mean over P processes, 1 for a sum.
        is_running: Divide each gradient before it is added (`Running`) instead of
            their sum afterwards (`Post`).
        loss_scaling: The loss is multiplied by it; the optimiser divides it out.
        groups: For each element of a grouped weight the number of groups. The running
            mean of a group divides by G and the size of the group (PopART,
            `optimizerdecompose.cpp`); a mean of the `Post` kind by all of `divisor`.
        accum_type: The type in which float16 gradients are added up.
        is_checked: Whether a gradient that isn't finite stops the model.
        sums: Adds gradients up over processes; None if there is one, or the program
            is only compiled.
        num_processes: P.

    Attributes:
        share: Divides the gradients of a micro-batch where they are made.
        scale: Multiplies the losses.
        divisor: Divides the sums of gradients.
        sums: Adds gradients up over processes, or None.
        num_processes: The number of processes that train together.
    """

    def __init__(
        self,
        trained: Mapping[str, Tensor],
        divisor: int,
        is_running: bool,
        loss_scaling: float,
        groups: Mapping[str, int],
        accum_type: torch.dtype = torch.float32,
        is_checked: bool = False,
        sums: GradientSums | None = None,
        num_processes: int = 1,
    ) -> None:
        self._trained = trained
        self._halves = {n: t for n, t in trained.items() if t.dtype == torch.float16}
        self._is_checked = is_checked
        self._accum_type = accum_type
        self._accumulated: dict[str, Tensor] = {}
        self.divisor = 1 if is_running else divisor
        self.share = divisor if is_running else 1
        self.scale = loss_scaling / self.share
        self.sums = sums
        self.num_processes = num_processes
        self._factors = groups if is_running else {}
        self._last_seed = torch.empty(())
        self._seed_key: tuple[object, ...] = ()

    @classmethod
    def from_options(
        cls,
        options: Options,
        layout: Layout,
        settings: OptimizerSettings,
        weights: DeviceWeights,
        sums: GradientSums | None = None,
    ) -> GradientReduction:
        """Read the reduction off the options and the settings of the optimiser."""
        training = options.Training
        kind = training.accumulation_and_replication_reduction_type
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        is_mean = kind == ReductionType.Mean
        num_processes = options.Distributed.numProcesses
        replicas = layout.replicas * num_processes
        return cls(
            weights.trained,
            divisor=layout.gradient_accumulation * replicas if is_mean else 1,
            is_running=is_mean and strategy == MeanReductionStrategy.Running,
            loss_scaling=settings.loss_scaling,
            groups=weights.groups_of_elements,
            accum_type=settings.accum_type,
            is_checked=stops_at_exceptions(options),
            sums=sums,
            num_processes=num_processes,
        )

    def forget(self) -> None:
        """Drop the gradients that a call has left which failed midway."""
        self._accumulated.clear()
        for tensor in self._trained.values():
            tensor.grad = None

    def backward(self, loss: Tensor, factor: float = 1.0) -> None:
        """Add the gradients of one micro-batch; none if nothing is trained.

        Args:
            loss: The loss of a micro-batch, or the losses of several.
            factor: Scales it besides the loss scaling.
        """
        if loss.requires_grad:
            run_backward(loss, self._seed(loss, self.scale * factor))
        self._accumulate_halves()

    def _seed(self, loss: Tensor, value: float) -> Tensor:
        """A tensor like the loss, filled with a value; the last one if it suits."""
        key = value, loss.dtype, loss.shape
        if key != self._seed_key:
            self._last_seed, self._seed_key = torch.full_like(loss, value), key
        return self._last_seed

    def _accumulate_halves(self) -> None:
        """Add the float16 gradients of one micro-batch in the optimiser's type.

        torch would add them up in float16; a device does what `accum_type` says.
        """
        for name, tensor in self._halves.items():
            if tensor.grad is not None:
                gradient = tensor.grad.to(self._accum_type)
                tensor.grad = None
                if name in self._accumulated:
                    self._accumulated[name] += gradient
                else:
                    self._accumulated[name] = gradient

    def take_gradients(self) -> dict[str, Tensor | None]:
        """Give the reduced gradients by name; the next update starts from nothing."""
        gradients: dict[str, Tensor | None] = {}
        for name, tensor in self._trained.items():
            gradients[name] = tensor.grad
            tensor.grad = None
        if self._accumulated:
            gradients.update(self._accumulated)
            self._accumulated.clear()
        if self.sums is not None:
            self.sums.add_up(gradients, self.divisor)
        for name, factor in self._factors.items():
            gradient = gradients[name]
            if gradient is not None:
                gradient.mul_(factor)
        if self.divisor != 1 and self.sums is None:
            present = [g for g in gradients.values() if g is not None]
            if present:
                torch._foreach_div_(present, float(self.divisor))
        if self._is_checked:
            refuse_bad_gradients(gradients)
        return gradients
