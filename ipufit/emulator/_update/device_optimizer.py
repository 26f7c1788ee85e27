# SPDX-License-Identifier: Apache-2.0
"""The optimiser on the device: its state, and one update of all weights.

PopTorch's optimisers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.
"""

from __future__ import annotations

import contextlib
import math
from typing import Mapping, Sequence

import torch
from torch import Tensor

from ipufit.emulator._optimizers.base import StateTensors
from ipufit.emulator._optimizers.values import OptimizerSettings
from ipufit.emulator._update import adaptive, sgd
from ipufit.emulator._update.fused_updates import fused_update
from ipufit.emulator._update.loss_scale import (
    FINAL_LOSS_SCALE,
    UPDATE_FACTOR,
    AutomaticLossScale,
)
from ipufit.emulator._update.operations import clip
from ipufit.emulator._update.rule import STEP
from ipufit.emulator._update.trained_weight import (
    TrainedWeight,
    as_tensor,
    warn_if_missing,
)
from ipufit.emulator._update.weight_group import WeightGroup, widened

_LOSS_SCALING = "lossScaling_FLOAT"

_RULES = {**sgd.RULES, **adaptive.RULES}


class DeviceOptimizer:
    """The optimiser of an attached model.

    Which rule serves a weight, and the types of its state, are fixed by the settings
    the model was compiled with; the values may change.

    Args:
        settings: Values of the host's optimiser.
        parameters: The device's weights by name; they are updated in place.
        group_index: For each name the number of its group, None (or nothing) for
            weights in no group, which train with the optimiser's defaults.
        automatic: Adapts the loss scaling, if the options ask for it.

    Example:
        >>> from ipufit.emulator import optim
        >>> from ipufit.emulator._optimizers.settings import OptimizerReader
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> host = optim.SGD([weight], lr=0.5)
        >>> settings = OptimizerReader(relax_attribute_checks=False).read(host)
        >>> device = DeviceOptimizer(settings, {"w": weight}, {"w": 0})
        >>> device.step({"w": torch.tensor([1.0, 2.0])})
        >>> weight.data
        tensor([0.5000, 0.0000])
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        parameters: dict[str, Tensor],
        group_index: dict[str, int | None],
        automatic: AutomaticLossScale | None = None,
    ) -> None:
        self._settings = settings
        self._automatic = automatic
        self._last_factor = 1.0
        make_rule = _RULES[settings.kind]
        self._trained: dict[str, TrainedWeight] = {}
        for name, weight in parameters.items():
            index = group_index.get(name)
            rule = make_rule(settings, settings.variables(index))
            self._trained[name] = TrainedWeight(name, weight, index, rule, settings)
        self._random: contextlib.AbstractContextManager[None] | None = None
        self._groups: list[WeightGroup] = []
        self._grouped_names: tuple[str, ...] = ()

    def update(self, settings: OptimizerSettings) -> None:
        """Take other values, which `check_replaceable` has let through.

        Args:
            settings: A new reading. Weights keep the groups they were compiled with.
        """
        self._settings = settings
        for trained in self._trained.values():
            trained.take_values(settings)
        self._forget_groups()

    def draw_from(self, random: contextlib.AbstractContextManager[None]) -> None:
        """Enter a context around each update, from which it draws random numbers.

        Args:
            random: Rounding at random needs it where several processes must come to
                the same weights.
        """
        self._random = random

    @property
    def loss_scale_factor(self) -> float:
        """The factor of the next loss, besides the settings' loss scaling."""
        return 1.0 if self._automatic is None else self._automatic.factor

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights.

        Args:
            gradients: By name, accumulated and reduced, of the loss multiplied by the
                settings' loss scaling and `loss_scale_factor`. A weight without one,
                which the loss doesn't depend on, isn't updated and its state stays.
        """
        self.step_in_no_grad(gradients)

    def step_in_no_grad(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights, for a caller in whose grad mode nothing is recorded.

        Args:
            gradients: As for `step`.
        """
        if self._random is None:
            self._update(gradients)
        else:
            with self._random:
                self._update(gradients)

    def _update(self, gradients: Mapping[str, Tensor | None]) -> None:
        get = gradients.get
        reached = tuple([name for name in self._trained if get(name) is not None])
        groups = self.groups(reached)
        directions = []
        for group in groups:
            of_group = [gradients[name] for name in group.names]
            values = widened(of_group)  # type: ignore[arg-type]
            directions.append(group.directions(self._as_scaled_on_device(values)))
        if directions and self._is_clipped:
            directions = clip(directions, self.max_grad_norm)
        for group, clipped in zip(groups, directions):
            group.update(clipped)
        self._adapt_loss_scale(gradients)

    def groups(self, names: tuple[str, ...]) -> list[WeightGroup]:
        """Give the weights as they are updated together.

        That is by rule, parameter group, values and number of updates.

        Args:
            names: Names of weights with gradients, in the order of the parameters.
        """
        if names != self._grouped_names:
            self._forget_groups()
            self._groups = self._make_groups(names)
            self._grouped_names = names
        return self._groups

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that may be updated."""
        return tuple(self._trained)

    @property
    def gradient_ratio(self) -> float:
        """The factor of gradients that leaves only the optimiser's loss scaling."""
        return 1.0 / self.loss_scale_factor

    @property
    def max_grad_norm(self) -> float:
        """The largest global norm of the gradients; infinite without clipping."""
        return self._settings.max_grad_norm

    @property
    def _is_clipped(self) -> bool:
        return not math.isinf(self.max_grad_norm)

    def _adapt_loss_scale(self, gradients: Mapping[str, Tensor | None]) -> None:
        if self._automatic is None:
            return
        self._last_factor = self._automatic.factor
        halves = [
            gradient
            for name, gradient in gradients.items()
            if gradient is not None
            and self._trained[name].weight.dtype == torch.float16
        ]
        self._automatic.adapt(halves, self._settings.loss_scaling)

    def state_dict(self) -> dict[str, StateTensors]:
        """Copy what the device holds.

        Returns:
            `ipu_state`, state tensors such as `Accl1___<name>`, and `ipu_param`, the
            variable hyper-parameters, such as `learningRate___specific___<name>` and
            `lossScaling_FLOAT`.
        """
        self._settle_groups()
        state: StateTensors = {}
        values: StateTensors = {}
        for trained in self._trained.values():
            state.update({n: t.clone() for n, t in trained.state_tensors().items()})
            values.update(trained.values(with_constants=False))
        if not self._settings.scaling.is_const:
            values[_LOSS_SCALING] = as_tensor(self._settings.loss_scaling)
        if self._automatic is not None:
            state[UPDATE_FACTOR] = as_tensor(self._automatic.factor)
        return {"ipu_state": state, "ipu_param": values}

    def tensors(self) -> dict[str, Tensor]:
        """Give all tensors of the device's optimiser, by PopART's names.

        Constants are among them. State tensors are the device's own.

        Example:
            >>> from ipufit.emulator import optim
            >>> from ipufit.emulator._optimizers.settings import OptimizerReader
            >>> weight = torch.nn.Parameter(torch.ones(2))
            >>> host = optim.SGD([weight], lr=0.5)
            >>> settings = OptimizerReader(relax_attribute_checks=False).read(host)
            >>> list(DeviceOptimizer(settings, {"w": weight}, {"w": 0}).tensors())
            ['scaledLearningRate0___specific___w', ..., 'lossScaling_FLOAT']
        """
        self._settle_groups()
        tensors: StateTensors = {}
        for trained in self._trained.values():
            tensors.update(trained.state_tensors())
            tensors.update(trained.values(with_constants=True))
        scaling = self._settings.loss_scaling
        tensors[_LOSS_SCALING] = as_tensor(scaling)
        if self._automatic is not None:
            tensors[UPDATE_FACTOR] = as_tensor(self._automatic.factor)
            tensors[FINAL_LOSS_SCALE] = as_tensor(scaling * self._last_factor)
        return tensors

    @torch.no_grad()
    def load_state(
        self,
        ipu_state: Mapping[str, Tensor] | None,
        ipu_param: Mapping[str, Tensor] | None,
    ) -> None:
        """Take over the state that `state_dict` gave.

        Names that are missing are logged and skipped; names that the device doesn't
        know are ignored. Hyper-parameters stay as they are: those that are loaded
        never leave the host (PopTorch, `writeOptimizerState`; PopART streams them to
        the device in `updateOptimizerFromHost` alone, from the optimiser).

        Args:
            ipu_state: State tensors by name.
            ipu_param: Hyper-parameters by name, of no use but to be missed.

        Raises:
            Error: If a state tensor has another shape than the device's.
        """
        self._forget_groups()
        given_state, given_values = ipu_state or {}, ipu_param or {}
        for trained in self._trained.values():
            trained.load(given_state, given_values)
        if not self._settings.scaling.is_const:
            warn_if_missing("parameter", _LOSS_SCALING, given_values)
        if self._automatic is None:
            return
        if not warn_if_missing("parameter", UPDATE_FACTOR, given_state):
            self._automatic.factor = float(given_state[UPDATE_FACTOR])

    def reset_state(self) -> None:
        """Begin anew: momenta and counters as before the first update."""
        self._forget_groups()
        for trained in self._trained.values():
            trained.reset()
        if self._automatic is not None:
            self._automatic.factor = 1.0

    def _settle_groups(self) -> None:
        for group in self._groups:
            group.settle()

    def _forget_groups(self) -> None:
        self._settle_groups()
        self._groups, self._grouped_names = [], ()

    def _make_groups(self, names: tuple[str, ...]) -> list[WeightGroup]:
        together: dict[tuple[object, ...], list[TrainedWeight]] = {}
        for trained in map(self._trained.__getitem__, names):
            step = float(trained.state.get(STEP, 0.0))
            # With the group: what is compiled must not depend on equal values.
            values = tuple(v.value for v in trained.scalars.values())
            key = trained.rule, trained.group_index, values, step
            together.setdefault(key, []).append(trained)
        return [self._make_group(weights) for weights in together.values()]

    def _make_group(self, members: Sequence[TrainedWeight]) -> WeightGroup:
        first = members[0]
        numbers = {name: variable.value for name, variable in first.scalars.items()}
        state = {slot: [t.state[slot] for t in members] for slot in first.state}
        group = WeightGroup(
            first.rule,
            [trained.name for trained in members],
            [trained.weight for trained in members],
            state,
            {**numbers, "lossScaling": self._settings.loss_scaling},
            float(first.state.get(STEP, 0.0)),
        )
        group.fused = fused_update(group, self._is_clipped)
        return group

    def _as_scaled_on_device(self, gradients: list[Tensor]) -> list[Tensor]:
        """Take the factor of automatic loss scaling out."""
        ratio = self.gradient_ratio
        if ratio == 1.0:
            return gradients
        return list(torch._foreach_mul(gradients, ratio))
