# SPDX-License-Identifier: Apache-2.0
"""When the state of PopTorch's optimisers moves between host and device.

Two flags of the optimiser say which side is newer; torch's optimisers have none, and
their state doesn't move (PopTorch, `python/_poplar_executor.py`, `python/optim.py`).
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Protocol

import torch

from ipufit.emulator._ground.logging import logger
from ipufit.emulator._optimizers.base import Optimizer as PoptorchOptimizer
from ipufit.emulator._optimizers.base import torch_state
from ipufit.emulator._options.options import Options
from ipufit.emulator._update.optimizer_link import OptimizerLink
from ipufit.emulator.enums import MeanReductionStrategy
from ipufit.emulator.errors import createPoptorchError

NOT_COMPILED = "Model has not been compiled or has been destroyed."

ReadStateDict = Callable[[], "dict[str, Any]"]


class Executor(Protocol):
    """The executor that trains with an optimiser."""

    @property
    def options(self) -> Options: ...

    def isCompiled(self) -> bool: ...

    def isAttachedToDevice(self) -> bool: ...

    def copyWeightsToHostIfNeeded(self) -> bool: ...


class OptimizerSync:
    """Keeps the optimiser of an executor and its copy on the device in step.

    Args:
        optimizer: None for inference.

    Attributes:
        link: The optimiser and its counterpart on the device; None for inference.
    """

    def __init__(
        self, executor: Executor, optimizer: torch.optim.Optimizer | None
    ) -> None:
        # An inference model goes with its last reference; no collector need find it.
        self._executor = executor if optimizer is not None else weakref.proxy(executor)
        self.link = (
            None if optimizer is None else OptimizerLink(optimizer, executor.options)
        )
        self._use_running_mean_if_needed()

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of an optimiser, and have it read this device from now on."""
        link = self.link
        if link is None:
            raise AttributeError("An inference model has no optimizer to set.")
        is_compiled = self._executor.isCompiled()
        if is_compiled and optimizer is not link.optimizer:
            before = link.optimizer
            if isinstance(before, PoptorchOptimizer):
                self.read_state()
                before.state_dict = before.get_state_dict  # type: ignore[method-assign]
            if isinstance(optimizer, PoptorchOptimizer):
                optimizer.ipu_state_is_dirty = True
        follow_device(optimizer, self.state_dict)
        link.set(optimizer, is_compiled=is_compiled)
        self._use_running_mean_if_needed()
        if self._executor.isAttachedToDevice():
            self.write_state()

    def _use_running_mean_if_needed(self) -> None:
        running = MeanReductionStrategy.Running
        options = self._executor.options
        training = options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        link = self.link
        if link is None or not link.settings.uses_running_mean or strategy == running:
            return
        if self._executor.isCompiled():
            raise ValueError(
                "An optimizer with a 16-bit accum_type needs "
                "MeanReductionStrategy.Running, but the executable is already compiled."
            )
        options._unfreeze()
        training.setMeanAccumulationAndReplicationReductionStrategy(running)
        options._freeze()

    @property
    def _poptorch_optimizer(self) -> PoptorchOptimizer | None:
        optimizer = None if self.link is None else self.link.optimizer
        return optimizer if isinstance(optimizer, PoptorchOptimizer) else None

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimiser that this executor has now."""
        optimizer = self._poptorch_optimizer
        if optimizer is None:
            raise AssertionError(
                "The executor that this optimizer was made for has one of torch's now."
            )
        self.read_state()
        return optimizer.get_state_dict()

    def read_state(self) -> None:
        """Copy the device's state to the optimiser if it is newer."""
        optimizer, link = self._poptorch_optimizer, self.link
        if optimizer is None or link is None:
            return
        if not optimizer.host_state_is_dirty:
            logger.debug("Using cached optimiser state dict")
            return
        if not self._executor.isCompiled():
            raise createPoptorchError(NOT_COMPILED)
        of_torch = torch_state(optimizer)
        optimizer.set_state_dict({**link.read_state(), **of_torch})
        optimizer.ipu_state_is_dirty = False

    def read(self) -> None:
        """Copy the state from the device that the optimiser follows, if it is newer.

        It may be the device of another executor, which was given the optimiser later.
        """
        if self._poptorch_optimizer is not None:
            self._poptorch_optimizer.state_dict()

    def write_state(self) -> None:
        """Send a state to the device that was loaded on the host, and is newer."""
        optimizer, link = self._poptorch_optimizer, self.link
        if optimizer is None or link is None or not optimizer.ipu_state_is_dirty:
            return
        if optimizer.host_state_is_dirty:
            raise AssertionError(
                "Both host and ipu states cannot be dirty at the same time: another "
                "executor trains with this optimizer. Read its state_dict() first."
            )
        if optimizer.has_state():
            # Together with the state all weights go to the device.
            self._executor.copyWeightsToHostIfNeeded()
            link.write_state(optimizer.state_dict())
        optimizer.ipu_state_is_dirty = False

    def start(self) -> None:
        """Send the optimiser's state to a device that was just attached."""
        self.read()
        optimizer = self._poptorch_optimizer
        if optimizer is None:
            return
        if optimizer.has_state():
            optimizer.ipu_state_is_dirty = True
            self.write_state()
        else:
            optimizer.host_state_is_dirty = True
            optimizer.ipu_state_is_dirty = False

    def note_update(self) -> None:
        """Note that the device's state is newer than the host's."""
        if self._poptorch_optimizer is not None:
            self._poptorch_optimizer.host_state_is_dirty = True


def follow_device(
    optimizer: torch.optim.Optimizer, read_state_dict: ReadStateDict
) -> None:
    """Have `optimizer.state_dict()` call a method of an executor, which it keeps."""
    if isinstance(optimizer, PoptorchOptimizer):
        optimizer.state_dict = read_state_dict  # type: ignore[method-assign]
