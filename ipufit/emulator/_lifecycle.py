# SPDX-License-Identifier: Apache-2.0
"""The life of an executor: compile, attach, detach, destroy."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from typing import Any

import torch

from ._args import CallArguments, check_inputs
from ._attachment import Attachment
from ._constraints import check_program
from ._device import DeviceRng
from ._floating_point import checked
from ._layout import Layout
from ._optimizer_link import OptimizerLink
from ._popart_keys import validate_popart_options
from ._program import micro_batch, trace
from ._tracing import named_weights
from ._weight_sync import WeightSync
from ._wrapping import Wrapping, is_wrapped
from .enums import ConnectionType
from .errors import createPoptorchError
from .optim import SGD

logger = logging.getLogger("poptorch::python")


class Lifecycle(WeightSync):
    """What `PoplarExecutor` is, without its calls."""

    def _start_training(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer_link = OptimizerLink(
            optimizer or SGD(self._user_model.parameters(), lr=0.01),
            relax_attribute_checks=self._options._relax_optimizer_checks,
        )
        self._use_running_mean_if_needed()
        self._wrapping = Wrapping(self._user_model, self)

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
            Error: The module or its options ask for what no device does; the message
                says what.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(4, 2))
            >>> inference.isCompiled()
            True
        """
        arguments = self._parser.parse(args, kwargs, is_compiling=not self.isCompiled())
        if self.isCompiled():
            logger.warning(
                "Call to compile() ignored: the executable is already compiled"
            )
            return
        self._compile(arguments)

    def _compile(self, arguments: CallArguments) -> None:
        start = time.perf_counter()
        check_inputs(arguments.tensors())
        layout = Layout.from_options(self._options)
        with torch.inference_mode(False):
            example = micro_batch(arguments, layout.input_blocks, layout.describe())
        program = trace(
            self._model,
            example,
            strategy=self._options._execution_strategy,
            is_training=self._training,
        )
        validate_popart_options(self._options.toDict())
        check_program(program, layout, self._options, is_training=self._training)
        if self._options._Popart.options.get("enableFloatingPointChecks"):
            program = dataclasses.replace(program, graph=checked(program.graph))
        self._host_weights = {
            # Integer weights are compiled in: changes neither arrive nor come back.
            name: weight if weight.is_floating_point() else weight.detach().clone()
            for name, weight in named_weights(self._model).items()
        }
        if self._optimizer_link is not None:
            self._optimizer_link.check_groups(self._host_weights)
        self._program = program
        self._compiled_arguments = arguments.like_meta()
        self._rng = DeviceRng(self._seed())
        try:
            if self._options.connection_type == ConnectionType.Always:
                self.attachToDevice()
        except Exception:
            self._program = self._compiled_arguments = None
            raise
        if self._training and self._wrapping is None and not is_wrapped(self.model):
            self._wrapping = Wrapping(self.model, self)  # destroyed before
        self._compilation_time = datetime.timedelta(seconds=time.perf_counter() - start)

    # Devices ------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Acquire IPUs and upload weights and optimiser state.

        Raises:
            Error: Not compiled, attached already, or there are not enough IPUs.
            AssertionError: The connection type is `Never`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(4, 2))
            >>> inference.detachFromDevice()
            >>> inference.attachToDevice()
            >>> inference.isAttachedToDevice()
            True
        """
        program, rng = self._require_compiled(), self._rng
        if self._options.connection_type == ConnectionType.Never or rng is None:
            raise AssertionError(
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
        if self.isAttachedToDevice():
            raise createPoptorchError("Device is already attached")
        self._attachment = Attachment(
            self,
            program,
            self._options,
            self._host_weights,
            rng,
            self._optimizer_link,
        )

    def detachFromDevice(self) -> None:
        """Save weights, optimiser and random state, and release the IPUs.

        The next call attaches again.

        Raises:
            Error: Not compiled, or not attached.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.detachFromDevice()
            Traceback (most recent call last):
                ...
            ipufit.emulator.errors.Error: 'poptorch_py_error': Model has not been ...
        """
        self._require_compiled()
        if self._attachment is None:
            raise createPoptorchError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        self._attachment.end()
        self._attachment = None

    def _seed(self) -> int:
        if self._options.exists("random_seed"):
            return int(self._options.random_seed)
        return torch.initial_seed()

    def destroy(self) -> None:
        """Fetch the weights, then drop the executable and free the IPUs.

        Does nothing before the first compilation, as in PopTorch: a training model
        that never ran keeps its module wrapped.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference(torch.ones(4, 2)).shape
            torch.Size([4, 1])
            >>> inference.destroy()
            >>> inference(torch.ones(1, 2)).shape
            torch.Size([1, 1])
        """
        if not self.isCompiled():
            return
        if self.isAttachedToDevice():
            self.detachFromDevice()
        self._program = self._compiled_arguments = None
        if self._wrapping is not None:
            self._wrapping.undo()
            self._wrapping = None
