# SPDX-License-Identifier: Apache-2.0
"""The life of an executor: compile, attach, detach, destroy."""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

from ipufit.emulator._device.attachment import Attachment
from ipufit.emulator._executor.compiling import compile_model
from ipufit.emulator._executor.joining import Joining
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator._executor.optimizer_sync import OptimizerSync
from ipufit.emulator._executor.random_state import RandomState
from ipufit.emulator._executor.weights_to_host import WeightsToHost
from ipufit.emulator._executor.wrapper_registry import is_wrapped, unwrap_model
from ipufit.emulator._layout.pod import Lease
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator.enums import ConnectionType
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")


class Lifecycle:
    """Compiles, attaches, detaches and destroys, and tells the other parts."""

    def __init__(
        self,
        state: ModelState,
        to_host: WeightsToHost,
        optimizer: OptimizerSync,
        random: RandomState,
    ) -> None:
        self._state = state
        self._to_host = to_host
        self._optimizer = optimizer
        self._random = random
        self._joining = Joining(state.options, is_training=state.is_training)

    # Compile ------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Trace and compile for arguments like these, without running them.

        Compiling a compiled executor does nothing but log a warning: `destroy()` it
        first.

        Args:
            *args: As for a call.
            **kwargs: As for a call.

        Raises:
            AssertionError: A batch dimension is not a multiple of `D * G * R`.
            Error: The module or its options ask for something that no device does.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(4, 2))
            >>> inference.isCompiled()
            True
        """
        is_compiled = self._state.isCompiled()
        arguments = self._state.parser.parse(args, kwargs, is_compiling=not is_compiled)
        if is_compiled:
            logger.warning(
                "Call to compile() ignored: the executable is already compiled"
            )
            return
        self.compile_for(arguments)
        if self._state.options.connection_type == ConnectionType.OnDemand:
            self.attachToDevice()

    def compile_for(self, arguments: CallArguments) -> None:
        """Compile, and attach if the options say `ConnectionType.Always`."""
        start = time.perf_counter()
        state, link = self._state, self._optimizer.link
        state.executable, state.last_call = compile_model(state, arguments, link), None
        try:
            if state.options.connection_type == ConnectionType.Always:
                self.attachToDevice()
        except Exception:
            self._forget_program()
            raise
        state.compilation_time = datetime.timedelta(seconds=time.perf_counter() - start)

    # Devices ------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Acquire IPUs and upload weights and optimiser state.

        Raises:
            Error: Not compiled, attached already, or there are not enough IPUs.
            AssertionError: The connection type is `Never`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(4, 2))
            >>> inference.detachFromDevice()
            >>> inference.attachToDevice()
            >>> inference.isAttachedToDevice()
            True
        """
        executable = self._state.require_compiled()
        target = executable.target
        if target.is_offline:
            raise AssertionError(
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
        if self._state.isAttachedToDevice():
            raise createPoptorchError("Device is already attached")
        with self._to_host.looked_up():
            processes = self._joining.join(executable)
            self._state.attachment = Attachment(
                Lease(self, target.num_ipus, target.first_ipu),
                executable.program,
                executable.anchors,
                self._state.options,
                executable.host_weights,
                executable.replica_groups,
                executable.runner,
                self._random.start(),
                self._optimizer.link,
                processes,
            )
        try:
            self._optimizer.start()
        except Exception:
            self._release_device()
            raise

    def detachFromDevice(self) -> None:
        """Save weights, optimiser and random state, and release the IPUs.

        The next call attaches again.

        Raises:
            Error: Not compiled, or not attached.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.detachFromDevice()
            Traceback (most recent call last):
                ...
            ipufit.emulator.errors.Error: 'poptorch_py_error': Model has not been ...
        """
        self._state.require_compiled()
        if not self._state.isAttachedToDevice():
            raise createPoptorchError("Device is not attached")
        self._random.read()
        self._to_host.copyWeightsToHostIfNeeded()
        self._optimizer.read_state()
        self._release_device()

    def _release_device(self) -> None:
        if self._state.attachment is not None:
            self._state.attachment.end()
            self._state.attachment = None
            logger.debug("Detached from device")
        self._random.end()

    def destroy(self) -> None:
        """Fetch the weights, then drop the executable and free the IPUs.

        Does nothing before the first compilation, as in PopTorch: a training model
        that never ran keeps its module wrapped.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference(torch.ones(4, 2)).shape
            torch.Size([4, 1])
            >>> inference.destroy()
            >>> inference(torch.ones(1, 2)).shape
            torch.Size([1, 1])
        """
        if not self._state.isCompiled():
            return
        self._to_host.copyWeightsToHostIfNeeded()
        self._optimizer.read()
        self._release_device()
        self._forget_program()
        if not self._state.is_training:
            return
        if not is_wrapped(self._state.user_model):
            raise createPoptorchError("model was never wrapped")
        unwrap_model(self._state.user_model)

    def _forget_program(self) -> None:
        self._state.executable = None
        if self._optimizer.link is not None:
            self._optimizer.link.forget()
