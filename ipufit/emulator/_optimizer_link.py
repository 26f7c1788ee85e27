# SPDX-License-Identifier: Apache-2.0
"""The host's optimiser object and its counterpart on the device, kept in step."""

from __future__ import annotations

import torch
from torch import Tensor

from ._optimizer_base import Optimizer as PoptorchOptimizer
from ._optimizer_base import StateTensors
from ._optimizer_settings import OptimizerReader, check_replaceable
from ._update_rules import DeviceOptimizer, group_indices
from .errors import createPoptorchError


class OptimizerLink:
    """Reads the optimiser of a training executor and moves its state.

    The state of PopTorch's optimisers survives detach and attach through the host.
    That of torch's optimisers does not: their device state begins anew, as PopTorch
    has nowhere to keep it.

    Args:
        optimizer: The host's object.
        relax_attribute_checks: Keep quiet about attributes that it doesn't know.

    Raises:
        AssertionError: The optimizer is of a type that PopTorch doesn't take.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, relax_attribute_checks: bool
    ) -> None:
        self._reader = OptimizerReader(relax_attribute_checks=relax_attribute_checks)
        self._optimizer = optimizer
        self.settings = self._reader.read(optimizer)
        self._device: DeviceOptimizer | None = None
        self._kept_state: dict[str, StateTensors] | None = None

    @property
    def device_optimizer(self) -> DeviceOptimizer:
        """The optimiser on the device of an attached executor."""
        if self._device is None:
            raise createPoptorchError("Device is not attached")
        return self._device

    def check_groups(self, host_weights: dict[str, Tensor]) -> None:
        """Refuse an optimiser of weights that the model doesn't have.

        Raises:
            KeyError: One of its parameters is not among `host_weights`.
        """
        group_indices(self._optimizer, host_weights)

    def attach(self, trained: dict[str, Tensor], host: dict[str, Tensor]) -> None:
        """Build the device's optimiser, with the state that the host has kept."""
        self._device = DeviceOptimizer(
            self.settings, trained, group_indices(self._optimizer, host)
        )
        if not isinstance(self._optimizer, PoptorchOptimizer):
            return
        kept = self._kept_state or self._optimizer._kept_state()
        if kept is not None:
            self._device.load_state(kept["ipu_state"], kept["ipu_param"])
            self._device.update(self.settings)  # values may have changed since
        self.upload_loaded_state()
        self._optimizer._bind_device(self._device.state_dict)

    def detach(self) -> None:
        """Save what can be saved; the device's optimiser is gone."""
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._kept_state = self.device_optimizer.state_dict()
            self._optimizer._unbind_device()
        self._device = None

    def weights_were_uploaded(self) -> None:
        """PopTorch uploads every variable with the weights, stale states included."""
        if not isinstance(self._optimizer, PoptorchOptimizer):
            self.device_optimizer.reset_state()

    def upload_loaded_state(self) -> None:
        """Send a state that was loaded into the host's optimiser since."""
        if isinstance(self._optimizer, PoptorchOptimizer):
            pending = self._optimizer._take_pending_upload()
            if pending is not None:
                self.device_optimizer.load_state(
                    pending["ipu_state"], pending["ipu_param"]
                )

    def was_stepped(self) -> None:
        """The device's state is newer than the host's now."""
        if isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._mark_device_newer()

    def set(self, optimizer: torch.optim.Optimizer, *, is_compiled: bool) -> None:
        """Take the values of `optimizer`, perhaps another object.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation.
        """
        settings = self._reader.read(optimizer)
        if is_compiled:
            check_replaceable(self.settings, settings)
        is_new = optimizer is not self._optimizer
        if is_new and isinstance(self._optimizer, PoptorchOptimizer):
            self._optimizer._unbind_device()
        self._optimizer, self.settings = optimizer, settings
        if self._device is None:
            return
        self._device.update(settings)
        if is_new and isinstance(optimizer, PoptorchOptimizer):
            self.upload_loaded_state()
            optimizer._bind_device(self._device.state_dict)
