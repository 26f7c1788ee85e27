# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the device to the user's module.

An attached executor holds the only up-to-date weights. They come to the host when
somebody reads them, on detach, or on request.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from ipufit.emulator._device.attachment import Attachment
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._executor.wrapper_registry import seen_plain
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._tracing.recording import named_weights
from ipufit.emulator.errors import createPoptorchError


class WeightsToHost:
    """Copies weights to the host, and knows whether the host's are out of date.

    Attributes:
        is_stale: Whether training has changed the weights since they were copied.
        version: Number of copies so far. An inference model takes over that of its
            training model, which is None once that is gone.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.is_stale = False
        self.version: Any = 0

    def copyWeightsToHost(self) -> None:
        """Write the device's weights into the user's module.

        Raises:
            Error: Not compiled, or not attached.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> class Counter(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.register_buffer("calls", torch.zeros(1))
            ...     def forward(self, x):
            ...         self.calls += 1
            ...         return x + self.calls
            >>> counter = Counter()
            >>> inference = inferenceModel(counter)
            >>> inference(torch.zeros(1)), counter.calls
            (tensor([1.]), tensor([0.]))
            >>> inference.copyWeightsToHost()
            >>> counter.calls
            tensor([1.])
        """
        self._state.require_compiled()
        self.is_stale = False
        with self.transfer("copyWeightsToHost") as attachment:
            attachment.download()
        self.version += 1

    def copyWeightsToHostIfNeeded(self) -> bool:
        """`copyWeightsToHost()` if training made the host's copy stale.

        Returns:
            Whether there was something to copy.

        Example:
            >>> import torch
            >>> from ipufit.emulator import trainingModel
            >>> trainingModel(torch.nn.Linear(2, 1)).copyWeightsToHostIfNeeded()
            False
        """
        if not self.is_stale:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    @contextlib.contextmanager
    def transfer(self, method: str) -> Iterator[Attachment]:
        """Let weights move while the host's are read without being fetched.

        Args:
            method: Name of the public method that moves them, for the message.

        Raises:
            Error: No IPU is held: an engine of Poplar's runs on a device only.
        """
        attachment = self._state.attachment
        if attachment is None:
            raise createPoptorchError(
                f"{method}() needs a device, and this model holds none: call "
                "attachToDevice() first."
            )
        with self.looked_up():
            yield attachment

    @contextlib.contextmanager
    def looked_up(self) -> Iterator[None]:
        """Look the host's weights up by name: the user may have replaced some.

        Raises:
            Error: The module has no weight of a compiled one's name.
        """
        compiled = self._state.require_compiled().host_weights
        now = named_weights(self._state.model)
        missing = compiled.keys() - now.keys()
        if missing:
            raise createPoptorchError(
                f"The model was compiled with {', '.join(sorted(missing))}, which it "
                "has no more: call destroy() to compile it again."
            )
        with seen_plain([*now.values(), *compiled.values()]):
            for name, weight in compiled.items():
                if weight.is_floating_point():  # others are compiled in
                    compiled[name] = now[name]
            yield
