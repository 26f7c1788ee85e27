# SPDX-License-Identifier: Apache-2.0
"""The life of an executor: wrap, compile, attach, detach, destroy.

An attached executor holds IPUs and the only up-to-date weights. They move to the
host when somebody reads them, on detach, or on request.
"""

from __future__ import annotations

import datetime
import logging
import time
from typing import Any

import torch
from torch import Tensor

from ._args import ArgsParser, CallArguments, check_inputs
from ._attachment import Attachment
from ._constraints import check_inference_options, check_program
from ._device import DeviceRng
from ._layout import Layout
from ._optimizer_link import OptimizerLink
from ._popart_keys import validate_popart_options
from ._program import Program, micro_batch, trace
from ._tracing import named_weights
from ._wrapping import Wrapping, is_wrapped
from .enums import ConnectionType, MeanReductionStrategy, OutputMode
from .errors import createPoptorchError
from .optim import SGD
from .options import Options

logger = logging.getLogger("poptorch::python")

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class Lifecycle:
    """What `PoplarExecutor` is, without its calls.

    Args:
        model: The object that is traced.
        options: Frozen and cloned.
        training: Whether calls update the weights.
        poptorch_version: Kept for PopTorch's signature; unused.
        optimizer: Of a training model.
        user_model: The module whose weights are kept in step, if it is not `model`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options | None,
        training: bool,
        poptorch_version: str | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: torch.nn.Module | None = None,
    ) -> None:
        if options and not isinstance(options, Options):
            raise createPoptorchError(
                f"Invalid type: 'options' is of type {type(options)}, expected "
                "poptorch.Options."
            )
        options = options or Options()
        options._freeze()
        self._options = options.clone()
        self._model = model
        self._user_model = user_model if user_model is not None else model
        self._training = training
        self._program: Program | None = None
        self._compiled_arguments: CallArguments | None = None
        self._compilation_time = datetime.timedelta()
        self._host_weights: dict[str, Tensor] = {}
        self._attachment: Attachment | None = None
        self._rng: DeviceRng | None = None
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._trainer_version_seen: int | None = None
        self._wrapping: Wrapping | None = None
        self._optimizer_link: OptimizerLink | None = None
        self._parser = ArgsParser(model.forward)
        self._resolve_output_mode()
        if training:
            self._start_training(optimizer)
        else:
            check_inference_options(self._options)
        self._options._freeze()

    # Construction -------------------------------------------------------------

    def _resolve_output_mode(self) -> None:
        if self._options.defaultOutputMode():
            self._options.outputMode(
                OutputMode.Final if self._training else OutputMode.All
            )

    def _start_training(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer_link = OptimizerLink(
            optimizer or SGD(self._user_model.parameters(), lr=0.01),
            relax_attribute_checks=self._options._relax_optimizer_checks,
        )
        self._use_running_mean_if_needed()
        self._wrapping = Wrapping(self._user_model, self)

    def _use_running_mean_if_needed(self) -> None:
        running = MeanReductionStrategy.Running
        training = self._options.Training
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        link = self._optimizer_link
        if link is None or not link.settings.uses_running_mean or strategy == running:
            return
        if self.isCompiled():
            raise ValueError(
                "An optimizer with a 16-bit accum_type needs "
                "MeanReductionStrategy.Running, but the executable is already compiled."
            )
        self._options._unfreeze()
        training.setMeanAccumulationAndReplicationReductionStrategy(running)
        self._options._freeze()

    # What it is ---------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module:
        """The user's module.

        Example:
            >>> from ipufit.emulator import trainingModel
            >>> module = torch.nn.Linear(2, 1)
            >>> trainingModel(module).model is module
            True
        """
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options of this executor, a clone of those given.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).options.replication_factor
            1
        """
        return self._options

    def isCompiled(self) -> bool:
        """Whether there is an executable.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).isCompiled()
            False
        """
        return self._program is not None

    def isAttachedToDevice(self) -> bool:
        """Whether it holds IPUs.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.isAttachedToDevice()
            True
        """
        return self._attachment is not None

    def compilationTime(self) -> datetime.timedelta:
        """How long the last compilation took.

        Returns:
            The time, that of tracing included.

        Raises:
            Error: Not compiled, or `showCompilationProgressBar(False)`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.compilationTime() > datetime.timedelta()
            True
        """
        self._require_compiled()
        if not self._options._show_compilation_progress_bar:
            raise createPoptorchError(
                "The compilation time is measured by the progress bar, which "
                "Options.showCompilationProgressBar(False) disabled."
            )
        return self._compilation_time

    def _require_compiled(self) -> Program:
        if self._program is None:
            raise createPoptorchError(NOT_COMPILED)
        return self._program

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

    # Weights ------------------------------------------------------------------

    def copyWeightsToHost(self) -> None:
        """Write the device's weights into the user's module.

        Raises:
            Error: Not compiled.

        Example:
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
        if self._attachment is not None:
            self._attachment.download()
        self._host_weights_version += 1

    def copyWeightsToHostIfNeeded(self) -> bool:
        """`copyWeightsToHost()` if training made the host's copy stale.

        Returns:
            Whether there was something to copy.

        Example:
            >>> from ipufit.emulator import trainingModel
            >>> trainingModel(torch.nn.Linear(2, 1)).copyWeightsToHostIfNeeded()
            False
        """
        if not self._dirty_host_weights:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; what the device has learnt since is lost.

        Raises:
            Error: Not compiled.

        Example:
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
        if self._attachment is not None:
            self._attachment.upload()
