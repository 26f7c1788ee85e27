# SPDX-License-Identifier: Apache-2.0
"""When weights move between the user's module and the device.

An attached executor holds the only up-to-date weights. They come to the host when
somebody reads them, on detach, or on request; they go to the device on attach, or on
request.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from ipufit.emulator._device.attachment import Attachment
from ipufit.emulator._executor.optimizer_sync import OptimizerSync
from ipufit.emulator._executor.wrapper_registry import is_wrapped, seen_plain
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._tracing.weights import named_weights
from ipufit.emulator.errors import createPoptorchError


class WeightSync(OptimizerSync):
    """The copies of weights that a user may ask for."""

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
        self._require_compiled()
        self._dirty_host_weights = False
        with self._transfer("copyWeightsToHost") as attachment:
            attachment.download()
        self._host_weights_version += 1

    @contextlib.contextmanager
    def _transfer(self, what: str) -> Iterator[Attachment]:
        """Let weights move while the host's are seen without being fetched.

        Raises:
            Error: No IPU is held: an engine of Poplar's runs on a device only.
        """
        if self._attachment is None:
            raise createPoptorchError(
                f"{what}() needs a device, and this model holds none: call "
                "attachToDevice() first."
            )
        with self._found_host_weights():
            yield self._attachment

    @contextlib.contextmanager
    def _found_host_weights(self) -> Iterator[None]:
        """Look weights up by name: the user may have put others in their places.

        Raises:
            Error: One has no successor.
        """
        now = named_weights(self._model)
        missing = self._host_weights.keys() - now.keys()
        if missing:
            raise createPoptorchError(
                f"The model was compiled with {', '.join(sorted(missing))}, which it "
                "has no more: call destroy() to compile it again."
            )
        with seen_plain([*now.values(), *self._host_weights.values()]):
            for name, weight in self._host_weights.items():
                if weight.is_floating_point():  # others are compiled in
                    self._host_weights[name] = now[name]
            yield

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
        if not self._dirty_host_weights:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

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
        self._require_compiled()
        self._dirty_host_weights = False
        self._read_optimizer()  # its state is uploaded with the weights
        with self._transfer("copyWeightsToDevice") as attachment:
            attachment.upload()

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
        self._require_compiled()
        names = self._updatable_buffers()
        if not names:
            raise createPoptorchError(
                "No named buffers marked as updatable via updatableNamedBuffers "
                "option: name them when the model is wrapped, "
                '`Options().updatableNamedBuffers(["offset"])`.'
            )
        self._dirty_host_weights = False
        self._read_optimizer()
        with self._transfer("copyNamedBuffersToDevice") as attachment:
            attachment.upload_named(names)

    def _updatable_buffers(self) -> list[str]:
        return list(self._options._Popart.options.get("updatableNamedBuffers", ()))

    def _check_updatable_buffers(self) -> None:
        """Refuse names of buffers that can't be uploaded.

        Raises:
            Error: The model has no such buffer, or it is compiled in.
        """
        buffers = dict(self._model.named_buffers())
        for name in self._updatable_buffers():
            if name not in buffers:
                raise createPoptorchError(
                    f"Options.updatableNamedBuffers names {name!r}, but the model's "
                    f"buffers are: {', '.join(buffers) or 'none'}."
                )
            if not buffers[name].is_floating_point():
                raise createPoptorchError(
                    f"Options.updatableNamedBuffers names {name!r}, a buffer of "
                    f"{buffers[name].dtype}: only floating-point buffers can be "
                    "uploaded, others are constants of the compiled model."
                )

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """`Module.load_state_dict`, and an upload if attached.

        Args:
            state_dict: Parameters and buffers by name.
            strict: Whether the names must be exactly the module's.

        Returns:
            What torch returns: the missing and the unexpected names.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.load_state_dict(torch.nn.Linear(2, 1).state_dict())
            <All keys matched successfully>
        """
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def _fetch_from_trainer(self) -> None:
        """Bring in what a training executor of the same module has learnt.

        Every copy to the host, of either executor, makes their versions differ, so the
        next call of this one uploads. That includes the first call after attaching,
        which has uploaded already, and a training executor that is gone has no version
        at all (PopTorch, `_poplar_executor.py`, `__call__`).
        """
        trainer: Any = self._user_model
        if not is_wrapped(trainer):
            return
        trainer.copyWeightsToHostIfNeeded()
        version = trainer._host_weights_version
        if version != self._host_weights_version:
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
            self._host_weights_version = version
