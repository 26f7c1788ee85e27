# SPDX-License-Identifier: Apache-2.0
"""PopTorch's `PoplarExecutor`: compile, attach, call, copy weights, save."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import io
import json
import os
import zipfile

# The functions of `signal` take 20 times as long: they make enums of all they return.
from _signal import getsignal  # type: ignore[import-not-found,unused-ignore]
from _signal import signal as set_handler
from signal import SIGINT, default_int_handler, raise_signal
from time import perf_counter
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

import torch
from torch import Tensor

from . import _impl as wrapping
from ._args_parser import ArgsParser, CallArguments, check_inputs, micro_batch
from ._files import new_file, open_regular
from ._logging import logger
from ._processes import Processes, broadcast_weights, check_agreement, join_processes
from ._switches import __version__
from .core.anchors import add_anchors, named_nodes, resolve_modes, weight_tensor_names
from .core.compile import trace
from .core.device import CallResults, Device, DeviceRng, Executable, check_rng_state
from .core.device_optimizer import NOT_COMPILED, DeviceOptimizer
from .core.float16 import device_tensor
from .core.fold import choose_runner
from .core.layout import Grouping, Layout, hold_one_element, resolve_groupings
from .core.pipelines import LOWERING_CHECKS, SESSION_CHECKS, check_updatable_buffers
from .core.pod import lease, reserved_ipus
from .core.recording import Substitutions as _OverwriteContextManager  # noqa: F401 - PopTorch Geometric registers substitutions
from .core.recording import is_learned, named_weights, unchanged
from .core.refusals import (
    refuse_lazy,
    refuse_scripted,
    refuse_tied_buffers,
    refuse_weights,
)
from .enums import CommGroupType, ConnectionType, OutputMode, VariableRetrievalMode
from .errors import Error, createPoptorchError, require
from .ops import module_repr
from .optim import SGD
from .options import Options, Settings, is_pipelined

PerfCounters = Dict[str, List[List[float]]]
Latency = Tuple[float, float, float]

_COUNTERS = ("input", "input_complete", "output", "output_complete")


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Let Ctrl-C wait for the end of this context, so that the device's work is whole.

    PopTorch works in C++, and Python hears of a signal later. A second one doesn't
    wait. A handler other than Python's own is left alone.
    """
    is_interrupted = False

    def wait(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    is_waiting = getsignal(SIGINT) is default_int_handler
    try:
        if is_waiting:
            set_handler(SIGINT, wait)
    except ValueError:  # another thread than the main one
        is_waiting = False
    try:
        yield
    finally:
        if is_waiting:
            set_handler(SIGINT, default_int_handler)
        if is_interrupted:
            raise_signal(SIGINT)


class PoplarExecutor:
    """Runs a module on the device; made by `trainingModel` or `inferenceModel`.

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
        # Scripts written for PopTorch read these.
        self._model = model
        self._user_model = user_model
        self._training = training
        self._options = _own_options(options, is_training=training)
        self._executable: Executable | None = None
        self._dirty_host_weights = False
        self._host_weights_version: Any = 0  # counts the copies to the host

        self._parser = ArgsParser(model.forward)
        self.per_replica_params: dict[str, Any] = {}  # arguments of replicaGrouping
        self._device: Device | None = None
        self._joined: Executable | None = None  # other processes have it, too
        self._last_call: CallResults | None = None
        self._compilation_time = datetime.timedelta()
        self._rng_state: list[int] | None = None
        if self._options.exists("random_seed"):
            self._rng_state = [self._options.random_seed]
        self._is_rng_state_old = False  # the device has run since it was read
        if training and optimizer is None:
            optimizer = SGD(user_model.parameters(), lr=0.01)
        self._optimizer: DeviceOptimizer | None = None
        if training and optimizer is not None:
            self._optimizer = DeviceOptimizer(
                optimizer,
                self._options,
                is_compiled=self.isCompiled,
                download_weights=self.copyWeightsToHostIfNeeded,
            )
            wrapping.wrap_module(user_model, self)

    def __getattr__(self, name: str) -> Any:
        if name in ("_user_model", "_model"):
            # Not set yet: `copy` and `pickle` make an executor without attributes, and
            # ask it for `__setstate__`. PopTorch's `__getattr__` calls itself then.
            raise RecursionError(
                "A model wrapped by PopTorch can't be copied or pickled. Copy its "
                "module, for example `copy.deepcopy(executor.model)`, and wrap the "
                "copy; save() writes the compiled model to a file."
            )
        value = getattr(self._user_model, name)
        if isinstance(value, torch.nn.Parameter):
            return ParameterView(value, self)
        return value

    def __repr__(self) -> str:
        """Describe the module, and where its blocks begin."""
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
        """The frozen options of this executor, a clone of those it was given.

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
        if (
            self._device is None
            and self._options.connection_type == ConnectionType.Never
        ):
            raise AssertionError(
                "Trying to run a model on an offline device (ConnectionType.Never): "
                "use model.compile(inputs) instead of model(inputs)"
            )
        executable = self._executable
        if executable is None:
            executable = self._compile(args, kwargs)
        tensors = self._parser.tensors(args, kwargs, executable.arguments)
        if self._device is None:
            self.attachToDevice()
        device = self._require_device("__call__")
        if not self._training:
            self._follow_training()
        # Before the run: a call that fails midway has made updates too.
        self._is_rng_state_old = True
        if self._optimizer is not None:
            self._optimizer.begin_call()
            self._dirty_host_weights = True
        with working():
            self._last_call = device.run(tensors)
        return executable.program.outputs(self._last_call.outputs)

    # Compile, attach, destroy -------------------------------------------------

    def isCompiled(self) -> bool:
        """Return whether there is an executable.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inferenceModel(torch.nn.Linear(2, 1)).isCompiled()
            False
        """
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        """Return whether the executor holds IPUs.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.isAttachedToDevice()
            True
        """
        return self._device is not None

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
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(4, 2))
            >>> inference.isCompiled()
            True
        """
        if self.isCompiled():
            self._parser.parse(args, kwargs)
            logger.warning(
                "Call to compile() ignored: the executable is already compiled"
            )
            return
        self._compile(args, kwargs)
        if self._options.connection_type == ConnectionType.OnDemand:
            self.attachToDevice()

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        arguments = self._parser.parse(args, kwargs)
        if any(isinstance(value, dict) for value in (*args, *kwargs.values())):
            logger.warning(
                "Dictionaries as arguments of a model have partial support: their keys "
                "and values other than tensors are constants of the compiled model."
            )
        start = perf_counter()
        executable = self._executable = compile_model(
            self._model,
            self._options,
            arguments,
            self.per_replica_params,
            self._optimizer,
        )
        self._last_call = None
        try:
            if self._options.connection_type == ConnectionType.Always:
                self.attachToDevice()
        except Exception:
            self._forget_program()
            raise
        self._compilation_time = datetime.timedelta(seconds=perf_counter() - start)
        return executable

    def _require_compiled(self) -> Executable:
        if self._executable is None:
            raise createPoptorchError(NOT_COMPILED)
        return self._executable

    @working()
    def attachToDevice(self) -> None:
        """Acquire IPUs and upload weights and optimizer state.

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
        executable, options = self._require_compiled(), self._options
        if options.connection_type == ConnectionType.Never:
            raise AssertionError(
                "Trying to attach to an offline device (ConnectionType.Never)"
            )
        if self._device is not None:
            raise createPoptorchError("Device is already attached")
        with self._host_weights():
            processes = self._join_processes(executable)
            distributed = options.Distributed
            index = distributed.processId if distributed.numProcesses > 1 else 0
            rng = DeviceRng(torch.initial_seed(), index)
            if self._rng_state is not None:
                rng.restore(self._rng_state)
            first_ipu = options.ipu_id if options.exists("ipu_id") else None
            ipus = lease(self, executable.num_ipus, first_ipu)
            self._device = Device(
                executable, options, ipus, rng, self._optimizer, processes
            )
        try:
            if self._optimizer is not None:
                self._optimizer.start()
        except Exception:
            self._release_device()
            raise

    def _join_processes(self, executable: Executable) -> Processes | None:
        """Return the processes that train this model; None if there is only this one.

        The first time after compiling, the program must be equal in all of them, and
        process 0 sends its weights to the others.
        """
        distributed = self._options.Distributed
        if not self._training or distributed.numProcesses == 1:
            return None
        processes = join_processes(distributed.processId, distributed.numProcesses)
        if executable is not self._joined:
            training, weights = self._options.Training, executable.host_weights
            facts = {
                "the number of device iterations": self._options.device_iterations,
                "the gradient accumulation": training.gradient_accumulation,
                "the number of replicas": self._options.replication_factor,
                "the reduction of gradients": (
                    training.accumulation_and_replication_reduction_type,
                    training.meanAccumulationAndReplicationReductionStrategy,
                ),
                "the weights": [
                    (name, tuple(tensor.shape), str(tensor.dtype), is_learned(tensor))
                    for name, tensor in weights.items()
                ],
            }
            check_agreement(processes, facts)
            broadcast_weights(processes, weights)
            self._joined = executable
        return processes

    @working()
    def detachFromDevice(self) -> None:
        """Save weights, optimizer and random state, and release the IPUs.

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
        if self._device is None:
            raise createPoptorchError("Device is not attached")
        self._read_rng_state()
        self.copyWeightsToHostIfNeeded()
        if self._optimizer is not None:
            self._optimizer.read_state()
        self._release_device()

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
        self._fetch_training()
        self._release_device()
        self._forget_program()
        if not self._training:
            return
        if not wrapping.is_wrapped(self._user_model):
            raise createPoptorchError("model was never wrapped")
        wrapping.unwrapModelIfNecessary(self._user_model)

    def _fetch_training(self) -> None:
        """Copy the newest weights and optimizer state to the host."""
        self.copyWeightsToHostIfNeeded()
        if self._optimizer is not None:
            self._optimizer.read()

    def _release_device(self) -> None:
        if self._device is not None:
            self._device.release()
            self._device = None
            logger.debug("Detached from device")
        self._is_rng_state_old = False

    def _forget_program(self) -> None:
        self._executable = None
        if self._optimizer is not None:
            self._optimizer.forget()

    # Weights ------------------------------------------------------------------

    @working()
    def copyWeightsToHost(self) -> None:
        """Write the device's weights into the user's module.

        Raises:
            Error: Not compiled, or not attached.

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
        self._dirty_host_weights = False
        with self._host_weights():
            self._require_device("copyWeightsToHost").download()
        self._host_weights_version += 1

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if training has changed them since.

        Returns:
            Whether there was something to copy.

        Example:
            >>> from ipufit.emulator import trainingModel
            >>> trainingModel(torch.nn.Linear(2, 1)).copyWeightsToHostIfNeeded()
            False
        """
        if not self._dirty_host_weights:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self.copyWeightsToHost()
        return True

    @working()
    def copyWeightsToDevice(self) -> None:
        """Upload the user's weights; training since the last copy to the host is lost.

        Raises:
            Error: Not compiled, or not attached.

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
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.read()  # its state is uploaded with the weights
        with self._host_weights():
            self._require_device("copyWeightsToDevice").upload()

    @working()
    def copyNamedBuffersToDevice(self) -> None:
        """Upload the buffers that `Options.updatableNamedBuffers` names.

        Nothing else is uploaded. As in PopTorch, what training has changed since the
        host saw it last isn't fetched any more, until the next call has changed it.

        Raises:
            Error: Not compiled, not attached, or the options name no buffer.

        Example:
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
        names = list(Settings(self._options).updatable_buffers)
        if not names:
            raise createPoptorchError(
                "No named buffers marked as updatable via updatableNamedBuffers "
                "option: name them when the model is wrapped, "
                '`Options().updatableNamedBuffers(["offset"])`.'
            )
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.read()
        with self._host_weights():
            self._require_device("copyNamedBuffersToDevice").upload(names)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load weights into the user's module, and upload them if attached.

        Args:
            state_dict: Parameters and buffers by name.
            strict: Whether the names must be exactly the module's.

        Returns:
            The missing and the unexpected names, as from torch.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.load_state_dict(torch.nn.Linear(2, 1).state_dict())
            <All keys matched successfully>
        """
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def _follow_training(self) -> None:
        """Upload the weights that a training executor of the same module has trained.

        Every copy to the host, of either executor, makes their versions differ, so the
        next call of this one uploads. That includes the first call after attaching,
        which has uploaded already, and a training executor that is gone has no version
        at all (PopTorch, `_poplar_executor.py`, `__call__`).
        """
        trained: Any = self._user_model
        if not wrapping.is_wrapped(trained):
            return
        trained.copyWeightsToHostIfNeeded()
        version = trained._host_weights_version
        if version != self._host_weights_version:
            logger.debug("Implicit copyWeightsToDevice()")
            self.copyWeightsToDevice()
            self._host_weights_version = version

    def _require_device(self, method: str) -> Device:
        """Return the device, for a public method that copies from or to it.

        Raises:
            Error: No IPU is held: an engine of Poplar's runs on a device only.
        """
        if self._device is None:
            raise createPoptorchError(
                f"{method}() needs a device, and this model holds none: call "
                "attachToDevice() first."
            )
        return self._device

    @contextlib.contextmanager
    def _host_weights(self) -> Iterator[None]:
        """Look up the host's weights by name, and keep them plain inside the context.

        Reading a plain weight fetches nothing.

        Raises:
            Error: The module no longer has a weight that it was compiled with.
        """
        compiled = self._require_compiled().host_weights
        now = named_weights(self._model)  # the user may have replaced some
        missing = compiled.keys() - now.keys()
        if missing:
            raise createPoptorchError(
                f"The model was compiled with {', '.join(sorted(missing))}, which it "
                "has no more: call destroy() to compile it again."
            )
        with wrapping.seen_plain([*now.values(), *compiled.values()]):
            for name, weight in compiled.items():
                if weight.is_floating_point():  # others are compiled in
                    compiled[name] = now[name]
            yield

    # Optimizer, random state --------------------------------------------------

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Send the values of `optimizer`; its state stays on the device.

        Call it after every change to a learning rate or another value. A new
        optimizer object without loaded state keeps the state that the device has.

        Args:
            optimizer: An optimizer of the type that the model was compiled with.

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
        if self._optimizer is None:
            raise AttributeError("An inference model has no optimizer to set.")
        self._optimizer.set(optimizer)

    @property
    def rng_state(self) -> list[int] | None:
        """Random state of the device: the seed, then the generator's state.

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
        self._require_compiled()
        return self._read_rng_state()

    @rng_state.setter
    def rng_state(self, state: Sequence[int] | None) -> None:
        self._require_compiled()
        self._rng_state = check_rng_state(state or [])
        self._is_rng_state_old = False
        if self._device is not None:
            self._device.rng.restore(self._rng_state)

    def _read_rng_state(self) -> list[int] | None:
        if self._is_rng_state_old and self._device is not None:
            self._rng_state = self._device.rng.save()
            self._is_rng_state_old = False
        return self._rng_state

    # Tensors and times of the last call ---------------------------------------

    def getTensorNames(self) -> list[str]:
        """List the names that `Options.anchorTensor` accepts for the compiled model.

        Weights have their own names, a gradient is `Gradient___fc.weight`, a weight
        that was updated `UpdatedVar___fc.weight`, and inputs are `input`, `input/1`.
        The optimizer's tensors have PopART's names, such as `Accl1___fc.weight` and
        `lossScaling_FLOAT`. A result of the forward pass is named by the path of its
        module and PopART's operator, such as `encoder/fc/Relu:0`; where PopART
        computes a function of torch in several steps there is one, with torch's name:
        `fc/Linear:0`. There are no gradients of such results here.

        Raises:
            AssertionError: Not compiled.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
            >>> inference = inferenceModel(layers)
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.getTensorNames()
            ['0.weight', '0.bias', 'input', '0/Linear:0', '1/Relu:0']
        """
        if self._executable is None:
            raise AssertionError(NOT_COMPILED)
        return list(self._executable.tensor_names)

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the value of an anchored tensor in the last call.

        It comes back as the outputs do: as many of them as the output mode of the
        options selects, whatever mode the anchor was given, as in PopTorch. A gradient
        is that of one micro-batch on one replica, before gradients are accumulated and
        reduced, and multiplied by the loss scaling. A weight is what a micro-batch
        computes with; `UpdatedVar___` is what the update after it makes of it.

        Args:
            short_name: The name that was given to `Options.anchorTensor`.

        Raises:
            AssertionError: There is no such anchor, or the model hasn't run.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options()
            >>> options.anchorTensor("hidden", "0/Mul:0")
            >>> class Double(torch.nn.Module):
            ...     def forward(self, x):
            ...         return x * 2
            >>> double_twice = torch.nn.Sequential(Double(), Double())
            >>> inference = inferenceModel(double_twice, options)
            >>> inference(torch.ones(1))
            tensor([4.])
            >>> inference.getAnchoredTensor("hidden")
            tensor([2.])
        """
        if self._last_call is None or short_name not in self._last_call.anchored:
            names = ", ".join(self._options.anchored_tensors) or "none"
            raise AssertionError(
                f"No tensor with name {short_name} found. After a call of the model "
                f"there are: {names}."
            )
        return self._last_call.anchored[short_name]

    def compilationTime(self) -> datetime.timedelta:
        """Time that the last compilation took, tracing included.

        Raises:
            Error: Not compiled, or `showCompilationProgressBar(False)`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.compilationTime().total_seconds() > 0
            True
        """
        if not self.isCompiled():
            raise createPoptorchError(
                "Please compile the model before obtaining compilation time."
            )
        if not self._options._show_compilation_progress_bar:
            raise createPoptorchError(
                "Please set showCompilationProgressBar option to obtain compilation "
                "time. The progress bar measures it, and it is disabled."
            )
        return self._compilation_time

    def cycleCount(self) -> int:
        """Return the cycles of the last call, if `Options.logCycleCount` is on.

        Returns:
            Seconds that the emulated device ran on this machine, times the clock rate
            of a Mk2 IPU, 1.33 GHz (Graphcore, IPU-M2000 data sheet). The number says
            nothing about the speed of an IPU.

        Raises:
            Error: Cycles aren't counted, or the model hasn't run.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().logCycleCount(True)
            >>> inference = inferenceModel(torch.nn.Linear(2, 1), options)
            >>> _ = inference(torch.ones(1, 2))
            >>> inference.cycleCount() > 0
            True
        """
        if not Settings(self._options).counts_cycles:
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to "
                "True to enable."
            )
        if self._last_call is None or not self.isCompiled():
            raise createPoptorchError(
                "Please run the model at least once before obtaining cycle count."
            )
        return self._last_call.cycles()

    def getPerfCounters(self) -> PerfCounters:
        """Return the time stamps of the last call, in seconds.

        Returns:
            A dictionary of four counters. `input` and `input_complete` have a list for
            each tensor that goes to the device, with a time for each micro-batch of
            each replica: when it was handed over, and when the replica had it.
            `output` and `output_complete` have a list for each tensor that comes back:
            when it was computed, and when the host had it. They have fewer times if
            the output mode drops results. With synthetic data all lists are empty.
            Before the first call each counter has one empty list.

        Example:
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().deviceIterations(4)
            >>> inference = inferenceModel(torch.nn.ReLU(), options)
            >>> _ = inference(torch.ones(4))
            >>> {name: len(of[0]) for name, of in inference.getPerfCounters().items()}
            {'input': 4, 'input_complete': 4, 'output': 4, 'output_complete': 4}
        """
        executable, last = self._executable, self._last_call
        if executable is None or last is None:
            return {name: [[]] for name in _COUNTERS}
        layout = Layout(self._options)
        sent = [
            step * layout.replicas + replica
            for step in layout.returned_steps
            for replica in range(layout.replicas)
        ]
        # Host and device share memory: a micro-batch is handed over when it is taken.
        # Its results are complete when they are collected, the last when all are.
        later = last.taken[1:]
        times = [
            [last.started, *later],
            last.taken,
            [[*later, last.ran][index] for index in sent],
            [[*later, last.returned][index] for index in sent],
        ]
        if Settings(self._options).is_synthetic:  # nothing was transferred
            times = [[], [], [], []]
        num_inputs = executable.program.num_inputs
        num_outputs = executable.program.num_results + executable.anchors.num_watched
        counts = (num_inputs, num_inputs, num_outputs, num_outputs)
        return {
            name: [list(column) for _ in range(count)]
            for name, column, count in zip(_COUNTERS, times, counts)
        }

    def getHostIpuLatency(self) -> Latency:
        """Return how long inputs took to the device in the last call.

        Returns:
            Minimum, maximum and average in seconds; zeros if nothing was sent.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> inference.getHostIpuLatency()
            (0.0, 0.0, 0.0)
            >>> _ = inference(torch.ones(1))
            >>> inference.getHostIpuLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return how long micro-batches were on the device in the last call.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> inference.getComputeLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return how long outputs took to the host in the last call.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> inference.getIpuHostLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """Return how long micro-batches of the last call took from host to host.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> minimum, maximum, average = inference.getLatency()
            >>> 0.0 < minimum <= average <= maximum
            True
        """
        return self._latency("input", "output_complete")

    def _latency(self, start: str, end: str) -> Latency:
        """Return the minimum, maximum and mean time from one counter to another.

        A time is measured from the first tensor of `start` to the last tensor of `end`.
        If `end` has fewer times, each belongs to a block of times of `start`, the
        earliest of which counts (PopTorch, `_poplar_executor.py`).
        """
        counters = self.getPerfCounters()
        starts = counters[start][0] if counters[start] else []
        ends = counters[end][-1] if counters[end] else []
        if not starts or not ends:
            return (0.0, 0.0, 0.0)
        size = len(starts) // len(ends)
        first = [min(starts[i * size : (i + 1) * size]) for i in range(len(ends))]
        seconds = [late - early for early, late in zip(first, ends)]
        return (min(seconds), max(seconds), sum(seconds) / len(seconds))

    # Files --------------------------------------------------------------------

    def save(
        self,
        filename: PathLike,
        export_model: bool = True,
        save_rng_state: bool = True,
    ) -> None:
        """Write the compiled model to a file.

        On a pod the file holds the executable, so that loading compiles nothing. The
        emulator has none: a file holds what to trace, and loading traces it again.

        Args:
            filename: Path of the file; its folders are created. If it is a folder that
                exists, the file is `model.poptorch` in it.
            export_model: Whether module, options and optimizer are pickled into the
                file too; `poptorch.load` needs them.
            save_rng_state: Whether the random state of the device is saved.

        Raises:
            Error: Not compiled, or no part of the model runs on an IPU.
            OSError: The file can't be written.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import inferenceModel, load
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> before = inference(torch.ones(4, 2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "linear.poptorch")
            ...     inference.save(path)
            ...     loaded = load(path)
            >>> torch.equal(loaded(torch.ones(4, 2)), before)
            True
        """
        executable = self._require_compiled()
        if not executable.program.runs_anything:
            raise createPoptorchError(
                "Nothing to export: no part of this model runs on an IPU."
            )
        path = os.fspath(filename)
        if os.path.isdir(path):
            inside = os.path.join(path, "model.poptorch")
            logger.warning("%s is a folder: the model is saved to %s.", path, inside)
            path = inside
        weights = named_weights(self._model).items()
        metadata = {
            **_FORMAT,
            "poptorch_version": __version__,
            "torch_version": torch.__version__,
            "is_training": self._training,
            "has_model": export_model,
            "micro_batches": Layout(self._options).input_blocks,
            "arguments": list(map(describe, executable.arguments.tensors())),
            "weights": {name: describe(weight) for name, weight in weights},
            "rng_state": self._read_rng_state() if save_rng_state else None,
        }
        members: dict[str, Any] = {ARGUMENTS: tuple(executable.first_micro_batch)}
        if export_model:
            self._fetch_training()
            members[MODEL] = {
                "options": self._options,
                "model": self._user_model,
                "optimizer": self._optimizer and self._optimizer.optimizer,
                "groupings": self.per_replica_params,
            }
        with new_file(path) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_METADATA, json.dumps(metadata))
            for member, value in members.items():
                with archive.open(member, "w", force_zip64=True) as stream:
                    torch.save(value, stream)

    def compileAndExport(
        self, filename: PathLike, *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile for arguments like these, and save the compiled model to a file.

        An offline model (`ConnectionType.Never`) can be exported too.

        Args:
            filename: As for `save`.
            *args: As for a call.
            export_model: Whether module, options and optimizer are saved too.
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

    def loadExecutable(self, filename: PathLike) -> None:
        """Compile from a file, for the arguments that it was saved with.

        The weights are those of this executor's module. A compiled executor fetches
        them first; the state of its optimizer begins anew.

        The arguments in the file are pickled: load only files that you trust.

        Args:
            filename: File of `save` or `compileAndExport` of such a model.

        Raises:
            Error: The file is another one or broken, was written by another version of
                the emulator or for another model; or compiling fails.
            OSError: The file can't be read.

        Example:
            >>> import os, tempfile
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = os.path.join(folder, "linear.poptorch")
            ...     inference.compileAndExport(
            ...         path, torch.ones(4, 2), export_model=False
            ...     )
            ...     other = inferenceModel(torch.nn.Linear(2, 1))
            ...     other.loadExecutable(path)
            >>> other.isCompiled()
            True
        """
        self._load(ExecutableFile(filename))

    def _load(self, file: ExecutableFile) -> None:
        """Compile an executor from a file.

        Raises:
            Error: The file is of another version or model, or compiling fails.
        """
        if file.other_version:
            raise file.invalid(file.other_version)
        is_training, kinds = file.metadata["is_training"], ("inference", "training")
        if is_training != self._training:
            raise file.invalid(
                f"it was compiled for {kinds[is_training]}, and this model is for "
                f"{kinds[self._training]}"
            )
        there = file.metadata["weights"]
        here = {name: describe(w) for name, w in named_weights(self._model).items()}
        for name in {**there, **here}:
            saved, present = (
                repr(known[name]) if name in known else "missing"
                for known in (there, here)
            )
            if saved != present:
                raise file.invalid(
                    "it was compiled for a module with other parameters or buffers: "
                    f"{name!r} is {saved} there and {present} here"
                )
        first = CallArguments(*file.load(ARGUMENTS))
        # These options may take more micro-batches than those of the saved model.
        count = Layout(self._options).input_blocks
        whole = first.with_tensors(
            torch.cat([rows] * count) if count > 1 else rows  # 0-d if count is 1
            for rows in first.tensors()
        )
        self.copyWeightsToHostIfNeeded()
        self._release_device()
        self._forget_program()
        self._compile(*whole)


class ParameterView:
    """A parameter of the top-level module, as its executor shows it.

    As in PopTorch it isn't a tensor: it only passes attributes on.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> view = inferenceModel(torch.nn.Linear(2, 3)).weight
        >>> isinstance(view, torch.Tensor), view.shape
        (False, torch.Size([3, 2]))
    """

    def __init__(self, parameter: torch.nn.Parameter, executor: PoplarExecutor) -> None:
        self._parameter = parameter
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Let groups of replicas have different values of this parameter.

        The parameter must have a leading dimension, one element for each group; the
        module is traced with `parameter[0]`. Each group sums its own gradients. A mean
        still divides by the number of all replicas, unless it is a running mean,
        which divides by the size of the group. The state of PopTorch's optimizers has
        the leading dimension too. `max_grad_norm` counts the gradients of all groups.

        Call it before the model is compiled.

        Args:
            comm_group_type: Way in which replicas form groups.
            shards: Number of replicas in each group; without effect for `All` (one
                group) and `NoGrouping` (one group for each replica).
            variable_retrieval_mode: With `AllReplicas` the leading dimension is the
                number of replicas, and the value of each is read back into it; groups
                start from the value of their first replica.

        Raises:
            AssertionError: An argument has the wrong type.

        Example:
            >>> from ipufit.emulator import CommGroupType, Options
            >>> from ipufit.emulator import VariableRetrievalMode, inferenceModel
            >>> class Scale(torch.nn.Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.factor = torch.nn.Parameter(torch.tensor([[2.0], [3.0]]))
            ...     def forward(self, x):
            ...         return self.factor * x
            >>> inference = inferenceModel(Scale(), Options().replicationFactor(2))
            >>> inference.factor.replicaGrouping(
            ...     CommGroupType.NoGrouping, 0, VariableRetrievalMode.OnePerGroup
            ... )
            >>> inference(torch.ones(2)).tolist()
            [2.0, 3.0]
        """
        if self._executor.isCompiled():
            logger.warning(
                "replicaGrouping() has no effect on an executable that is already "
                "compiled: it counts for the next compilation, after destroy()"
            )
        grouping = Grouping(comm_group_type, shards, variable_retrieval_mode)
        kinds = CommGroupType, int, VariableRetrievalMode
        for name, value, kind in zip(grouping._fields, grouping, kinds):
            require(isinstance(value, kind), f"{name}={value!r}: use {kind.__name__}.")
        for name, weight in named_weights(self._executor.model).items():
            if weight is self._parameter:
                self._executor.per_replica_params[name] = grouping


def _own_options(options: Options | None, *, is_training: bool) -> Options:
    """Freeze the caller's options, and clone them with the output mode chosen.

    Raises:
        Error: `options` is something else, or makes inference accumulate gradients.
    """
    if options and not isinstance(options, Options):
        raise createPoptorchError(
            f"Invalid type: 'options' is of type {type(options)}, expected "
            "poptorch.Options."
        )
    options = options or Options()
    options._freeze()
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if is_training else OutputMode.All)
    resolve_modes(own)
    if not is_training and own.Training.gradient_accumulation != 1:
        hint = ""
        if is_pipelined(own._execution_strategy):
            hint = (
                " Use poptorch.Options().deviceIterations to process a sufficient "
                "number of batches each run for pipelined execution instead."
            )
        raise createPoptorchError(
            "You must set poptorch.Options().Training.gradientAccumulation to 1 or "
            "leave it as its default value (1) when running a "
            f"poptorch.inferenceModel().{hint} It is "
            f"{own.Training.gradient_accumulation}."
        )
    own._freeze()
    return own


def trainingModel(
    model: torch.nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap `model` for training: each call runs forward, backward and updates.

    The module must compute exactly one final loss. It is wrapped in the train or
    eval mode it is in; nothing here changes that.

    Args:
        model: The module, or an executor around it.
        options: Frozen, and cloned for the executor; defaults for None.
        optimizer: One of `poptorch.optim`, or torch's SGD, Adam, AdamW or RMSprop;
            by default SGD with a learning rate of 0.01.

    Returns:
        The executor. Until it is destroyed, the module's weights fetch themselves
        from the device when they are read.

    Raises:
        RuntimeError: The module is wrapped for training already.
        Error: `options` is something else, or a buffer is of a subclass of `Tensor`.
        AssertionError: The optimizer's type is not supported.

    Example:
        >>> from ipufit.emulator import optim, trainingModel
        >>> class Squares(torch.nn.Linear):
        ...     def forward(self, x, y):
        ...         return torch.nn.functional.mse_loss(super().forward(x), y)
        >>> module = Squares(2, 1)
        >>> sgd = optim.SGD(module.parameters(), lr=0.1)
        >>> training = trainingModel(module, optimizer=sgd)
        >>> training(torch.ones(4, 2), torch.zeros(4, 1)).shape
        torch.Size([])
    """
    if isinstance(model, PoplarExecutor):
        model = model.model
    if wrapping.is_wrapped(model):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call "
            "model.destroy() on the model to unwrap before wrapping again."
        )
    # The traced object: attributes like `training` are its own, weights are shared.
    twin = copy.copy(model)
    return PoplarExecutor(
        twin, options, training=True, optimizer=optimizer, user_model=model
    )


def inferenceModel(
    model: torch.nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap `model` for inference.

    Args:
        model: The module, or an executor around it. If it is wrapped for training,
            each call first fetches what training changed.
        options: Frozen, and cloned for the executor; gradient accumulation must be 1.

    Raises:
        Error: `options` is something else, or accumulates gradients.

    Example:
        >>> from ipufit.emulator import inferenceModel
        >>> inference = inferenceModel(torch.nn.Linear(2, 3))
        >>> inference(torch.ones(4, 2)).shape
        torch.Size([4, 3])
    """
    if isinstance(model, PoplarExecutor):
        model = model.model
    return PoplarExecutor(copy.copy(model), options, training=False)


def load(
    filename: PathLike, edit_opts_fn: Callable[[Options], Any] | None = None
) -> PoplarExecutor:
    """Restore an executor that was saved with its model.

    It is compiled, and attached unless the options say `OnDemand`; an offline target
    becomes a device. Weights, optimizer and random state are those of the file. An
    executor from a file is linked to no other: an inference model doesn't follow a
    training model that was loaded beside it.

    The file is unpickled, as by `torch.load`, and that can run any code: load only
    files that you trust. `importPoptorchMetadataFromFile` unpickles nothing.

    Args:
        filename: File of `PoplarExecutor.save` or `compileAndExport`.
        edit_opts_fn: Called with the options, to change them. The model is traced
            again, so all changes count here; on a pod only run-time options do.

    Raises:
        AssertionError: The file was written by another version of the emulator, or
            with `export_model=False`.
        Error: The file is another one or broken, or compiling fails.
        OSError: The file can't be read.

    Example:
        >>> import os, tempfile
        >>> inference = inferenceModel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "linear.poptorch")
        ...     inference.compileAndExport(path, torch.ones(4, 2))
        ...     loaded = load(path, lambda options: options.useIpuId(7))
        >>> loaded.options.ipu_id, loaded.isAttachedToDevice()
        (7, True)
    """
    file = ExecutableFile(filename)
    require(
        not file.other_version,
        f"Invalid file {file.path}: {file.other_version}.",
    )
    require(
        file.metadata["has_model"],
        f"{file.path} was written with export_model=False. Wrap the module with "
        "trainingModel or inferenceModel, and call loadExecutable of that.",
    )
    saved = file.load(MODEL)
    options = saved["options"]
    options._unfreeze()
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    if file.metadata["is_training"]:
        executor = trainingModel(saved["model"], options, saved["optimizer"])
    else:
        executor = inferenceModel(saved["model"], options)
    executor.per_replica_params.update(saved["groupings"])
    executor._load(file)
    if file.metadata["rng_state"] is not None:
        executor.rng_state = file.metadata["rng_state"]
    return executor


# Compile ---------------------------------------------------------------------------


def compile_model(
    model: torch.nn.Module,
    options: Options,
    arguments: CallArguments,
    groupings: Mapping[str, Any],
    optimizer: DeviceOptimizer | None,
) -> Executable:
    """Trace a module for arguments like these, and check the traced program.

    Args:
        groupings: Arguments of `replicaGrouping` by the name of a parameter. Other
            names are left out.
        optimizer: The executor's optimizer; None for inference.

    Raises:
        AssertionError: A batch dimension is not a multiple of `D * G * R`.
        Error: The module or its options ask for something that no device does.
    """
    is_training, settings = optimizer is not None, Settings(options)
    _check_executable_cache(options, settings.cache_dir)
    check_inputs(arguments.tensors())
    layout = Layout(options)
    with torch.inference_mode(False):
        first = micro_batch(arguments, layout.input_blocks, layout.describe())
        example = first.with_tensors(
            device_tensor(tensor, copy=True) for tensor in first.tensors()
        )
    refuse_lazy(model)
    with wrapping.unwrapped(model):
        refuse_scripted(model)
        refuse_tied_buffers(model)
        refuse_weights(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        groupings = {n: Grouping(*g) for n, g in groupings.items() if n in parameters}
        _check_groupings(groupings, options)
        groups = resolve_groupings(groupings, model, layout.replicas)
        with unchanged(model):
            hold_one_element(model, groups)
            program = trace(
                model,
                example,
                strategy=options._execution_strategy,
                is_training=is_training,
                names_modules=options._module_namescope_enabled,
            )
        for check in LOWERING_CHECKS:
            check(program, options, is_training)
        num_ipus = reserved_ipus(options, program.num_ipus * layout.replicas)
        for check in SESSION_CHECKS:
            check(program, options, is_training)
        check_updatable_buffers(model, options)
        weights = {
            # Integer weights are compiled in: changes neither arrive nor come back.
            name: weight if weight.is_floating_point() else weight.detach().clone()
            for name, weight in named_weights(model).items()
        }
        trained = [
            name
            for name, weight in weights.items()
            if program.has_loss and is_learned(weight)
        ]
        names = [*named_nodes(program), *weight_tensor_names(trained)]
        if optimizer is not None:
            names += optimizer.compile(weights, trained)
        anchors = add_anchors(program, options, names)
        if settings.stops_at_exceptions:
            program.stops_at_exceptions = True
        runner = choose_runner(program, layout, settings, groups, anchors)
    like = arguments.with_tensors(  # shapes and types, but no data
        tensor.detach().to("meta").as_subclass(type(tensor))
        for tensor in arguments.tensors()
    )
    return Executable(
        program, num_ipus, like, first, weights, groups, names, anchors, runner
    )


def _check_groupings(groupings: Mapping[str, Grouping], options: Options) -> None:
    """Refuse groups of replicas that span processes in part.

    Groups are formed of the replicas of all processes, but the emulator knows only the
    replicas of this one.

    Raises:
        Error: There are several processes, and the groups of a weight or of the inputs
            are neither all replicas nor certainly inside one process.
    """
    count = options.Distributed.numProcesses
    if count == 1:
        return
    grouped = [
        f"replicaGrouping of {name} ({kind.comm_group_type})"
        for name, kind in groupings.items()
        if kind.comm_group_type is not CommGroupType.All
    ]
    is_apart = options.input_cgt != CommGroupType.Consecutive
    if options.input_group_size > 1 and is_apart:
        grouped.append("Options.inputReplicaGrouping that isn't Consecutive")
    if grouped:
        raise createPoptorchError(
            f"Of {count} processes the emulator can't put all replicas into groups: "
            f"{', '.join(grouped)}. Use more replicas in one process "
            "(Options.replicationFactor), or CommGroupType.All for weights."
        )


@functools.lru_cache(maxsize=None)  # PopTorch: for each executor
def _warn_of_no_cache(count: int) -> None:
    logger.warning(
        "Options.enableExecutableCaching isn't set: on a pod each of the %d "
        "processes would compile the model for itself.",
        count,
    )


def _check_executable_cache(options: Options, folder: str | None) -> None:
    """Log that nothing is cached if caching is on, and check a shared folder.

    PopTorch saves compiled code, and lets one of several processes compile first. The
    emulator compiles by tracing, which runs the module's Python in each process.

    Raises:
        AssertionError: Several processes share a folder that can't be written to.
    """
    count = options.Distributed.numProcesses
    if folder is None:
        if count > 1 and options.Distributed.processId == 0:  # PopTorch: in each
            _warn_of_no_cache(count)
        return
    logger.info(
        "Executable caching is on, but there are no executables: the emulator "
        "traces every model anew and writes nothing into the cache."
    )
    path = os.path.abspath(folder)
    while not os.path.lexists(path):  # missing folders are made
        path = os.path.dirname(path)
    require(
        count == 1 or (os.path.isdir(path) and os.access(path, os.W_OK)),
        f"The cache of executables, {folder}, can't be written to: several processes "
        "share it, so Options.enableExecutableCaching needs a folder that they can "
        "write to.",
    )


# Files ---------------------------------------------------------------------------
# PopTorch's files hold executables. There are none here: compiling is tracing, which
# runs the module's Python, so a file holds what a trace needs, and loading traces
# again.
#
# A file is a ZIP archive, uncompressed, of
#
# - `metadata.json`, which can be read without running anything.
# - `arguments.pt`: the arguments of one micro-batch, by `torch.save`.
# - `model.pt`, unless it was left out: options, module and optimizer, by `torch.save`.
#
# The last two are pickles: reading them can run any code that whoever wrote the file
# put there.

PathLike = Union[str, "os.PathLike[str]"]

ARGUMENTS = "arguments.pt"
MODEL = "model.pt"
_METADATA = "metadata.json"
_FORMAT = {
    "format": "ipufit.emulator executable",
    "format_version": 5,  # with each move of a class that is pickled
}
_KINDS: dict[str, Any] = {
    "format": str,
    "format_version": int,
    "poptorch_version": str,  # only this version of the emulator reads the file
    "torch_version": str,
    "is_training": bool,
    "has_model": bool,  # whether there is a `model.pt`
    "micro_batches": int,  # of one call
    "arguments": list,  # shape and dtype of each tensor of one call
    "weights": dict,  # shape and dtype of each parameter and buffer, by name
    "rng_state": (list, type(None)),  # None if it wasn't saved
}
_MOST_METADATA = 64 << 20
"""Size of the largest metadata that are read, in bytes."""


def describe(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor for metadata."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


class ExecutableFile:
    """A file that `PoplarExecutor.save` wrote, with its metadata read.

    Attributes:
        contents: The metadata, a JSON document.
        metadata: The values of `_KINDS`.
        other_version: Names another version of the emulator that wrote the file, or "".

    Raises:
        Error: The file is another one, or broken.
        OSError: It can't be read.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self.contents = self._read(_METADATA)
        try:
            self.metadata = json.loads(self.contents)
        except (ValueError, RecursionError) as error:
            raise self.invalid(str(error)) from error
        is_ours = isinstance(self.metadata, dict)
        if not is_ours or self.metadata.get("format") != _FORMAT["format"]:
            raise self.invalid("it isn't a file of the emulator")
        version, ours = self.metadata.get("format_version"), _FORMAT["format_version"]
        if version != ours:
            raise self.invalid(
                f"its format has version {version!r:.80}, and this is version {ours}: "
                "compile the model anew"
            )
        for name in sorted(self.metadata.keys() | _KINDS):
            value = self.metadata.get(name, self)  # which is of no kind
            is_shown = not isinstance(value, str) or value.isprintable()
            if not (is_shown and isinstance(value, _KINDS.get(name, ()))):
                raise self.invalid(f"its metadata differ in {name[:80]!r}")
        version, self.other_version = self.metadata["poptorch_version"], ""
        if version != __version__:
            self.other_version = (
                f"it was written by version {version}, and this is version "
                f"{__version__}"
            )

    def invalid(self, reason: str) -> Error:
        """Return the error that says why the file can't be used."""
        return createPoptorchError(f"Invalid file {self.path}: {reason}.")

    def load(self, member: str) -> Any:
        """Unpickle a member of the file; only for files that are trusted.

        Raises:
            Error: The member is missing or broken.
        """
        return torch.load(
            io.BytesIO(self._read(member)), map_location="cpu", weights_only=False
        )

    def _read(self, member: str) -> bytes:
        with open_regular(self.path) as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    member_info = archive.getinfo(member)
                    if member_info.compress_type != zipfile.ZIP_STORED:
                        raise ValueError(f"{member} is compressed")
                    if member == _METADATA and member_info.file_size > _MOST_METADATA:
                        raise ValueError(f"{member} has {member_info.file_size} bytes")
                    return archive.read(member)
            except Exception as error:
                reason = f"it isn't a file of the emulator, or is broken ({error})"
                raise self.invalid(reason) from error


def importPoptorchMetadataFromFile(filename: PathLike) -> bytes:
    """Read the metadata of a saved executor; nothing is unpickled.

    Args:
        filename: File of `PoplarExecutor.save` or `compileAndExport`.

    Returns:
        A JSON document: versions, the kind of model, shapes of arguments and weights.
        In PopTorch it is a pickle.

    Raises:
        Error: The file is another one, or broken.
        OSError: The file can't be read.

    Example:
        >>> import json, os, tempfile
        >>> from ipufit.emulator import inferenceModel
        >>> inference = inferenceModel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "linear.poptorch")
        ...     inference.compileAndExport(path, torch.ones(4, 2))
        ...     metadata = json.loads(importPoptorchMetadataFromFile(path))
        >>> metadata["arguments"]
        [{'shape': [4, 2], 'dtype': 'torch.float32'}]
    """
    return ExecutableFile(filename).contents
