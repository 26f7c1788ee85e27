# SPDX-License-Identifier: Apache-2.0
"""PopTorch's `PoplarExecutor`: the public methods, and the parts that do the work."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence, TypeVar

import torch
from torch import Tensor

from ipufit.emulator._executor.executable import Executable
from ipufit.emulator._executor.executable_file import PathLike
from ipufit.emulator._executor.lifecycle import Lifecycle
from ipufit.emulator._executor.measurements import Measurements
from ipufit.emulator._executor.model_state import NOT_COMPILED, ModelState
from ipufit.emulator._executor.observation import Observation
from ipufit.emulator._executor.optimizer_sync import OptimizerSync, follow_device
from ipufit.emulator._executor.parameter_view import ParameterView
from ipufit.emulator._executor.printing import module_repr
from ipufit.emulator._executor.random_state import RandomState
from ipufit.emulator._executor.saving import Saving
from ipufit.emulator._executor.weights_to_device import WeightsToDevice
from ipufit.emulator._executor.weights_to_host import WeightsToHost
from ipufit.emulator._executor.wrapping import wrap_module
from ipufit.emulator._optimizers.optimizers import SGD
from ipufit.emulator._options.options import Options
from ipufit.emulator.enums import ConnectionType
from ipufit.emulator.errors import createPoptorchError

_Result = TypeVar("_Result")


def _of_part(name: str, method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a method of the executor that calls, and documents, one of a part."""

    @functools.wraps(method)
    def call(executor: PoplarExecutor, *args: Any, **kwargs: Any) -> _Result:
        return method(getattr(executor, name), *args, **kwargs)

    return call


class PoplarExecutor:
    """A module that runs on the device; made by `trainingModel` or `inferenceModel`.

    Attributes that it doesn't have itself are those of the user's module.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> executor = inferenceModel(torch.nn.Linear(2, 3).eval())
        >>> executor(torch.ones(1, 2)).shape, executor.training
        (torch.Size([1, 3]), False)

    Args:
        model: The module that is traced.
        options: Frozen, and cloned for the executor; defaults for None.
        training: Whether calls update the weights.
        poptorch_version: Kept for PopTorch's signature; unused.
        optimizer: For training; by default SGD with a learning rate of 0.01.
        user_model: The module whose weights are updated; by default `model`.
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
        user_model = user_model if user_model is not None else model
        if not training:
            optimizer = None
        elif optimizer is None:
            optimizer = SGD(user_model.parameters(), lr=0.01)
        state = ModelState(model, user_model, options, is_training=training)
        to_host = WeightsToHost(state)
        sync = OptimizerSync(state, to_host, optimizer)
        random = RandomState(state.options)
        lifecycle = Lifecycle(state, to_host, sync, random)
        self._state = state
        self._to_host = to_host
        self._to_device = WeightsToDevice(state, to_host, sync)
        self._optimizer = sync
        self._random = random
        self._measurements = Measurements(state)
        self._observation = Observation(state)
        self._lifecycle = lifecycle
        self._saving = Saving(state, lifecycle, to_host, sync, random)
        # Scripts written for PopTorch read these.
        self._model = model
        self._user_model = user_model
        self._training = training
        self._options = state.options
        if optimizer is not None:
            follow_device(optimizer, self._optimizer_state_dict)
            wrap_module(user_model, self)

    @property
    def _executable(self) -> Executable | None:  # lightning-graphcore reads it
        return self._state.executable

    @property
    def _dirty_host_weights(self) -> bool:
        return self._to_host.is_stale

    @property
    def _host_weights_version(self) -> Any:
        return self._to_host.version

    def __getattr__(self, name: str) -> Any:
        """Get an attribute of the user's module."""
        if name in ("_user_model", "_model"):  # not set yet: a failed construction
            raise AttributeError(name)
        value = getattr(self._user_model, name)
        if isinstance(value, torch.nn.Parameter):
            return ParameterView(value, self._state)
        return value

    def __repr__(self) -> str:
        """Describe the module, with the places where blocks begin."""
        return module_repr(self._user_model)

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

    # Run ----------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call: `deviceIterations` times all accumulated micro-batches.

        Args:
            *args: As `forward` takes them, with `D * G * R` micro-batches in dim 0
                of every tensor, laid out `[D, G, R, B]`.
            **kwargs: The same by name.

        Returns:
            The structure that `forward` returned when it was traced, with the results
            that the output mode selects. These tensors can't be pickled, because they
            refuse `backward()`; their clones can.

        Raises:
            AssertionError: The connection type is `Never`, or a batch dimension is
                not a multiple of `D * G * R`.
            Error: The arguments differ from those compiled for, or compiling fails.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().deviceIterations(2).replicationFactor(2)
            >>> inference = inferenceModel(torch.nn.Linear(2, 1), options)
            >>> inference(torch.ones(4, 2)).shape
            torch.Size([4, 1])
            >>> inference(torch.ones(6, 2)).shape
            Traceback (most recent call last):
                ...
            ipufit.emulator.errors.Error: 'poptorch_py_error': Shape mismatch for ...
        """
        if self._options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): "
                "use model.compile(inputs) instead of model(inputs)"
            )
        state, arguments, tensors = self._state, None, None
        if state.executable is not None and not kwargs:
            tensors = state.parser.plain_tensors(args, state.executable.arguments)
        if tensors is None:
            is_compiling = state.executable is None
            arguments = state.parser.parse(args, kwargs, is_compiling=is_compiling)
            if is_compiling:
                self._lifecycle.compile_for(arguments)
        if state.attachment is None:
            self._lifecycle.attachToDevice()
        if not self._training:
            self._to_device.follow_training()
        executable = state.require_compiled()
        if arguments is not None:
            state.parser.validate(executable.arguments, arguments)
            tensors = arguments.tensors(like=executable.arguments)
        self._optimizer.write_state()
        outputs = executable.program.device_outputs(self._run(tensors or []))
        _refuse_backward(outputs)
        return executable.program.rebuild_outputs(outputs)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        attachment = self._state.attachment
        if attachment is None:
            raise createPoptorchError(NOT_COMPILED)
        # Before the run: one that fails midway has made updates too.
        self._random.is_stale = True
        if self._training:
            self._to_host.is_stale = True
            self._optimizer.note_update()
        results = self._state.last_call = attachment.run(tensors)
        return results.outputs

    # Compile, attach, destroy -------------------------------------------------

    isCompiled = _of_part("_state", ModelState.isCompiled)
    isAttachedToDevice = _of_part("_state", ModelState.isAttachedToDevice)
    compile = _of_part("_lifecycle", Lifecycle.compile)
    attachToDevice = _of_part("_lifecycle", Lifecycle.attachToDevice)
    detachFromDevice = _of_part("_lifecycle", Lifecycle.detachFromDevice)
    destroy = _of_part("_lifecycle", Lifecycle.destroy)

    # Weights, optimiser, random state -----------------------------------------

    copyWeightsToHost = _of_part("_to_host", WeightsToHost.copyWeightsToHost)
    copyWeightsToHostIfNeeded = _of_part(
        "_to_host", WeightsToHost.copyWeightsToHostIfNeeded
    )
    copyWeightsToDevice = _of_part("_to_device", WeightsToDevice.copyWeightsToDevice)
    copyNamedBuffersToDevice = _of_part(
        "_to_device", WeightsToDevice.copyNamedBuffersToDevice
    )
    load_state_dict = _of_part("_to_device", WeightsToDevice.load_state_dict)

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of `optimizer`; its state stays on the device.

        Call it after every change to a learning rate or another value. A new
        optimizer object without loaded state keeps the state that the device has.

        Args:
            optimizer: An optimiser of the type that the model was compiled with.

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
        self._optimizer.set(optimizer, self._optimizer_state_dict)

    def _optimizer_state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    @property
    def rng_state(self) -> list[int] | None:
        """The random state of the device: the seed, then the generator's state.

        Setting it continues elsewhere; a list of a seed alone begins at that seed.
        It is kept while the model is detached. After `destroy()` the next compilation
        begins with the state that was read, set, saved by `detachFromDevice()` or
        given by `Options.randomSeed` last.

        It is None before the first call of a model whose options have no seed.

        Raises:
            Error: Not compiled.
            ValueError: The value that is set isn't a random state.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> dropout = torch.nn.Dropout()
            >>> inference = inferenceModel(dropout, Options().randomSeed(42))
            >>> inference.compile(torch.ones(8))
            >>> inference.rng_state
            [42]
            >>> first = inference(torch.ones(8))
            >>> inference.rng_state = [42]
            >>> torch.equal(inference(torch.ones(8)), first)
            True
        """
        self._state.require_compiled()
        return self._random.read()

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        self._state.require_compiled()
        self._random.set(state)

    # Tensors and times of the last call ---------------------------------------

    getTensorNames = _of_part("_observation", Observation.getTensorNames)
    getAnchoredTensor = _of_part("_observation", Observation.getAnchoredTensor)
    compilationTime = _of_part("_measurements", Measurements.compilationTime)
    cycleCount = _of_part("_measurements", Measurements.cycleCount)
    getPerfCounters = _of_part("_measurements", Measurements.getPerfCounters)
    getHostIpuLatency = _of_part("_measurements", Measurements.getHostIpuLatency)
    getComputeLatency = _of_part("_measurements", Measurements.getComputeLatency)
    getIpuHostLatency = _of_part("_measurements", Measurements.getIpuHostLatency)
    getLatency = _of_part("_measurements", Measurements.getLatency)

    # Files --------------------------------------------------------------------

    save = _of_part("_saving", Saving.save)

    def compileAndExport(
        self, filename: PathLike, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """`compile`, then `save`.

        An offline model (`ConnectionType.Never`) can be exported too.

        Args:
            filename: As for `save`.
            *args: As for a call.
            export_model: Whether module, options and optimiser are saved too.
            **kwargs: As for a call.

        Raises:
            AssertionError: As from `compile`.
            Error: As from `compile` and `save`.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import Options, inferenceModel, load
            >>> offline = Options().useOfflineIpuTarget()
            >>> inference = inferenceModel(torch.nn.Linear(2, 1), offline)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "linear.poptorch")
            ...     inference.compileAndExport(path, torch.ones(4, 2))
            ...     load(path)(torch.ones(4, 2)).shape
            torch.Size([4, 1])
        """
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    loadExecutable = _of_part("_saving", Saving.loadExecutable)


def _refuse_backward(outputs: list[Tensor]) -> None:
    """Give each output a `backward` that raises an error.

    It is a local function so that outputs can't be pickled, as in PopTorch. Tensors
    that are computed from them can, such as `output.clone()`.
    """

    def refuse() -> None:
        raise createPoptorchError(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If "
            "you're using a trainingModel, the backwards pass is performed "
            "automatically when invoking the model. If you're using an "
            "inferenceModel, you should use a trainingModel instead."
        )

    for tensor in outputs:
        tensor.backward = refuse  # type: ignore[method-assign, assignment]
