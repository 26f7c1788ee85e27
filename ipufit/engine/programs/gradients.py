# SPDX-License-Identifier: Apache-2.0
"""Gradients that come back from the device, through anchors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.distributed import Processes
from ipufit.engine.weights.names import MODULE
from ipufit.errors import ConfigError

_PREFIX = "gradient of "
_POPART_PREFIX = f"Gradient___{MODULE}"


@dataclass(frozen=True)
class WatchedGradients:
    """The parameters whose gradients come back from the device.

    Attributes:
        shapes: Shapes of these parameters, by name.
    """

    shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, names: Sequence[str]) -> WatchedGradients:
        """Watch the gradients of some of a module's parameters."""
        if not names:
            return cls()
        parameters = dict(module.named_parameters())
        return cls({name: parameters[name].shape for name in names})

    @property
    def anchors(self) -> dict[str, str]:
        """PopART's names of the gradients, by our own."""
        return {_PREFIX + name: _POPART_PREFIX + name for name in self.shapes}

    def means(
        self,
        anchored: Callable[[str], Tensor],
        options: poptorch.Options,
        plan: BatchPlan,
        loss_scaling: float,
        processes: Processes,
    ) -> dict[str, Tensor]:
        """Compute the mean of the gradients of a call's updates, over all processes.

        An anchored gradient is that of one micro-batch on one replica, multiplied by
        the loss scaling (PopART, `tensornames.hpp`); under `OutputMode.Sum` they are
        added up on each replica. An update's is their mean, or their sum if gradients
        are reduced by adding.

        Args:
            anchored: Gives the tensors that an anchor got.
            options: Options of the training program.
            plan: Factors of a call.
            loss_scaling: Factor of the loss, by which gradients are too large.
            processes: The processes that train, each with replicas of its own.

        Returns:
            float32 tensors of the parameters' shapes, by name.

        Raises:
            ConfigError: No call was made yet.
        """
        kind = options.Training.accumulation_and_replication_reduction_type
        per_update = plan.gradient_accumulation * plan.replicas
        factor = per_update if kind == poptorch.ReductionType.Sum else 1
        is_sum = options.output_mode == poptorch.OutputMode.Sum.value
        means = {}
        for name, shape in self.shapes.items():
            try:
                seen = anchored(_PREFIX + name).to(torch.float32)
            except AssertionError as error:  # PopTorch's
                raise ConfigError(
                    "There are no gradients before the first call of a run: ask for "
                    "them in on_train_batch_end."
                ) from error
            seen = seen.reshape(seen.numel() // max(shape.numel(), 1), *shape)
            count = per_update * plan.device_iterations if is_sum else max(len(seen), 1)
            means[name] = seen.sum(0).mul(factor / (count * loss_scaling))
        if processes.are_several and means:
            joined = torch.cat([mean.reshape(-1) for mean in means.values()])
            is_mean = kind != poptorch.ReductionType.Sum
            total: Any = processes.summed(joined)
            total.div_(processes.count if is_mean else 1)
            parts = total.split([mean.numel() for mean in means.values()])
            for (name, mean), part in zip(means.items(), parts):
                means[name] = part.reshape(mean.shape)
        return means
