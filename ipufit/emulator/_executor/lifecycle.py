# SPDX-License-Identifier: Apache-2.0
"""The life of an executor: compile, attach, detach, destroy."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from typing import Any

import torch

from ipufit.emulator._device.attachment import Attachment
from ipufit.emulator._executor.constraints import check_program
from ipufit.emulator._executor.executable_cache import check_executable_cache
from ipufit.emulator._executor.observation import Observation
from ipufit.emulator._executor.rng_state import RngState
from ipufit.emulator._executor.wrapper_registry import (
    is_wrapped,
    unwrap_model,
    unwrapped,
)
from ipufit.emulator._executor.wrapping import wrap_module
from ipufit.emulator._folding.folding import Folding
from ipufit.emulator._ground.switches import compiles
from ipufit.emulator._layout.layout import Layout
from ipufit.emulator._layout.pod import Lease
from ipufit.emulator._layout.replica_groups import one_element_each
from ipufit.emulator._ops.floating_point import checked, stops_at_exceptions
from ipufit.emulator._optimizers.optimizers import SGD
from ipufit.emulator._options.popart_keys import validate_popart_options
from ipufit.emulator._program.anchors import add_anchors
from ipufit.emulator._program.args import CallArguments, check_inputs
from ipufit.emulator._program.program import micro_batch, trace
from ipufit.emulator._tracing.weights import named_weights
from ipufit.emulator._update.optimizer_link import OptimizerLink
from ipufit.emulator.enums import ConnectionType
from ipufit.emulator.errors import createPoptorchError

logger = logging.getLogger("poptorch::python")


class Lifecycle(RngState, Observation):
    """What `PoplarExecutor` is, without its calls."""

    def _start_training(self, optimizer: torch.optim.Optimizer | None) -> None:
        optimizer = optimizer or SGD(self._user_model.parameters(), lr=0.01)
        self._optimizer_link = OptimizerLink(optimizer, self._options)
        self._follow(optimizer)
        self._use_running_mean_if_needed()
        wrap_module(self._user_model, self)

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
        if self._options.connection_type == ConnectionType.OnDemand:
            self.attachToDevice()

    def _compile(self, arguments: CallArguments) -> None:
        start = time.perf_counter()
        check_executable_cache(self._options)
        check_inputs(arguments.tensors())
        layout = Layout.from_options(self._options)
        with torch.inference_mode(False):
            example = micro_batch(arguments, layout.input_blocks, layout.describe())
            rows = example.with_tensors(tensor.clone() for tensor in example.tensors())
        with unwrapped(self._model):
            self._make_executable(arguments, example, layout)
        self._compiled_arguments, self._compiled_rows = arguments.like_meta(), rows
        try:
            if self._options.connection_type == ConnectionType.Always:
                self.attachToDevice()
        except Exception:
            self._forget_program()
            raise
        self._compilation_time = datetime.timedelta(seconds=time.perf_counter() - start)

    def _make_executable(
        self, arguments: CallArguments, example: CallArguments, layout: Layout
    ) -> None:
        groups = self._grouped_parameters.resolve(self._model, layout.replicas)
        with one_element_each(self._model, groups):
            program = trace(
                self._model,
                example,
                strategy=self._options._execution_strategy,
                is_training=self._training,
                names_modules=self._options._module_namescope_enabled,
            )
        validate_popart_options(self._options.toDict())
        target = check_program(
            program, layout, self._options, is_training=self._training
        )
        self._check_updatable_buffers()
        self._host_weights = {
            # Integer weights are compiled in: changes neither arrive nor come back.
            name: weight if weight.is_floating_point() else weight.detach().clone()
            for name, weight in named_weights(self._model).items()
        }
        if self._optimizer_link is not None:
            self._optimizer_link.check_groups(self._host_weights)
        names = self._names_of(program)
        anchors = add_anchors(program, self._options, names)
        if stops_at_exceptions(self._options):
            program = dataclasses.replace(program, graph=checked(program.graph))
        folding = Folding.of(program, layout, self._options, groups)
        code = None
        if compiles():
            # Loaded where it is asked for: a subsystem that most processes don't use.
            from ipufit.emulator._machine_code.translation import machine_code

            with torch.inference_mode(False):
                code = machine_code(
                    program,
                    arguments.tensors(),
                    layout,
                    self._options,
                    anchors,
                    self._host_weights,
                    groups,
                    folding,
                    self._optimizer_link,
                )
        self._tensor_names, self._anchors, self._anchored = names, anchors, {}
        self._times = None
        self._executable, self._target = program, target
        self._replica_groups = groups
        self._folding, self._code = folding, code

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
        program, target = self._require_compiled(), self._target
        if target is None or target.is_offline:
            raise AssertionError(
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
        if self.isAttachedToDevice():
            raise createPoptorchError("Device is already attached")
        with self._found_host_weights():
            self._attachment = Attachment(
                Lease(self, target.num_ipus, target.first_ipu),
                program,
                self._anchors,
                self._options,
                self._host_weights,
                self._replica_groups,
                self._folding,
                self._code,
                self._start_rng(),
                self._optimizer_link,
            )
        try:
            self._read_optimizer()
            self._optimizer_was_attached()
        except Exception:
            self._release_device()
            raise

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
        self._save_rng_state()
        self.copyWeightsToHostIfNeeded()
        self._read_optimizer_state()
        self._release_device()

    def _release_device(self) -> None:
        if self._attachment is not None:
            self._attachment.end()
            self._attachment = None
            logger.debug("Detached from device")
        self._drop_rng()

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
        self.copyWeightsToHostIfNeeded()
        self._read_optimizer()
        self._release_device()
        self._forget_program()
        if not self._training:
            return
        if not is_wrapped(self._user_model):
            raise createPoptorchError("model was never wrapped")
        unwrap_model(self._user_model)

    def _forget_program(self) -> None:
        self._executable = self._compiled_arguments = self._compiled_rows = None
        self._times = self._code = None
        if self._optimizer_link is not None:
            self._optimizer_link.forget()
