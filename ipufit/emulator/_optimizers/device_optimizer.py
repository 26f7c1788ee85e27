# SPDX-License-Identifier: Apache-2.0
"""The optimizer on the device: its state, and one update of all weights.

PopTorch's optimizers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.
"""

from __future__ import annotations

import contextlib
import math
from typing import Mapping

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._optimizers.rules import STEP, State, WeightGroup, make_rule, wide
from ipufit.emulator._optimizers.settings import OptimizerSettings
from ipufit.emulator._options.options import Settings
from ipufit.emulator.errors import Error

_LOSS_SCALING = "lossScaling_FLOAT"
_UPDATE_FACTOR = "lossScaleUpdateFactor"
_FINAL_LOSS_SCALE = "finalLossScale"

_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST_SCALE = 2.0**15  # the largest power of two that float16 holds


class DeviceOptimizer:
    """The optimizer of an attached model.

    Which rule serves a weight, and the types of its state, are fixed by the settings
    the model was compiled with; the values may change.

    Args:
        settings: Values of the host's optimizer.
        weights: The device's weights by name; they are updated in place.
        group_index: For each name the number of its group, None (or nothing) for
            weights in no group, which train with the optimizer's defaults.
        options: They say whether the loss scaling is adapted.

    Attributes:
        loss_scale_factor: The factor of the next loss, besides the loss scaling.
        random: A context around each update, from which it draws random numbers:
            rounding at random needs it where several processes must come to the same
            weights.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        weights: dict[str, Tensor],
        group_index: Mapping[str, int | None],
        options: Settings,
    ) -> None:
        self._settings = settings
        self._options = options
        self._weights = weights
        indices = {name: group_index.get(name) for name in weights}
        rules = {index: make_rule(settings, index) for index in indices.values()}
        self._rules = {name: rules[index] for name, index in indices.items()}
        self.loss_scale_factor = 1.0
        self._last_factor = 1.0
        self._num_updates = 0
        self.random: contextlib.AbstractContextManager[None] | None = None
        self._groups: list[WeightGroup] = []
        self._grouped_names: list[str] = []
        self.reset_state()

    def reset_state(self) -> None:
        """Begin anew: momenta and counters as before the first update."""
        self._groups, self._grouped_names = [], []
        self._states = {
            name: self._rules[name].initial_state(weight)
            for name, weight in self._weights.items()
        }
        self.loss_scale_factor = 1.0

    def update(self, settings: OptimizerSettings) -> None:
        """Take other values, which `check_replaceable` has let through.

        Weights keep the groups they were compiled with.
        """
        self._forget_groups()
        self._settings = settings
        for rule in set(self._rules.values()):
            rule.take(settings)

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights.

        Args:
            gradients: By name, accumulated and reduced, of the loss multiplied by the
                settings' loss scaling and `loss_scale_factor`. A weight without one,
                which the loss doesn't depend on, isn't updated and its state stays.
        """
        records = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            if self.random is None:
                self._step(gradients)
            else:
                with self.random:
                    self._step(gradients)
        finally:
            _set_grad_enabled(records)

    def _step(self, gradients: Mapping[str, Tensor | None]) -> None:
        names = [name for name in self._weights if gradients.get(name) is not None]
        if names != self._grouped_names:
            self._group(names)
        directions = []
        for group in self._groups:
            values: list[Tensor] = list(map(gradients.__getitem__, group.names))  # type: ignore[arg-type]
            if not group.is_wide:
                values = wide(values)
            if self.loss_scale_factor != 1.0:
                values = list(torch._foreach_mul(values, 1.0 / self.loss_scale_factor))
            directions.append(group.rule.direction(group, values))
        largest = self._settings.max_grad_norm
        if directions and not math.isinf(largest):
            directions = _clip(directions, largest)
        for group, values in zip(self._groups, directions):
            group.update(values)
        if self._options.scales_loss:
            self._adapt_loss_scale(gradients)

    def _group(self, names: list[str]) -> None:
        """Group weights by parameter group and number of updates."""
        self._forget_groups()
        together: dict[tuple[int | None, float], list[str]] = {}
        for name in names:
            step = float(self._states[name].get(STEP, 0.0))
            together.setdefault((self._rules[name].index, step), []).append(name)
        self._grouped_names = names
        self._groups = [
            WeightGroup(
                self._rules[members[0]],
                members,
                [self._weights[name] for name in members],
                [self._states[name] for name in members],
                is_clipped=not math.isinf(self._settings.max_grad_norm),
            )
            for members in together.values()
        ]

    def _settle_groups(self) -> None:
        for group in self._groups:
            group.settle()

    def _forget_groups(self) -> None:
        self._settle_groups()
        self._groups, self._grouped_names = [], []

    def _adapt_loss_scale(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Change the loss scaling as the float16 gradients of this update allow.

        If the share of elements above an edge is too high the scale is halved,
        otherwise doubled (PopART, `lossscaleupdatex.cpp`, `sessionoptions.hpp`). The
        gradients are accumulated and reduced; PopART counts them before. Without any
        the factor stays: nothing says whether it is too high.
        """
        options = self._options
        self._last_factor = self.loss_scale_factor
        self._num_updates += 1
        num_large = num_elements = 0
        for name, gradient in gradients.items():
            if gradient is None or self._weights[name].dtype is not torch.float16:
                continue
            edge = options.loss_scaling_bin_edge * _LARGEST_HALF
            is_small = gradient.abs() <= edge  # false for NaN
            num_large += int(is_small.numel() - is_small.sum())
            num_elements += gradient.numel()
        if not num_elements or self._num_updates % options.loss_scaling_period:
            return
        factor = self.loss_scale_factor
        if num_large > options.loss_scaling_proportion * num_elements:
            self.loss_scale_factor *= 0.5
        elif factor * self._settings.loss_scaling.value * 2 <= _LARGEST_SCALE:
            self.loss_scale_factor *= 2.0

    def _state_of(self, name: str) -> State:
        """Give a weight's state by the names of tensors, such as `Accl1___<weight>`."""
        return {f"{slot}___{name}": t for slot, t in self._states[name].items()}

    def _values_of(self, name: str, *, with_constants: bool) -> State:
        """Give the hyper-parameters, such as `learningRate___specific___<weight>`."""
        rule = self._rules[name]
        end = "default___FLOAT" if rule.index is None else f"specific___{name}"
        return {
            f"{scalar}___{end}": _as_tensor(variable.value)
            for scalar, variable in rule.scalars.items()
            if with_constants or not variable.is_const
        }

    def state_dict(self) -> dict[str, State]:
        """Copy what the device holds.

        Returns:
            `ipu_state`, state tensors such as `Accl1___<name>`, and `ipu_param`, the
            variable hyper-parameters, such as `learningRate___specific___<name>` and
            `lossScaling_FLOAT`.
        """
        self._settle_groups()
        state: State = {}
        values: State = {}
        for name in self._weights:
            state.update({n: t.clone() for n, t in self._state_of(name).items()})
            values.update(self._values_of(name, with_constants=False))
        if not self._settings.loss_scaling.is_const:
            values[_LOSS_SCALING] = _as_tensor(self._settings.loss_scaling.value)
        if self._options.scales_loss:
            state[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
        return {"ipu_state": state, "ipu_param": values}

    def tensors(self) -> State:
        """Give all tensors of the device's optimizer, by PopART's names.

        Constants are among them. State tensors are the device's own.
        """
        self._settle_groups()
        tensors: State = {}
        for name in self._weights:
            tensors.update(self._state_of(name))
            tensors.update(self._values_of(name, with_constants=True))
        scaling = self._settings.loss_scaling.value
        tensors[_LOSS_SCALING] = _as_tensor(scaling)
        if self._options.scales_loss:
            tensors[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
            tensors[_FINAL_LOSS_SCALE] = _as_tensor(scaling * self._last_factor)
        return tensors

    @torch.no_grad()
    def load_state(
        self, ipu_state: Mapping[str, Tensor] | None, ipu_param: State | None
    ) -> None:
        """Take over the state that `state_dict` gave.

        Names that are missing are logged and skipped; names that the device doesn't
        know are ignored. Hyper-parameters stay as they are: those that are loaded
        never leave the host (PopTorch, `writeOptimizerState`; PopART streams them to
        the device in `updateOptimizerFromHost` alone, from the optimizer).

        Args:
            ipu_state: State tensors by name.
            ipu_param: Hyper-parameters by name, of no use but to be missed.

        Raises:
            Error: If a state tensor has another shape than the device's.
        """
        self._forget_groups()
        state, values = ipu_state or {}, ipu_param or {}
        for name in self._weights:
            for key, tensor in self._state_of(name).items():
                if _is_missing("state", key, state):
                    continue
                if state[key].shape != tensor.shape:
                    raise Error(
                        f"The optimizer state {key} has shape "
                        f"{tuple(state[key].shape)}, the device's "
                        f"{tuple(tensor.shape)}. Was it saved from another model?",
                        type="poptorch_cpp_error",
                    )
                tensor.copy_(state[key])
            for key in self._values_of(name, with_constants=False):
                _is_missing("parameter", key, values)
        if not self._settings.loss_scaling.is_const:
            _is_missing("parameter", _LOSS_SCALING, values)
        if not self._options.scales_loss:
            return
        if not _is_missing("parameter", _UPDATE_FACTOR, state):
            self.loss_scale_factor = float(state[_UPDATE_FACTOR])


def _clip(groups: list[list[Tensor]], largest: float) -> list[list[Tensor]]:
    """Scale all tensors by `c / max(c, norm)`, `c` the largest norm allowed.

    What is given may be a stored velocity, which isn't clipped: it is left alone.
    """
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    norm = float(torch.stack(norms).norm())
    if norm <= largest:
        return groups
    return [list(torch._foreach_mul(group, largest / norm)) for group in groups]


def _as_tensor(value: float) -> Tensor:
    """Make a tensor of a hyper-parameter, as the device has it."""
    return torch.tensor(value, dtype=torch.float32)


def _is_missing(what: str, key: str, given: Mapping[str, Tensor]) -> bool:
    """Say whether a name is missing from what is loaded, and log it."""
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing %s %s", what, key)
    return key not in given
