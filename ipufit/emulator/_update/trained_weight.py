# SPDX-License-Identifier: Apache-2.0
"""A weight that is updated on the device, and PopART's names of its tensors."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._optimizers.base import StateTensors, logger
from ipufit.emulator._optimizers.values import OptimizerSettings
from ipufit.emulator._update.rule import UpdateRule
from ipufit.emulator.errors import Error


class TrainedWeight:
    """A weight, its rule, its hyper-parameters and its optimiser state.

    Args:
        name: The weight's name.
        weight: The device's tensor.
        group_index: Number of its parameter group; None for a weight in no group, which
            trains with the optimiser's defaults.
        rule: The rule that updates it.
        settings: The settings that hyper-parameters are derived from.
    """

    def __init__(
        self,
        name: str,
        weight: Tensor,
        group_index: int | None,
        rule: UpdateRule,
        settings: OptimizerSettings,
    ) -> None:
        self.name = name
        self.weight = weight
        self.group_index = group_index
        self.rule = rule
        self.take_values(settings)
        self.reset()

    def take_values(self, settings: OptimizerSettings) -> None:
        """Derive the hyper-parameters from settings."""
        variables = settings.variables(self.group_index)
        self.scalars = self.rule.scalars(variables, settings.scaling)

    def reset(self) -> None:
        """Begin anew, with the state before the first update."""
        self.state = self.rule.initial_state(self.weight, self.scalars)

    def state_tensors(self) -> StateTensors:
        """Give the device's state tensors by name, such as `Accl1___<weight>`."""
        return {f"{slot}___{self.name}": tensor for slot, tensor in self.state.items()}

    def values(self, *, with_constants: bool) -> StateTensors:
        """Give the hyper-parameters, such as `learningRate___specific___<weight>`."""
        return {
            self._key(scalar): as_tensor(variable.value)
            for scalar, variable in self.scalars.items()
            if with_constants or not variable.is_const
        }

    def load(self, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Take over state tensors; warn of those, and of values, that are missing.

        Raises:
            Error: If a state tensor has another shape than the device's.
        """
        for key, tensor in self.state_tensors().items():
            if warn_if_missing("state", key, state):
                continue
            if state[key].shape != tensor.shape:
                raise Error(
                    f"The optimizer state {key} has shape {tuple(state[key].shape)}, "
                    f"the device's {tuple(tensor.shape)}. Was it saved from another "
                    "model?",
                    type="poptorch_cpp_error",
                )
            tensor.copy_(state[key])
        for key in self.values(with_constants=False):
            warn_if_missing("parameter", key, values)

    def _key(self, scalar: str) -> str:
        if self.group_index is None:
            return f"{scalar}___default___FLOAT"
        return f"{scalar}___specific___{self.name}"


def as_tensor(value: float) -> Tensor:
    """Make a tensor of a hyper-parameter, as the device has it."""
    return torch.tensor(value, dtype=torch.float32)


def warn_if_missing(what: str, key: str, given: Mapping[str, Tensor]) -> bool:
    """Say whether a name is missing from what is loaded, and log it."""
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing %s %s", what, key)
    return key not in given
