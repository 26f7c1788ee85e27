# SPDX-License-Identifier: Apache-2.0
"""What `trainingModel` and `inferenceModel` return: a module on the device.

A `PoplarExecutor` lives as PopTorch's does: the first call traces and compiles, an
attached executor holds IPUs and the only up-to-date weights, and weights move to the
host when somebody reads them, on detach, or on request.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from typing import Any

import torch
from torch import Tensor

from ._args import ArgsParser, CallArguments, check_inputs
from ._constraints import check_inference_options, check_program
from ._device import (
    DeviceRng,
    DeviceWeights,
    GradientReduction,
    run_inference,
    run_training,
)
from ._layout import Layout, Outputs
from ._optimizer_link import OptimizerLink
from ._pod import Lease
from ._popart_keys import validate_popart_options
from ._program import Program, micro_batch, named_weights, trace
from ._wrapping import Wrapping, is_wrapped
from .enums import (
    CommGroupType,
    ConnectionType,
    MeanReductionStrategy,
    OutputMode,
    ReductionType,
)
from .errors import createPoptorchError
from .optim import SGD
from .options import Options

logger = logging.getLogger("poptorch::python")

_NOT_COMPILED = "Model has not been compiled or has been destroyed."


class PoplarExecutor:
    """A module that runs on the device; made by `trainingModel` or `inferenceModel`.

    Attributes that it doesn't have itself are those of the user's module.

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
        self._weights: DeviceWeights | None = None
        self._lease: Lease | None = None
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

    def __getattr__(self, name: str) -> Any:
        """Attributes of the user's module."""
        if name in ("_user_model", "_model"):  # not set yet: a failed construction
            raise AttributeError(name)
        return getattr(self._user_model, name)

    def __repr__(self) -> str:
        """As the module."""
        return repr(self._user_model)

    @property
    def model(self) -> torch.nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options of this executor, a clone of those given."""
        return self._options

    def isCompiled(self) -> bool:
        """Whether there is an executable."""
        return self._program is not None

    def isAttachedToDevice(self) -> bool:
        """Whether it holds IPUs."""
        return self._weights is not None

    def compilationTime(self) -> datetime.timedelta:
        """How long the last compilation took.

        Raises:
            Error: Not compiled, or `showCompilationProgressBar(False)`.
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
            raise createPoptorchError(_NOT_COMPILED)
        return self._program

    # Compile ------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Trace and compile for arguments like these, without running them."""
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
        layout = self._layout()
        example = micro_batch(arguments, layout.input_blocks, layout.describe())
        program = trace(
            self._model,
            example,
            strategy=self._options._execution_strategy,
            is_training=self._training,
        )
        validate_popart_options(self._options.toDict())
        check_program(program, layout, self._options, is_training=self._training)
        self._host_weights = named_weights(self._model)
        if self._optimizer_link is not None:
            self._optimizer_link.check_groups(self._host_weights)
        self._program = program
        self._compiled_arguments = arguments.like_meta()
        try:
            if self._options.connection_type == ConnectionType.Always:
                self.attachToDevice()
        except Exception:
            self._program = self._compiled_arguments = None
            raise
        self._compilation_time = datetime.timedelta(seconds=time.perf_counter() - start)

    def _layout(self) -> Layout:
        options = self._options
        return Layout(
            device_iterations=options.device_iterations,
            gradient_accumulation=options.Training.gradient_accumulation,
            replicas=options.replication_factor,
            input_groups=options.replication_factor // options.input_group_size,
            is_orthogonal=options.input_cgt == CommGroupType.Orthogonal,
        )

    # Devices ------------------------------------------------------------------

    def attachToDevice(self) -> None:
        """Acquire IPUs and upload weights and optimiser state.

        Raises:
            Error: Not compiled, attached already, or there are not enough IPUs.
            AssertionError: The connection type is `Never`.
        """
        program = self._require_compiled()
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
        if self.isAttachedToDevice():
            raise createPoptorchError("Device is already attached")
        replicas = self._options.replication_factor
        first = self._options.ipu_id if self._options.exists("ipu_id") else None
        self._lease = Lease(self, program.num_ipus * replicas, first)
        self._weights = DeviceWeights(program, self._host_weights, replicas)
        if self._rng is None:
            self._rng = DeviceRng(self._seed())
        if self._optimizer_link is not None:
            self._optimizer_link.attach(self._weights.trained, self._host_weights)

    def detachFromDevice(self) -> None:
        """Save weights, optimiser and random state, and release the IPUs.

        Raises:
            Error: Not compiled, or not attached.
        """
        self._require_compiled()
        if not self.isAttachedToDevice():
            raise createPoptorchError("Device is not attached")
        self.copyWeightsToHostIfNeeded()
        if self._optimizer_link is not None:
            self._optimizer_link.detach()
        self._weights = None
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def _seed(self) -> int:
        if self._options.exists("random_seed"):
            return int(self._options.random_seed)
        return torch.initial_seed()

    def destroy(self) -> None:
        """Fetch the weights, then drop the executable and free the IPUs.

        Does nothing before the first compilation, as in PopTorch: a training model
        that never ran keeps its module wrapped.
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
        """
        self._require_compiled()
        self._dirty_host_weights = False
        if self._weights is not None:
            self._weights.download(self._host_weights)
        self._host_weights_version += 1

    def copyWeightsToHostIfNeeded(self) -> bool:
        """`copyWeightsToHost()` if training made the host's copy stale."""
        if not self._dirty_host_weights:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; what the device has learnt since is lost.

        Raises:
            Error: Not compiled.
        """
        self._require_compiled()
        self._dirty_host_weights = False
        if self._weights is not None:
            self._weights.upload(self._host_weights)
            if self._optimizer_link is not None:
                self._optimizer_link.weights_were_uploaded()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """`Module.load_state_dict`, and an upload if attached."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    # Optimiser ----------------------------------------------------------------

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of `optimizer`; its state stays on the device.

        Call it after every change to a learning rate or another value. A new
        optimizer object without loaded state keeps the state that the device has.

        Args:
            optimizer: Of the type that the model was compiled with.

        Raises:
            Error: A constant, the type or the clip norm changed after compilation.
        """
        if self._optimizer_link is None:
            raise AttributeError("An inference model has no optimizer to set.")
        self._optimizer_link.set(optimizer, is_compiled=self.isCompiled())
        self._use_running_mean_if_needed()

    # Run ----------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: `deviceIterations` times all accumulated micro-batches.

        Args:
            *args: As `forward` takes them, with `D * G * R` micro-batches in dim 0
                of every tensor, laid out `[D, G, R, B]`.
            **kwargs: The same by name.

        Returns:
            What `forward` returned when it was traced, its tensors replaced by
            the results that the output mode selects.

        Raises:
            AssertionError: The connection type is `Never`, or a batch dimension is
                not a multiple of `D * G * R`.
            Error: The arguments differ from those compiled for; or any reason for
                which compilation fails.
        """
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): "
                "use model.compile(inputs) instead of model(inputs)"
            )
        arguments = self._parser.parse(args, kwargs, is_compiling=not self.isCompiled())
        if not self.isCompiled():
            self._compile(arguments)
        if not self.isAttachedToDevice():
            self.attachToDevice()
        if not self._training:
            self._fetch_from_trainer()
        outputs = self._run(arguments)
        if self._training:
            self._dirty_host_weights = True
        for tensor in outputs:
            tensor.backward = _refuse_backward  # type: ignore[method-assign]
        return self._require_compiled().rebuild_outputs(outputs)

    def _run(self, arguments: CallArguments) -> list[Tensor]:
        program, weights = self._program, self._weights
        compiled = self._compiled_arguments
        if program is None or weights is None or compiled is None or self._rng is None:
            raise createPoptorchError(_NOT_COMPILED)
        self._parser.validate(compiled, arguments)
        layout = self._layout()
        inputs = arguments.tensors(like=compiled)
        outputs = Outputs(
            layout,
            OutputMode(self._options.output_mode),
            self._options.output_return_period,
            program.constant_outputs,
        )
        with self._rng if program.is_random else contextlib.nullcontext():
            if self._optimizer_link is None:
                run_inference(program, weights, layout, inputs, outputs)
            else:
                self._optimizer_link.upload_loaded_state()
                run_training(
                    program,
                    weights,
                    layout,
                    inputs,
                    outputs,
                    self._optimizer_link.device_optimizer,
                    self._reduction(layout, self._optimizer_link.settings.loss_scaling),
                )
                self._optimizer_link.was_stepped()
        return outputs.tensors()

    def _reduction(self, layout: Layout, loss_scaling: float) -> GradientReduction:
        training = self._options.Training
        kind = training.accumulation_and_replication_reduction_type
        strategy = training.meanAccumulationAndReplicationReductionStrategy
        is_mean = kind == ReductionType.Mean
        return GradientReduction(
            divisor=layout.gradient_accumulation * layout.replicas if is_mean else 1,
            is_running=strategy == MeanReductionStrategy.Running,
            loss_scaling=loss_scaling,
        )

    def _fetch_from_trainer(self) -> None:
        """Bring in what a training executor of the same module has learnt."""
        trainer: Any = self._user_model
        if not is_wrapped(trainer):
            return
        trainer.copyWeightsToHostIfNeeded()
        version = trainer._host_weights_version
        if version is not None and version != self._trainer_version_seen:
            self.copyWeightsToDevice()
            self._trainer_version_seen = version


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model: a "
        "training model runs the backward pass itself, from the loss in its forward."
    )
