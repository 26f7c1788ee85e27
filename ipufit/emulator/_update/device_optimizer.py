# SPDX-License-Identifier: Apache-2.0
"""The optimiser on the device: its state, and one update of all weights.

PopTorch's optimisers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._optimizers.base import StateTensors, logger
from ipufit.emulator._optimizers.values import (
    GroupVariables,
    OptimizerKind,
    OptimizerSettings,
    Variable,
)
from ipufit.emulator._update.adaptive import AdamRule, LambRule, RMSpropRule
from ipufit.emulator._update.loss_scale import (
    FINAL_LOSS_SCALE,
    UPDATE_FACTOR,
    AutomaticLossScale,
)
from ipufit.emulator._update.sgd import MomentumSGD, PlainSGD
from ipufit.emulator._update.weight_group import (
    STEP,
    UpdateRule,
    WeightGroup,
    WeightState,
    widened,
)
from ipufit.emulator.errors import Error

_LOSS_SCALING = "lossScaling_FLOAT"


@dataclass
class _Trained:
    """A weight, how it is updated, and with what."""

    weight: Tensor
    group_index: int | None
    rule: UpdateRule
    scalars: dict[str, Variable]
    state: WeightState

    def scalar_key(self, name: str, weight_name: str) -> str:
        if self.group_index is None:
            return f"{name}___default___FLOAT"
        return f"{name}___specific___{weight_name}"


class DeviceOptimizer:
    """The optimiser of an attached model.

    Which rule serves a weight, and the types of its state, are fixed by the settings
    the model was compiled with; the values may change.

    Args:
        settings: What was read off the host's optimiser.
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
        self._trained: dict[str, _Trained] = {}
        for name, weight in parameters.items():
            index = group_index.get(name)
            variables = settings.variables(index)
            rule = _rule(settings, variables)
            scalars = rule.scalars(variables, settings.scaling)
            state = rule.initial_state(weight, scalars)
            self._trained[name] = _Trained(weight, index, rule, scalars, state)
        # The device's loss scaling is the settings', or one loaded with a state.
        self._loss_scaling = settings.loss_scaling
        self._groups: list[WeightGroup] = []
        self._grouped_names: tuple[str, ...] = ()

    def update(self, settings: OptimizerSettings) -> None:
        """Take other values, which `check_replaceable` has let through.

        Args:
            settings: A new reading. Weights keep the groups they were compiled with.
        """
        self._settings = settings
        self._loss_scaling = settings.loss_scaling
        for trained in self._trained.values():
            variables = settings.variables(trained.group_index)
            trained.scalars = trained.rule.scalars(variables, settings.scaling)
        self._forget_groups()

    @property
    def loss_scale_factor(self) -> float:
        """What the next loss is multiplied by besides the settings' loss scaling."""
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
        """The same for a caller in whose grad mode nothing is recorded."""
        reached = tuple(
            name for name in self._trained if gradients.get(name) is not None
        )
        groups = self.groups(reached)
        directions = []
        for group in groups:
            values = self._as_scaled_on_device(
                widened([g for g in map(gradients.get, group.names) if g is not None])
            )
            directions.append(group.rule.directions(group, values))
        for group, clipped in zip(groups, self._clip(directions)):
            group.rule.apply(group, clipped)
        self._adapt_loss_scale(gradients)

    def groups(self, names: tuple[str, ...]) -> list[WeightGroup]:
        """Weights as they are updated together: by rule, group, values and counter.

        Args:
            names: Of those that have gradients, in the order of the parameters.
        """
        if names != self._grouped_names:
            self._forget_groups()
            self._groups = self._make_groups(names)
            self._grouped_names = names
        return self._groups

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it may update."""
        return tuple(self._trained)

    @property
    def gradient_ratio(self) -> float:
        """What gradients are multiplied by, to fit the device's loss scaling."""
        return self._loss_scaling / self._settings.loss_scaling / self.loss_scale_factor

    @property
    def max_grad_norm(self) -> float:
        """The largest global norm of the gradients; infinite without clipping."""
        return self._settings.max_grad_norm

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
        self._automatic.adapt(halves, self._loss_scaling)

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
        for name, trained in self._trained.items():
            for slot, tensor in trained.state.items():
                state[f"{slot}___{name}"] = tensor.clone()
            for scalar, variable in trained.scalars.items():
                if not variable.is_const:
                    key = trained.scalar_key(scalar, name)
                    values[key] = _scalar(variable.value)
        if not self._settings.scaling.is_const:
            values[_LOSS_SCALING] = _scalar(self._loss_scaling)
        if self._automatic is not None:
            state[UPDATE_FACTOR] = _scalar(self._automatic.factor)
        return {"ipu_state": state, "ipu_param": values}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the device's optimiser consists of, by PopART's names.

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
        for name, trained in self._trained.items():
            for slot, tensor in trained.state.items():
                tensors[f"{slot}___{name}"] = tensor
            for scalar, variable in trained.scalars.items():
                tensors[trained.scalar_key(scalar, name)] = _scalar(variable.value)
        tensors[_LOSS_SCALING] = _scalar(self._loss_scaling)
        if self._automatic is not None:
            tensors[UPDATE_FACTOR] = _scalar(self._automatic.factor)
            used = self._loss_scaling * self._last_factor
            tensors[FINAL_LOSS_SCALE] = _scalar(used)
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
        for name, trained in self._trained.items():
            for slot, tensor in trained.state.items():
                _load_tensor(f"{slot}___{name}", tensor, given_state)
            for scalar, variable in trained.scalars.items():
                if not variable.is_const:
                    _warn_if_missing(trained.scalar_key(scalar, name), given_values)
        if not self._settings.scaling.is_const:
            _warn_if_missing(_LOSS_SCALING, given_values)
        if self._automatic is not None:
            _warn_if_missing(UPDATE_FACTOR, given_state)
            self._automatic.factor = float(
                given_state.get(UPDATE_FACTOR, self._automatic.factor)
            )

    def reset_state(self) -> None:
        """Begin anew: momenta and counters as before the first update."""
        self._forget_groups()
        for trained in self._trained.values():
            trained.state = trained.rule.initial_state(trained.weight, trained.scalars)
        if self._automatic is not None:
            self._automatic.factor = 1.0

    def _settle_groups(self) -> None:
        for group in self._groups:
            group.settle()

    def _forget_groups(self) -> None:
        self._settle_groups()
        self._groups, self._grouped_names = [], ()

    def _make_groups(self, names: tuple[str, ...]) -> list[WeightGroup]:
        groups: dict[tuple[object, ...], WeightGroup] = {}
        is_clipped = not math.isinf(self._settings.max_grad_norm)
        for name in names:
            trained = self._trained[name]
            step = float(trained.state.get(STEP, 0.0))
            scalars = {key: v.value for key, v in trained.scalars.items()}
            # With the group: what is compiled must not depend on equal values.
            values = tuple(scalars.values())
            key = (trained.rule, trained.group_index, values, step)
            if key not in groups:
                state: dict[str, list[Tensor]] = {slot: [] for slot in trained.state}
                groups[key] = WeightGroup(
                    trained.rule,
                    [],
                    [],
                    state,
                    scalars,
                    self._loss_scaling,
                    is_clipped,
                    step,
                )
            group = groups[key]
            group.names.append(name)
            group.weights.append(trained.weight)
            for slot, tensor in trained.state.items():
                group.state[slot].append(tensor)
        return [group.seal() for group in groups.values()]

    def _as_scaled_on_device(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients as they would be with the loss scaling of the device alone."""
        ratio = self.gradient_ratio
        if ratio == 1.0:
            return gradients
        return list(torch._foreach_mul(gradients, ratio))

    def _clip(self, directions: list[list[Tensor]]) -> list[list[Tensor]]:
        """Scale all directions by `c / max(c, norm)`, `c` the largest norm allowed."""
        largest = self._settings.max_grad_norm
        if not directions or math.isinf(largest):
            return directions
        norms = [n for group in directions for n in torch._foreach_norm(group)]
        norm = float(torch.stack(norms).norm())
        if norm <= largest:
            return directions
        # Not in place: a direction may be the stored velocity, which isn't clipped.
        return [list(torch._foreach_mul(group, largest / norm)) for group in directions]


def group_indices(
    optimizer: torch.optim.Optimizer, named_tensors: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Find the optimiser's group of each of a model's tensors.

    Args:
        optimizer: The host's optimiser.
        named_tensors: The model's parameters and buffers.

    Returns:
        For each name the number of the group that holds its tensor, itself or another
        one of the same memory; None if no group does.

    Raises:
        KeyError: If a group holds a tensor that isn't the model's.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD([model.bias], lr=0.1)
        >>> group_indices(optimizer, dict(model.named_parameters()))
        {'weight': None, 'bias': 0}
    """
    by_identity: dict[int, int] = {}
    by_memory: dict[int, int] = {}
    own_identities = {id(tensor) for tensor in named_tensors.values()}
    own_memory = {tensor.data_ptr() for tensor in named_tensors.values()} - {0}
    for index, group in enumerate(optimizer.param_groups):
        for number, tensor in enumerate(group["params"]):
            pointer = tensor.data_ptr()
            if id(tensor) not in own_identities and pointer not in own_memory:
                raise KeyError(
                    f"Parameter {number} of the optimizer's group {index}, of shape "
                    f"{tuple(tensor.shape)}, is neither a parameter nor a buffer of "
                    "the model. Build the optimizer from the model's parameters."
                )
            by_identity[id(tensor)] = index
            if pointer:
                by_memory[pointer] = index
    return {
        name: by_identity.get(id(tensor), by_memory.get(tensor.data_ptr()))
        for name, tensor in named_tensors.items()
    }


def _rule(settings: OptimizerSettings, variables: GroupVariables) -> UpdateRule:
    kind = settings.kind
    momentum = variables.momentum
    has_momentum = not (momentum.is_const and momentum.value == 0.0)
    first = settings.first_order_momentum_accum_type
    second = settings.second_order_momentum_accum_type
    if kind.family == "SGD":
        if not has_momentum:
            return PlainSGD()
        if kind is OptimizerKind.SGD1:
            return MomentumSGD(is_combined=True, velocity_type=None)
        return MomentumSGD(
            is_combined=False, velocity_type=settings.velocity_accum_type
        )
    if kind.family == "Adaptive":
        return RMSpropRule(
            is_centered=kind is OptimizerKind.RMSPROP_CENTERED,
            is_tensorflow=settings.use_tf_variant,
            has_momentum=has_momentum,
            first_type=first,
            second_type=second,
        )
    if kind in (OptimizerKind.LAMB, OptimizerKind.LAMB_NO_BIAS):
        return LambRule(first, second, corrects_bias=kind is OptimizerKind.LAMB)
    return AdamRule(first, second, decays_gradient=kind is OptimizerKind.ADAM)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _load_tensor(key: str, tensor: Tensor, given: Mapping[str, Tensor]) -> None:
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing state %s", key)
        return
    if given[key].shape != tensor.shape:
        raise Error(
            f"The optimizer state {key} has shape {tuple(given[key].shape)}, the "
            f"device's {tuple(tensor.shape)}. Was it saved from another model?",
            type="poptorch_cpp_error",
        )
    tensor.copy_(given[key])


def _warn_if_missing(key: str, given: Mapping[str, Tensor]) -> None:
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing parameter %s", key)
