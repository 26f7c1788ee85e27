# SPDX-License-Identifier: Apache-2.0
"""The link between the host's optimiser object and the device's optimiser."""

from __future__ import annotations

from typing import Mapping

import torch
from torch import Tensor

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.replica_groups import GroupedState, ReplicaGroups
from ipufit.emulator._optimizers.base import Optimizer as PoptorchOptimizer
from ipufit.emulator._optimizers.base import StateTensors
from ipufit.emulator._optimizers.settings import OptimizerReader
from ipufit.emulator._optimizers.text import optimizer_log
from ipufit.emulator._optimizers.values import check_replaceable
from ipufit.emulator._options.options import Options
from ipufit.emulator._options.settings import Settings
from ipufit.emulator._update.device_optimizer import DeviceOptimizer
from ipufit.emulator._update.loss_scale import AutomaticLossScale
from ipufit.emulator._update.parameter_groups import group_indices
from ipufit.emulator.errors import createPoptorchError


class OptimizerLink:
    """The optimiser of a training executor: the host's object and the device's.

    The state of PopTorch's optimisers survives detach and attach through the host.
    That of torch's optimisers does not: their device state begins anew, as PopTorch
    has nowhere to keep it. The executor decides when the state moves.

    Args:
        optimizer: The host's object.
        options: The executor's. They say whether the device adapts the loss scaling,
            and whether to keep quiet about unknown attributes.

    Raises:
        AssertionError: The optimizer is of a type that PopTorch doesn't take.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._options = options
        self._reader = OptimizerReader(
            relax_attribute_checks=options._relax_optimizer_checks,
            automatic_loss_scaling=AutomaticLossScale.from_options(options) is not None,
        )
        self.optimizer = optimizer
        self.settings = self._reader.read(optimizer)
        self._device: DeviceOptimizer | None = None
        self._indices: dict[str, int | None] = {}
        self._kept_state: dict[str, StateTensors] | None = None
        self._grouped = GroupedState({})
        self._written_values: StateTensors = {}
        self._is_synthetic = Settings.of(options).is_synthetic
        self._sent_state: dict[str, StateTensors] | None = None

    @property
    def device_optimizer(self) -> DeviceOptimizer:
        """The optimiser on the device of an attached executor."""
        if self._device is None:
            raise createPoptorchError("Device is not attached")
        return self._device

    def check_groups(self, host_weights: dict[str, Tensor]) -> None:
        """Find the group of each weight: compiling settles it.

        Raises:
            KeyError: A parameter of the optimizer is not among `host_weights`.
        """
        self._indices = group_indices(self.optimizer, host_weights)

    def tensor_names(self, trained: list[str], host: dict[str, Tensor]) -> list[str]:
        """Name the tensors of the device's optimiser.

        Args:
            trained: Names of the weights that are updated.
            host: All weights by name.
        """
        # On the device "meta", torch would import its compiler for zeros.
        empty = {name: torch.empty(0, dtype=host[name].dtype) for name in trained}
        return list(self.made_for(empty, host).tensors())

    def made_for(
        self, weights: dict[str, Tensor], host: dict[str, Tensor]
    ) -> DeviceOptimizer:
        """Make an optimiser like the device's, in its first state.

        Args:
            weights: The weights that it updates, by name.
            host: All weights by name.
        """
        return self._make(weights, group_indices(self.optimizer, host))

    def _make(
        self, weights: dict[str, Tensor], indices: dict[str, int | None]
    ) -> DeviceOptimizer:
        automatic = AutomaticLossScale.from_options(self._options)
        return DeviceOptimizer(self.settings, weights, indices, automatic)

    def attach(
        self,
        trained: dict[str, Tensor],
        groups: Mapping[str, ReplicaGroups],
    ) -> None:
        """Make the device's optimiser, with the state that an earlier one had."""
        self._grouped = GroupedState(groups)
        indices = self._grouped.group_index(self._indices)
        self._device = self._make(trained, indices)
        self._log_settings()
        if self._kept_state is not None:
            self._load(self._kept_state)
        self._note_sent()

    def detach(self) -> None:
        """Drop the device's optimiser, and keep its state if PopTorch can."""
        if isinstance(self.optimizer, PoptorchOptimizer):
            self._kept_state = self._joined_state()
        self._device = None

    def forget(self) -> None:
        """Drop the state that was kept: the executable is gone."""
        self._kept_state, self._written_values = None, {}

    def weights_were_uploaded(self) -> None:
        """Reset the state as PopTorch does, which uploads stale states with weights."""
        if not isinstance(self.optimizer, PoptorchOptimizer):
            self.device_optimizer.reset_state()

    def read_state(self) -> dict[str, StateTensors]:
        """Read `ipu_state` and `ipu_param` from the device.

        Hyper-parameters that were written are read back, though the device has others:
        both stay in the host's memory (PopTorch, `poptorch.cpp`).
        """
        logger.info("Writing optimiser state tensors from IPU to host.")
        state = self._joined_state()
        values = state["ipu_param"]
        written = {n: v for n, v in self._written_values.items() if n in values}
        return {**state, "ipu_param": {**values, **written}}

    def write_state(self, state: Mapping[str, StateTensors]) -> None:
        """Send a state of `read_state`; hyper-parameters stay as they are."""
        logger.info("Writing optimiser state tensors from host to IPU memory.")
        self._load(state)
        self._written_values = dict(state["ipu_param"] or {})

    def set(self, optimizer: torch.optim.Optimizer, *, is_compiled: bool) -> None:
        """Take the values of an optimiser, perhaps of another object.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation.
        """
        self.optimizer = optimizer
        settings = self._reader.read(optimizer)
        is_changed = settings != self.settings
        if is_compiled:
            check_replaceable(self.settings, settings)
        self.settings = settings
        if self._device is None:
            return
        self._device.update(settings)
        self._written_values = {}
        if is_changed:
            self._log_settings()

    def _load(self, state: Mapping[str, StateTensors]) -> None:
        state = self._grouped.split(dict(state))
        self.device_optimizer.load_state(state["ipu_state"], state["ipu_param"])
        self._note_sent()

    def _note_sent(self) -> None:
        """Note the state that the host has: with synthetic data it stays there."""
        if self._is_synthetic:
            self._sent_state = self._grouped.joined(self.device_optimizer.state_dict())

    def _joined_state(self) -> dict[str, StateTensors]:
        """The device's state; with synthetic data the one that it was sent."""
        if self._sent_state is not None:
            return self._sent_state
        return self._grouped.joined(self.device_optimizer.state_dict())

    def _log_settings(self) -> None:
        for line in optimizer_log(self.settings):
            logger.debug(line)
