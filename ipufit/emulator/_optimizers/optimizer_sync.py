# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training executor: on the host, on the device, and in between."""

from __future__ import annotations

from typing import Any, Mapping, Protocol

import torch
from torch import Tensor

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.replica_groups import GroupedState, ReplicaGroups
from ipufit.emulator._optimizers.device_optimizer import DeviceOptimizer
from ipufit.emulator._optimizers.rules import State
from ipufit.emulator._optimizers.settings import (
    OptimizerReader,
    check_replaceable,
    optimizer_log,
)
from ipufit.emulator._options.options import Options, Settings
from ipufit.emulator.enums import MeanReductionStrategy
from ipufit.emulator.errors import createPoptorchError
from ipufit.emulator.optim import Optimizer as PoptorchOptimizer

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class Executor(Protocol):
    """The executor that trains with an optimizer."""

    @property
    def options(self) -> Options: ...

    def isCompiled(self) -> bool: ...

    def copyWeightsToHostIfNeeded(self) -> bool: ...


class OptimizerSync:
    """Keeps the optimizer of an executor and its counterpart on the device in step.

    The state of PopTorch's optimizers survives detach and attach through the host. Two
    flags of theirs say which side is newer (PopTorch, `python/_poplar_executor.py`,
    `python/optim.py`). Torch's optimizers have no flags, and their state doesn't move:
    on the device it begins anew, as PopTorch has nowhere to keep it.

    Args:
        executor: Trains with the optimizer.
        optimizer: The host's object. One that accumulates in 16 bits sets the reduction
            strategy of the executor's options to `Running`.

    Attributes:
        settings: The values that the device has.

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
        """Have `optimizer.state_dict()` read the device, and keep the executor."""
        self.optimizer = optimizer
        self._poptorch: PoptorchOptimizer | None = None  # the same, if it has a state
        if isinstance(optimizer, PoptorchOptimizer):
            self._poptorch = optimizer
            optimizer.state_dict = self.state_dict  # type: ignore[method-assign]

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of an optimizer, and have it read this device from now on.

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
        """Find the groups of weights, and name the tensors of the device's optimizer.

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
        """Make the device's optimizer, with the state that an earlier one had.

        Args:
            trained: The device's weights.
            groups: The weights, by name, that differ between groups of replicas.
        """
        self._grouped = GroupedState(groups)
        self._device = self._make(trained, self._grouped.group_index(self._indices))
        self._log_settings()
        if self._kept_state is not None:
            self._load(self._kept_state)
        self._note_sent()
        return self._device

    def detach(self) -> None:
        """Drop the device's optimizer, and keep its state if PopTorch can."""
        if self._poptorch is not None:
            self._kept_state = self._joined_state()
        self._device = None

    def forget(self) -> None:
        """Drop the state that was kept: the executable is gone."""
        self._kept_state, self._written_values = None, {}

    def weights_were_uploaded(self) -> None:
        """Reset the state as PopTorch does, which uploads stale states with weights."""
        if self._poptorch is None and self._device is not None:
            self._device.reset_state()

    # State of PopTorch's optimizers ---------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give the state of the optimizer that the executor has now."""
        optimizer = self._poptorch
        if optimizer is None:
            raise AssertionError(
                "The executor that this optimizer was made for has one of torch's now."
            )
        self.read_state()
        return optimizer.get_state_dict()

    def read(self) -> None:
        """Copy the state from the device that the optimizer follows, if it is newer.

        It may be the device of another executor, which was given the optimizer later.
        """
        if self._poptorch is not None:
            self._poptorch.state_dict()

    def read_state(self) -> None:
        """Copy this device's state to the optimizer if it is newer.

        Hyper-parameters that were written are read back, though the device has others:
        both stay in the host's memory (PopTorch, `poptorch.cpp`).
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
        """Send a state to the device that was loaded on the host, and is newer.

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
        """Send a newer state of the host, and note that the device's will be newer."""
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
        """Note the state that the host has: with synthetic data it stays there."""
        if self._options.is_synthetic:
            self._sent_state = self._grouped.joined(self._attached().state_dict())

    def _joined_state(self) -> dict[str, State]:
        """The device's state; with synthetic data the one that it was sent."""
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
    """Find the parameter group that holds each weight, itself or by its memory.

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
