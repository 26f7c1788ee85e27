# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training executor on the device, and its link to the host's.

PopTorch's optimizers run inside the compiled program. What they compute differs from
torch's in a few places (PopTorch user guide, "Optimizers"); each rule says which.
"""

from __future__ import annotations

import math
from typing import Any, Mapping, Protocol

import torch
from torch import Tensor
from torch._C import _set_grad_enabled

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.replica_groups import GroupedState, ReplicaGroups
from ipufit.emulator._optimizers.rules import STEP, State, WeightGroup, make_rule, wide
from ipufit.emulator._optimizers.settings import (
    OptimizerReader,
    OptimizerSettings,
    check_replaceable,
    optimizer_log,
)
from ipufit.emulator._options.options import Options, Settings
from ipufit.emulator._processes import Processes, common_random
from ipufit.emulator.enums import MeanReductionStrategy
from ipufit.emulator.errors import Error, createPoptorchError
from ipufit.emulator.optim import Optimizer as PoptorchOptimizer

_LOSS_SCALING = "lossScaling_FLOAT"
_UPDATE_FACTOR = "lossScaleUpdateFactor"
_FINAL_LOSS_SCALE = "finalLossScale"

_LARGEST_HALF = torch.finfo(torch.float16).max
_LARGEST_SCALE = 2.0**15  # the largest power of two that float16 holds


class DeviceOptimizer:
    """The optimizer on the device of an attached model.

    The settings the model was compiled with fix the rule of each weight, and the types
    of its state. Hyper-parameters may change.

    Args:
        settings: Settings of the host's optimizer.
        weights: The device's weights by name; they are updated in place.
        group_index: Number of each weight's parameter group, by name. A weight with
            None, or without an entry, trains with the optimizer's defaults.
        options: The executor's options, for automatic loss scaling.

    Attributes:
        loss_scale_factor: Factor of the next loss, besides the loss scaling.
        processes: Processes that draw the same random numbers in each update, so that
            stochastic rounding gives them the same weights; None if nothing is drawn.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        weights: dict[str, Tensor],
        group_index: Mapping[str, int | None],
        options: Settings,
    ) -> None:
        self.settings = settings
        self._options = options
        self._weights = weights
        indices = {name: group_index.get(name) for name in weights}
        rules = {index: make_rule(settings, index) for index in indices.values()}
        self._rules = {name: rules[index] for name, index in indices.items()}
        self.loss_scale_factor = 1.0
        self._last_factor = 1.0
        self._num_updates = 0
        self.processes: Processes | None = None
        self.reset_state()

    def reset_state(self) -> None:
        """Reset momenta and counters to their values before the first update."""
        self._groups: list[WeightGroup] = []
        self._grouped_names: list[str] = []
        self._states = {
            name: self._rules[name].initial_state(weight)
            for name, weight in self._weights.items()
        }
        self.loss_scale_factor = 1.0

    def update(self, settings: OptimizerSettings) -> None:
        """Take hyper-parameters from new settings that `check_replaceable` accepts.

        Weights keep the groups they were compiled with.
        """
        self._forget_groups()
        self.settings = settings
        for rule in set(self._rules.values()):
            rule.take(settings)

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Update the weights.

        Args:
            gradients: Accumulated and reduced gradients, by name. They are of the loss
                times the loss scaling and `loss_scale_factor`. A weight without a
                gradient keeps its value and its state.
        """
        records = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            if self.processes is None:
                self._step(gradients)
            else:
                with common_random(self.processes):
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
        largest = self.settings.max_grad_norm
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
                is_clipped=not math.isinf(self.settings.max_grad_norm),
            )
            for members in together.values()
        ]

    def _forget_groups(self) -> None:
        for group in self._groups:
            group.write_step()
        self._groups, self._grouped_names = [], []

    def _adapt_loss_scale(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Halve or double the loss scaling, depending on the float16 gradients.

        It is halved if the share of gradient elements above an edge is too high, and
        doubled otherwise (PopART, `lossscaleupdatex.cpp`, `sessionoptions.hpp`). The
        gradients are accumulated and reduced; PopART counts them before. Without
        float16 gradients the scaling stays.
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
        elif factor * self.settings.loss_scaling.value * 2 <= _LARGEST_SCALE:
            self.loss_scale_factor *= 2.0

    def _state_of(self, name: str) -> State:
        """Return a weight's state by tensor names, such as `Accl1___<weight>`."""
        return {f"{slot}___{name}": t for slot, t in self._states[name].items()}

    def _values_of(self, name: str, *, with_constants: bool) -> State:
        """Return a weight's hyper-parameters by PopART's names."""
        rule = self._rules[name]
        end = "default___FLOAT" if rule.index is None else f"specific___{name}"
        return {
            f"{scalar}___{end}": _as_tensor(variable.value)
            for scalar, variable in rule.scalars.items()
            if with_constants or not variable.is_const
        }

    def state_dict(self) -> dict[str, State]:
        """Copy the state and the variable hyper-parameters.

        Returns:
            `ipu_state`, state tensors such as `Accl1___<name>`, and `ipu_param`, the
            variable hyper-parameters, such as `learningRate___specific___<name>` and
            `lossScaling_FLOAT`.
        """
        self._forget_groups()
        state: State = {}
        values: State = {}
        for name in self._weights:
            state.update({n: t.clone() for n, t in self._state_of(name).items()})
            values.update(self._values_of(name, with_constants=False))
        if not self.settings.loss_scaling.is_const:
            values[_LOSS_SCALING] = _as_tensor(self.settings.loss_scaling.value)
        if self._options.scales_loss:
            state[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
        return {"ipu_state": state, "ipu_param": values}

    def tensors(self) -> State:
        """Return all tensors of the device's optimizer, by PopART's names.

        Constant hyper-parameters are included. State tensors aren't copies.
        """
        self._forget_groups()
        tensors: State = {}
        for name in self._weights:
            tensors.update(self._state_of(name))
            tensors.update(self._values_of(name, with_constants=True))
        scaling = self.settings.loss_scaling.value
        tensors[_LOSS_SCALING] = _as_tensor(scaling)
        if self._options.scales_loss:
            tensors[_UPDATE_FACTOR] = _as_tensor(self.loss_scale_factor)
            tensors[_FINAL_LOSS_SCALE] = _as_tensor(scaling * self._last_factor)
        return tensors

    @torch.no_grad()
    def load_state(
        self, ipu_state: Mapping[str, Tensor] | None, ipu_param: State | None
    ) -> None:
        """Load a state that `state_dict` returned.

        A missing name is logged, and its tensor stays; an unknown name is ignored.
        Hyper-parameters stay as they are: loaded values never leave the host (PopTorch,
        `writeOptimizerState`; PopART streams hyper-parameters from the optimizer only,
        in `updateOptimizerFromHost`).

        Args:
            ipu_state: State tensors by name.
            ipu_param: Hyper-parameters by name; only missing names matter.

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
        if not self.settings.loss_scaling.is_const:
            _is_missing("parameter", _LOSS_SCALING, values)
        if not self._options.scales_loss:
            return
        if not _is_missing("parameter", _UPDATE_FACTOR, state):
            self.loss_scale_factor = float(state[_UPDATE_FACTOR])


def _clip(groups: list[list[Tensor]], largest: float) -> list[list[Tensor]]:
    """Scale all tensors by `c / max(c, norm)`, where `c` is `largest`.

    The tensors given stay as they are: one may be a stored velocity.
    """
    norms = [norm for group in groups for norm in torch._foreach_norm(group)]
    norm = float(torch.stack(norms).norm())
    if norm <= largest:
        return groups
    return [list(torch._foreach_mul(group, largest / norm)) for group in groups]


def _as_tensor(value: float) -> Tensor:
    """Make a float32 tensor of a hyper-parameter."""
    return torch.tensor(value, dtype=torch.float32)


def _is_missing(what: str, key: str, given: Mapping[str, Tensor]) -> bool:
    """Return whether a loaded state lacks a name, and log it."""
    if key not in given:
        logger.warning("writeOptimizerState: ignoring missing %s %s", what, key)
    return key not in given


NOT_COMPILED = "Model has not been compiled or has been destroyed."


class Executor(Protocol):
    """The part of an executor that `OptimizerSync` uses."""

    @property
    def options(self) -> Options: ...

    def isCompiled(self) -> bool: ...

    def copyWeightsToHostIfNeeded(self) -> bool: ...


class OptimizerSync:
    """Keeps the host's optimizer and the device's optimizer in step.

    The state of PopTorch's optimizers survives detach and attach: it is stored on the
    host. Two flags of such an optimizer say which side is newer (PopTorch,
    `python/_poplar_executor.py`, `python/optim.py`). Torch's optimizers have no flags:
    PopTorch can't store their state, so each attach starts with a new one.

    Args:
        executor: The executor that trains with the optimizer.
        optimizer: The host's optimizer. If it accumulates in 16 bits, the reduction
            strategy of the executor's options becomes `Running`.

    Attributes:
        settings: The settings that the device has.

    Raises:
        AssertionError: The optimizer is of a type that PopTorch doesn't take.
    """

    def __init__(self, executor: Executor, optimizer: torch.optim.Optimizer) -> None:
        self._executor = executor
        self._options = Settings.of(executor.options)
        self._reader = OptimizerReader(
            relax_attribute_checks=executor.options._relax_optimizer_checks,
            automatic_loss_scaling=self._options.scales_loss,
        )
        self.settings = self._reader.read(optimizer)
        self._device: DeviceOptimizer | None = None
        self._indices: dict[str, int | None] = {}
        self._grouped = GroupedState({})
        self._kept_state: dict[str, State] | None = None  # while detached
        self._sent_state: dict[str, State] | None = None  # all there is if synthetic
        self._written_values: State = {}
        self._use_running_mean_if_needed()
        self._take(optimizer)

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        """Link `optimizer.state_dict()` to the device, and keep the executor alive."""
        self.optimizer = optimizer
        self._poptorch: PoptorchOptimizer | None = None  # the same, if it has a state
        if isinstance(optimizer, PoptorchOptimizer):
            self._poptorch = optimizer
            optimizer.state_dict = self.state_dict  # type: ignore[method-assign]

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the settings of an optimizer, and link it to this device.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation.
        """
        is_compiled, before = self._executor.isCompiled(), self._poptorch
        if is_compiled and optimizer is not self.optimizer:
            if before is not None:
                self.read_state()
                before.state_dict = before.get_state_dict  # type: ignore[method-assign]
            if isinstance(optimizer, PoptorchOptimizer):
                optimizer.ipu_state_is_dirty = True
        self._take(optimizer)
        settings = self._reader.read(optimizer)
        is_changed = settings != self.settings
        if is_compiled:
            check_replaceable(self.settings, settings)
        self.settings = settings
        if self._device is not None:
            self._device.update(settings)
            self._written_values = {}
            if is_changed:
                self._log_settings()
        self._use_running_mean_if_needed()
        if self._device is not None:
            self.write_state()

    def _use_running_mean_if_needed(self) -> None:
        options, running = self._executor.options, MeanReductionStrategy.Running
        strategy = options.Training.meanAccumulationAndReplicationReductionStrategy
        if not self.settings.uses_running_mean or strategy == running:
            return
        if self._executor.isCompiled():
            raise ValueError(
                "An optimizer with a 16-bit accum_type needs "
                "MeanReductionStrategy.Running, but the executable is already compiled."
            )
        options._unfreeze()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
        options._freeze()

    def _log_settings(self) -> None:
        for line in optimizer_log(self.settings):
            logger.debug(line)

    # Compile, attach, detach ----------------------------------------------------

    def compile(self, weights: Mapping[str, Tensor], trained: list[str]) -> list[str]:
        """Assign weights to parameter groups; return the names of optimizer tensors.

        Args:
            weights: All weights of the host by name.
            trained: Names of the weights that are updated.

        Raises:
            KeyError: A parameter of the optimizer is not among the weights.
        """
        self._indices = _group_indices(self.optimizer, weights)
        # On the device "meta", torch would import its compiler for zeros.
        empty = {name: torch.empty(0, dtype=weights[name].dtype) for name in trained}
        return list(self._make(empty, self._indices).tensors())

    def _make(
        self, weights: dict[str, Tensor], indices: dict[str, int | None]
    ) -> DeviceOptimizer:
        return DeviceOptimizer(self.settings, weights, indices, self._options)

    def attach(
        self, trained: dict[str, Tensor], groups: Mapping[str, ReplicaGroups]
    ) -> DeviceOptimizer:
        """Create the device's optimizer, with the state of an earlier one.

        Args:
            trained: The device's weights.
            groups: Weights, by name, whose values differ between groups of replicas.
        """
        self._grouped = GroupedState(groups)
        self._device = self._make(trained, self._grouped.group_index(self._indices))
        self._log_settings()
        if self._kept_state is not None:
            self._load(self._kept_state)
        self._note_sent()
        return self._device

    def detach(self) -> None:
        """Drop the device's optimizer; keep the state of an optimizer of PopTorch's."""
        if self._poptorch is not None:
            self._kept_state = self._joined_state()
        self._device = None

    def forget(self) -> None:
        """Drop the stored state, together with the executable."""
        self._kept_state, self._written_values = None, {}

    def weights_were_uploaded(self) -> None:
        """Reset the state of a torch optimizer, as PopTorch does at each upload."""
        if self._poptorch is None and self._device is not None:
            self._device.reset_state()

    # State of PopTorch's optimizers ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the executor's present optimizer."""
        optimizer = self._poptorch
        if optimizer is None:
            raise AssertionError(
                "This optimizer's executor now trains with an optimizer of torch."
            )
        self.read_state()
        return optimizer.get_state_dict()

    def read(self) -> None:
        """Copy the state from the device that the optimizer is linked to, if newer.

        It may be the device of another executor, to which the optimizer was given
        later.
        """
        if self._poptorch is not None:
            self._poptorch.state_dict()

    def read_state(self) -> None:
        """Copy this device's state to the optimizer if it is newer.

        Hyper-parameters that were loaded are read back, though the device has others:
        PopTorch keeps both in the host's memory (PopTorch, `poptorch.cpp`).
        """
        optimizer = self._poptorch
        if optimizer is None:
            return
        if not optimizer.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict")
            return
        if not self._executor.isCompiled():
            raise createPoptorchError(NOT_COMPILED)
        logger.info("Writing optimiser state tensors from IPU to host.")
        state = self._joined_state()
        values = dict(state["ipu_param"])
        values.update({n: v for n, v in self._written_values.items() if n in values})
        of_device = {"ipu_state": state["ipu_state"], "ipu_param": values}
        optimizer.set_state_dict({**optimizer.get_state_dict(), **of_device})
        optimizer.ipu_state_is_dirty = False

    def write_state(self) -> None:
        """Send a state that was loaded on the host to the device, if it is newer.

        Hyper-parameters stay as they are.
        """
        optimizer = self._poptorch
        if optimizer is None or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.host_state_is_dirty:
            raise AssertionError(
                "Both host and ipu states cannot be dirty at the same time: another "
                "executor trains with this optimizer. Read its state_dict() first."
            )
        if optimizer.has_state():
            # Together with the state all weights go to the device.
            self._executor.copyWeightsToHostIfNeeded()
            state = optimizer.state_dict()
            logger.info("Writing optimiser state tensors from host to IPU memory.")
            self._load(state)
            self._written_values = dict(state["ipu_param"] or {})
        optimizer.ipu_state_is_dirty = False

    def start(self) -> None:
        """Send the optimizer's state to a device that was just attached."""
        self.read()
        optimizer = self._poptorch
        if optimizer is None:
            return
        if optimizer.has_state():
            optimizer.ipu_state_is_dirty = True
            self.write_state()
        else:
            optimizer.host_state_is_dirty = True
            optimizer.ipu_state_is_dirty = False

    def begin_call(self) -> None:
        """Send a newer state of the host, and mark the device's state as newer."""
        optimizer = self._poptorch
        if optimizer is not None:
            if optimizer.ipu_state_is_dirty:
                self.write_state()
            optimizer.host_state_is_dirty = True

    def _load(self, state: Mapping[str, State]) -> None:
        state = self._grouped.split(state)
        self._attached().load_state(state["ipu_state"], state["ipu_param"])
        self._note_sent()

    def _note_sent(self) -> None:
        """Remember the state that was sent, for synthetic data."""
        if self._options.is_synthetic:
            self._sent_state = self._grouped.joined(self._attached().state_dict())

    def _joined_state(self) -> dict[str, State]:
        """Return the device's state; with synthetic data the state that was sent."""
        if self._sent_state is not None:
            return self._sent_state
        return self._grouped.joined(self._attached().state_dict())

    def _attached(self) -> DeviceOptimizer:
        if self._device is None:
            raise createPoptorchError("Device is not attached")
        return self._device


def _group_indices(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, Tensor]
) -> dict[str, int | None]:
    """Map each weight to its parameter group; tied weights are found by memory.

    Raises:
        KeyError: If a group holds a tensor that isn't the model's.
    """
    by_identity: dict[int, int] = {}
    by_memory: dict[int, int] = {}
    own_identities = {id(tensor) for tensor in weights.values()}
    own_memory = {tensor.data_ptr() for tensor in weights.values()} - {0}
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
        for name, tensor in weights.items()
    }
