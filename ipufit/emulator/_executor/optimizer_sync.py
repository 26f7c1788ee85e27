# SPDX-License-Identifier: Apache-2.0
"""When the state of PopTorch's optimisers moves between host and device.

Two flags of the optimiser say which side is newer; torch's optimisers have none, and
nothing of theirs moves (PopTorch, `python/_poplar_executor.py`, `python/optim.py`).
"""

from __future__ import annotations

import abc
from typing import Any

import torch

from ipufit.emulator._executor.state import ExecutorState
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._optimizers.base import Optimizer as PoptorchOptimizer


class OptimizerSync(ExecutorState):
    """The part of an executor that keeps its optimiser in step."""

    @abc.abstractmethod
    def copyWeightsToHostIfNeeded(self) -> bool:
        """Fetch the weights if training made the host's copy stale."""

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of `optimizer`; its state stays on the device.

        Call it after every change to a learning rate or another value. A new
        optimizer object without loaded state keeps the state that the device has.

        Args:
            optimizer: Of the type that the model was compiled with.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation.
            AttributeError: It is an inference model.

        Example:
            >>> from ipufit.emulator import optim, trainingModel
            >>> module = torch.nn.Linear(2, 1)
            >>> sgd = optim.SGD(module.parameters(), lr=0.1)
            >>> training = trainingModel(module, optimizer=sgd)
            >>> sgd.param_groups[0]["lr"] = 0.01
            >>> training.setOptimizer(sgd)
        """
        link = self._optimizer_link
        if link is None:
            raise AttributeError("An inference model has no optimizer to set.")
        if self.isCompiled() and optimizer is not link.optimizer:
            before = link.optimizer
            if isinstance(before, PoptorchOptimizer):
                self._read_optimizer_state()
                before.state_dict = before.get_state_dict  # type: ignore[method-assign]
            if isinstance(optimizer, PoptorchOptimizer):
                optimizer.ipu_state_is_dirty = True
        self._follow(optimizer)
        link.set(optimizer, is_compiled=self.isCompiled())
        self._use_running_mean_if_needed()
        if self.isAttachedToDevice():
            self._write_optimizer_state()

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer.state_dict()` read the device of this executor."""
        if isinstance(optimizer, PoptorchOptimizer):
            optimizer.state_dict = (  # type: ignore[method-assign]
                self._state_dict_of_optimizer
            )

    def _state_dict_of_optimizer(self) -> dict[str, Any]:
        """The state of the optimiser that this executor has now."""
        optimizer = self._poptorch_optimizer
        if optimizer is None:
            raise AssertionError(
                "The executor that this optimizer was made for has one of torch's now."
            )
        self._read_optimizer_state()
        return optimizer.get_state_dict()

    @property
    def _poptorch_optimizer(self) -> PoptorchOptimizer | None:
        link = self._optimizer_link
        optimizer = None if link is None else link.optimizer
        return optimizer if isinstance(optimizer, PoptorchOptimizer) else None

    def _read_optimizer_state(self) -> None:
        """Read the device's state if it is newer."""
        optimizer, link = self._poptorch_optimizer, self._optimizer_link
        if optimizer is None or link is None:
            return
        if not optimizer.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict")
            return
        self._require_compiled()
        torchs = torch.optim.Optimizer.state_dict(optimizer)
        optimizer.set_state_dict({**link.read_state(), **torchs})
        optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state(self) -> None:
        """Send a state that was loaded on the host, and is newer."""
        optimizer, link = self._poptorch_optimizer, self._optimizer_link
        if optimizer is None or link is None or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.host_state_is_dirty:
            raise AssertionError(
                "Both host and ipu states cannot be dirty at the same time: another "
                "executor trains with this optimizer. Read its state_dict() first."
            )
        if optimizer.has_state():
            # Together with the state all weights go to the device.
            self.copyWeightsToHostIfNeeded()
            link.write_state(optimizer.state_dict())
        optimizer.ipu_state_is_dirty = False

    def _read_optimizer(self) -> None:
        """Have the optimiser read the device it follows, if that is newer."""
        if self._poptorch_optimizer is not None:
            self._poptorch_optimizer.state_dict()

    def _optimizer_was_attached(self) -> None:
        optimizer = self._poptorch_optimizer
        if optimizer is None:
            return
        if optimizer.has_state():
            optimizer.ipu_state_is_dirty = True
            self._write_optimizer_state()
        else:
            optimizer.host_state_is_dirty = True
            optimizer.ipu_state_is_dirty = False

    def _optimizer_was_stepped(self) -> None:
        """The device's state is newer than the host's now."""
        if self._poptorch_optimizer is not None:
            self._poptorch_optimizer.host_state_is_dirty = True
