# SPDX-License-Identifier: Apache-2.0
"""Compute gradients, and reduce those of the micro-batches of an update to one."""

from __future__ import annotations

import functools
from typing import Callable

import torch
from torch import Tensor

from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._optimizers.settings import OptimizerSettings
from ipufit.emulator._options.options import Options
from ipufit.emulator._processes import GradientSums
from ipufit.emulator._program.floating_point import (
    refuse_bad_gradients,
    stops_at_exceptions,
)
from ipufit.emulator.enums import MeanReductionStrategy, ReductionType


class Gradients:
    """Computes gradients, adds up those of an update, and takes their sum or mean.

    A mean of P processes divides by P * G * R: each gradient before it is added
    (`Running`), or their sum afterwards (`Post`). The running mean of a group of
    replicas divides by G and the size of the group (PopART, `optimizerdecompose.cpp`).

    Args:
        options: The executor's options.
        layout: Has G and R.
        weights: The device's weights.
        sums: Adds gradients up over processes; None if there is one.

    Attributes:
        share: Divides the gradients of a micro-batch where they are made.
    """

    def __init__(
        self,
        options: Options,
        layout: Layout,
        weights: DeviceWeights,
        sums: GradientSums | None,
    ) -> None:
        training = options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        reduction = training.accumulation_and_replication_reduction_type
        is_mean = reduction == ReductionType.Mean
        is_running = is_mean and strategy == MeanReductionStrategy.Running
        replicas = layout.replicas * options.Distributed.numProcesses
        divisor = layout.gradient_accumulation * replicas if is_mean else 1
        self.share = divisor if is_running else 1
        self._divisor = 1 if is_running else divisor
        self._factors = weights.groups_of_elements if is_running else {}
        self._trained = weights.trained
        self._halves = {n for n, t in self._trained.items() if t.dtype == torch.float16}
        self._is_checked = stops_at_exceptions(options)
        self._sums = sums
        self._scale = 1.0
        self._accum_type = torch.float32
        self._accumulated: dict[str, Tensor] = {}
        self._backward = find_backward()
        self._seed = torch.empty(())
        self._seed_key: tuple[object, ...] = ()

    def begin(self, settings: OptimizerSettings) -> None:
        """Begin a call, and drop the gradients of one that failed midway.

        Args:
            settings: Their loss scaling multiplies the losses, and the optimizer
                divides it out. float16 gradients are added up in their `accum_type`.
        """
        self._scale = settings.loss_scaling / self.share
        self._accum_type = settings.accum_type
        self._accumulated.clear()
        for tensor in self._trained.values():
            tensor.grad = None

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add the gradients of one micro-batch; none if nothing is trained.

        Args:
            loss: The loss of a micro-batch, or the losses of several.
            factor: Scales it besides the loss scaling.
        """
        if not loss.requires_grad:
            return
        key = self._scale * factor, loss.dtype, loss.shape
        if key != self._seed_key:
            self._seed, self._seed_key = torch.full_like(loss, key[0]), key
        self._backward(loss, self._seed)
        # torch would add them up in float16; a device does as `accum_type` says.
        for name in self._halves:
            tensor = self._trained[name]
            if tensor.grad is not None:
                gradient = tensor.grad.to(self._accum_type)
                tensor.grad = None
                if name in self._accumulated:
                    self._accumulated[name] += gradient
                else:
                    self._accumulated[name] = gradient

    def take(self) -> dict[str, Tensor | None]:
        """Give the reduced gradients by name; the next update starts from nothing."""
        gradients: dict[str, Tensor | None] = {}
        for name, tensor in self._trained.items():
            gradients[name] = tensor.grad
            tensor.grad = None
        if self._accumulated:
            gradients.update(self._accumulated)
            self._accumulated.clear()
        if self._sums is not None:
            self._sums.add_up(gradients, self._divisor)
        for name, factor in self._factors.items():
            gradient = gradients[name]
            if gradient is not None:
                gradient.mul_(factor)
        if self._divisor != 1 and self._sums is None:
            present = [g for g in gradients.values() if g is not None]
            if present:
                torch._foreach_div_(present, float(self._divisor))
        if self._is_checked:
            refuse_bad_gradients(gradients)
        return gradients


@functools.lru_cache(maxsize=None)
def find_backward() -> Callable[[Tensor, Tensor], None]:
    """Find a function that adds the gradients of a loss to the `grad` of weights.

    `torch.autograd.backward` looks at its arguments for as long as the whole backward
    pass of a small network takes. Here they are always one loss, and one gradient of
    its shape, so torch's engine gets them as they are, if it takes these arguments: it
    is no public API.
    """
    try:
        engine = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined,unused-ignore]

        def backward(loss: Tensor, gradient: Tensor) -> None:
            engine(
                (loss,),
                (gradient,),
                False,  # keep the graph
                False,  # make one of this pass
                (),  # into the leaves
                allow_unreachable=True,
                accumulate_grad=True,
            )

        with torch.inference_mode(False), torch.enable_grad():
            leaf = torch.ones((), requires_grad=True)
            backward(torch.mul(leaf, 2.0), torch.ones(()))
    except (AttributeError, TypeError):
        return torch.autograd.backward
    is_right = leaf.grad is not None and float(leaf.grad) == 2.0
    return backward if is_right else torch.autograd.backward
