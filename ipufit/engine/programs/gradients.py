# SPDX-License-Identifier: Apache-2.0
"""Gradients that come back from the device, through anchors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.errors import ConfigError

_PREFIX = "gradient of "
_LONG_NAME = "Gradient___module."
"""PopART's prefix, and where a `Step` has the user's module."""


@dataclass(frozen=True)
class WatchedGradients:
    """Which gradients come back, and what they are made into.

    Attributes:
        shapes: Of the parameters, by name.
    """

    shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module, names: Sequence[str]) -> WatchedGradients:
        """Those of some of a module's parameters.

        Args:
            module: The user's.
            names: Of parameters.
        """
        if not names:
            return cls()
        parameters = dict(module.named_parameters())
        return cls({name: parameters[name].shape for name in names})

    @property
    def anchors(self) -> dict[str, str]:
        """PopART's names of the tensors, by the names they are asked for."""
        return {_PREFIX + name: _LONG_NAME + name for name in self.shapes}

    def means(
        self,
        anchored: Callable[[str], Tensor],
        options: poptorch.Options,
        plan: BatchPlan,
        loss_scaling: float,
    ) -> dict[str, Tensor]:
        """The gradients of a call's updates, their mean.

        An anchored gradient is that of one micro-batch on one replica, multiplied by
        the loss scaling (PopART, `tensornames.hpp`); under `OutputMode.Sum` they are
        added up on each replica. An update's is their mean, or their sum if gradients
        are reduced by adding.

        Args:
            anchored: Gives what an anchor saw.
            options: Of the training program.
            plan: The factors of a call.
            loss_scaling: Of the optimiser.

        Returns:
            float32 tensors of the parameters' shapes.

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
        return means
