# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the user's module to the device: on request only."""

from __future__ import annotations

from typing import Any

from ipufit.emulator._executor.constraints import updatable_buffers
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._executor.optimizer_sync import OptimizerSync
from ipufit.emulator._executor.weights_to_host import WeightsToHost
from ipufit.emulator._executor.wrapper_registry import is_wrapped
from ipufit.emulator._ground.logging import logger
from ipufit.emulator.errors import createPoptorchError


class WeightsToDevice:
    """Uploads weights that the user, or another executor, has changed."""

    def __init__(
        self, state: ModelState, to_host: WeightsToHost, optimizer: OptimizerSync
    ) -> None:
        self._state = state
        self._to_host = to_host
        self._optimizer = optimizer

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; what the device has learnt since is lost.

        Raises:
            Error: Not compiled, or not attached.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> module = torch.nn.Linear(2, 1)
            >>> inference = inferenceModel(module)
            >>> before = inference(torch.ones(1, 2))
            >>> with torch.no_grad():
            ...     _ = module.bias.add_(1.0)
            >>> torch.equal(inference(torch.ones(1, 2)), before)
            True
            >>> inference.copyWeightsToDevice()
            >>> torch.equal(inference(torch.ones(1, 2)), before)
            False
        """
        self._upload("copyWeightsToDevice")

    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers that `Options.updatableNamedBuffers` names.

        Nothing else is uploaded. As in PopTorch, what training has changed since the
        host saw it last isn't fetched any more, until the next call has changed it.

        Raises:
            Error: Not compiled, not attached, or the options name no buffer.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options, inferenceModel
            >>> class Shift(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.register_buffer("offset", torch.zeros(1))
            ...     def forward(self, x):
            ...         return x + self.offset
            >>> options = Options().updatableNamedBuffers(["offset"])
            >>> inference = inferenceModel(Shift(), options)
            >>> inference(torch.zeros(1))
            tensor([0.])
            >>> _ = inference.offset.fill_(3.0)
            >>> inference.copyNamedBuffersToDevice()
            >>> inference(torch.zeros(1))
            tensor([3.])
        """
        self._state.require_compiled()
        names = updatable_buffers(self._state.options)
        if not names:
            raise createPoptorchError(
                "No named buffers marked as updatable via updatableNamedBuffers "
                "option: name them when the model is wrapped, "
                '`Options().updatableNamedBuffers(["offset"])`.'
            )
        self._upload("copyNamedBuffersToDevice", names)

    def _upload(self, method: str, names: list[str] | None = None) -> None:
        """Upload all weights, or those of `names` only."""
        self._state.require_compiled()
        self._to_host.is_stale = False
        self._optimizer.read()  # its state is uploaded with the weights
        with self._to_host.transfer(method) as attachment:
            if names is None:
                attachment.upload()
            else:
                attachment.upload_named(names)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """`Module.load_state_dict`, and an upload if attached.

        Args:
            state_dict: Parameters and buffers by name.
            strict: Whether the names must be exactly the module's.

        Returns:
            The missing and the unexpected names, as from torch.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.load_state_dict(torch.nn.Linear(2, 1).state_dict())
            <All keys matched successfully>
        """
        result = self._state.user_model.load_state_dict(state_dict, strict)
        if self._state.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def follow_training(self) -> None:
        """Upload what a training executor of the same module has learnt.

        Every copy to the host, of either executor, makes their versions differ, so the
        next call of this one uploads. That includes the first call after attaching,
        which has uploaded already, and a training executor that is gone has no version
        at all (PopTorch, `_poplar_executor.py`, `__call__`).
        """
        trained: Any = self._state.user_model
        if not is_wrapped(trained):
            return
        trained.copyWeightsToHostIfNeeded()
        version = trained._host_weights_version
        if version != self._to_host.version:
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
            self._to_host.version = version
