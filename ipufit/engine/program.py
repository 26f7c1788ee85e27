# SPDX-License-Identifier: Apache-2.0
"""The programs of one module: build, attach, run, and move weights.

`Executors.fetch_weights` says when weights are copied to the host, and when back.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import sys
import time
import warnings
import weakref
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import (
    Any,
    Callable,
    ClassVar,
    Iterable,
    Iterator,
    MutableMapping,
    NamedTuple,
    Sequence,
    TypeVar,
)

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary

from ipufit import _env
from ipufit._modules import weights_of
from ipufit._poptorch import poptorch, survey
from ipufit._signals import uninterrupted
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.config import IPUConfig
from ipufit.data.structure import SampleStructure
from ipufit.distributed import Processes
from ipufit.engine.constants import BakedInValues, TrainedParts
from ipufit.engine.host_calls import HostProgram
from ipufit.engine.metric_state import Scalars
from ipufit.engine.objective import Computation, Objective
from ipufit.engine.step import (
    CountsMissingError,
    ShortPipelineError,
    Step,
    kept_submodules,
    traced_mode,
)
from ipufit.engine.trace_checks import (
    refuse_gradient_hooks,
    refuse_synchronized_norms,
    refuse_tied_buffers,
    require_trained_weights,
)
from ipufit.engine.weights import (
    MODULE,
    Fingerprint,
    HostValue,
    MovedOnDeviceError,
    Wrappers,
    check_values,
    checksum,
    counted_up,
    fingerprint,
    host_tensors,
    host_values_of,
    remember_classes,
    remove_wrappers,
    restore_exact,
)
from ipufit.errors import ConfigError, DataError, IpufitError, IpufitWarning
from ipufit.optimizers import Optimization, OptimizerValues
from ipufit.placement import find_beginnings
from ipufit.state import span

logger = logging.getLogger("ipufit")
P = TypeVar("P", bound="Program")

KEPT_PROGRAMS = 8
"""Programs of a kind that a model keeps: those that were used last."""


@dataclass(eq=False)
class Program:
    """A compiled program of the user's module.

    Attributes:
        executor: PopTorch's executor.
        step: The module that was traced.
        num_micro_batches: Micro-batches of a call, over all replicas.
        baked_in: Python values that are compiled in.
        key: The spec that the program was built for (`ProgramSpec.key`).
        on_device: Fingerprint of the device's weights; None if unknown.
        must_compare: Whether the device's weights have to be compared with the host's
            before the next call; see `Executors.fetch_weights`.
        num_trained: Number of training calls of any model: for inference, at the time
            when the program got the weights; for training, including the program's last
            call.
        evaluated: Losses and metrics that were checked with its outputs, and contain no
            sums over samples (`Objective.program_key`).
    """

    executor: poptorch.PoplarExecutor
    step: Step
    num_micro_batches: int
    baked_in: BakedInValues
    key: object
    on_device: Fingerprint | None = field(default=None, init=False)
    must_compare: bool = field(default=True, init=False)
    num_trained: int = field(default=0, init=False)
    evaluated: object = field(default=None, init=False)

    @property
    def weights(self) -> list[Tensor]:
        """The host's tensors that the device copies, those of losses included."""
        return self.step.weights

    def check(self) -> None:
        """Refuse to go on if a value has changed that is compiled in."""
        self.baked_in.check()

    def run(self, batch: list[Tensor]) -> Any:
        """Run one call, and return all results of the program.

        Args:
            batch: Tensors of the batch; the host's values are added.

        Raises:
            DataError: The batch has an index that doesn't exist.
        """
        tensors = batch
        if self.step.host_values:
            values = host_tensors(self.step.host_values, self.num_micro_batches)
            tensors = [*batch, *values]
        try:
            with span("device call"):
                return self.executor(*tensors)
        except (IndexError, RuntimeError) as error:
            _refuse_index(error, self.step.module, batch, "this call")
            raise


@dataclass(eq=False)
class TrainingProgram(Program):
    """A compiled program that updates the weights.

    Attributes:
        wrappers: Wrapper classes that PopTorch has given to the weights.
        optimizer: The optimizer whose values and state the device has, or gets when the
            program is attached.
        random_state: State of the device's generator when the program was compiled;
            None without a seed.
        counted_up: Buffers that the host counts up, and by how much in each call.
        trained_parts: Parts of the module that the program trains.
        sent: Values of the optimizer that were sent last; empty if those on the device
            may differ.
    """

    wrappers: Wrappers
    optimizer: torch.optim.Optimizer
    random_state: list[int] | None
    counted_up: list[tuple[Tensor, int]]
    trained_parts: TrainedParts
    sent: tuple[object, ...] = field(default=(), init=False)

    def check(self) -> None:
        """Refuse to go on if a value has changed, or a part was frozen or unfrozen."""
        super().check()
        self.trained_parts.check()


_OUT_OF_RANGE = re.compile(
    r"(?<!Dimension )(?<!list index )(?<!tuple index )out of (range|bounds)"
    "|index.* invalid|Class values must"
)
"""Messages of torch about an index out of range, but none about a dimension."""


def _refuse_index(
    error: Exception, module: torch.nn.Module, batch: Sequence[Tensor], where: str
) -> None:
    """Raise a DataError with the integers of a batch if torch refused an index.

    The first micro-batch fails when it is traced, as an error of its layer; later ones
    fail in the call.

    Raises:
        DataError: torch refused an index.
    """
    text, cause = str(error).rstrip("."), error.__cause__
    if "failed with inputs of" in text and isinstance(cause, IndexError):
        error = cause
    else:
        text = f"{type(module).__name__} failed in a call: {text}"
    is_own = isinstance(error, (IpufitError, poptorch.Error))
    if is_own or not _OUT_OF_RANGE.search(text):
        return
    ranges = ", ".join(
        f"{str(t.dtype).replace('torch.', '')} {list(t.shape)} from {int(t.min())} to "
        f"{int(t.max())}"
        for t in batch
        if not t.is_floating_point() and t.dtype != torch.bool and t.numel()
    )
    integers = f" The integers of {where} are {ranges}." if ranges else ""
    raise DataError(
        f"{text}.{integers} Classes go from 0 to their number - 1, and so do the rows "
        "of an embedding."
    ) from error


@dataclass(frozen=True, eq=False)
class ProgramSpec:
    """The inputs of a build of a program of `evaluate` or `predict`.

    Attributes:
        module: The user's module.
        config: Stages and precision.
        structure: Structure of a batch.
        plan: Factors of a call, which counts samples and padding.
        options: Options of PopTorch.
        example: Tensors of a call.
        remark: Text to show after a compilation.
        computation: The computation of the program.
        objective: Losses and metrics of training; None without training.
    """

    module: torch.nn.Module
    config: IPUConfig
    structure: SampleStructure
    plan: BatchPlan
    options: poptorch.Options
    example: list[Tensor]
    remark: str
    computation: Computation
    objective: Objective | None

    name: ClassVar[str] = "inference"
    """Name of the kind of program, for messages."""
    is_training: ClassVar[bool] = False

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that must be equal for a kept program to do the same."""
        parts = self.structure.parts
        nested = parts if self.computation.takes_labels else parts[0]
        return self.plan, self.shapes, nested, self.computation

    @property
    def shapes(self) -> list[tuple[torch.Size, torch.dtype]]:
        """Shapes and types of a call's tensors."""
        return [(tensor.shape, tensor.dtype) for tensor in self.example]

    @property
    def loss_modules(self) -> list[torch.nn.Module]:
        """Losses with weights or buffers that the program has copies of."""
        return [] if self.objective is None else self.objective.modules

    @property
    def may_be_sharded(self) -> bool:
        """Whether stages may run one after the other: no setting says otherwise."""
        config = self.config
        settings = config.placement, config.customize, config.inference_options
        return all(setting is None for setting in settings)

    def step(self, host_values: Sequence[HostValue]) -> Step:
        """Return the module that PopTorch traces."""
        parts = self.module, self.config, self.structure
        return Step(*parts, host_values, self.computation, self.objective)

    @cached_property
    def on_host(self) -> HostProgram:
        """The program with its first micro-batch, to be called on the host."""
        # An item may be a whole micro-batch of samples.
        rows = len(self.example[0]) // self.plan.micro_batches_per_call
        sample = [t[:rows].clone() if t.dim() else t for t in self.example]
        return HostProgram(self.module, self.computation, self.structure, sample)

    def baked_in(self) -> BakedInValues:
        """Record the values that the code of the program can read now."""
        call = partial(self.on_host.calls, self.objective)
        return BakedInValues(self.module, self.computation.step, self.objective, call)

    def checks(self, step: Step) -> list[Callable[[], None]]:
        """Return functions that refuse weights that an IPU can't hold."""
        return [partial(check_values, step)]

    def executor(
        self, step: Step, options: poptorch.Options
    ) -> poptorch.PoplarExecutor:
        """Return PopTorch's executor of a step."""
        return poptorch.inferenceModel(step, options=options)

    def program(
        self, executor: poptorch.PoplarExecutor, step: Step, baked_in: BakedInValues
    ) -> Any:
        """Return the program of a step that PopTorch has just compiled."""
        count = self.plan.micro_batches_per_call
        return Program(executor, step, count, baked_in, self.key)

    def refuse_sums(self) -> None:
        """Refuse a module's or step's own loss that is a sum over samples."""
        if self.computation.owns_loss:
            self.on_host.refuse_own_sums(training=self.is_training)


@dataclass(frozen=True, eq=False)
class TrainingSpec(ProgramSpec):
    """The inputs of a build of a program of `fit`.

    Attributes:
        objective: Losses and metrics.
        optimization: The optimizer and its schedule.
        watched: Names of parameters whose gradients are sent to the host.
    """

    objective: Objective
    optimization: Optimization
    watched: Sequence[str]

    name, is_training = "training", True
    may_be_sharded = False

    @cached_property
    def trained_parts(self) -> TrainedParts:
        """The parts of the module that the program trains."""
        return TrainedParts(self.module)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """All that must be equal for a kept program to do the same."""
        return (
            *(self.plan, self.shapes, self.structure, self.trained_parts),
            *(self.objective.program_key, self.optimization.program_key),
            [*self.watched],
        )

    @property
    def optimizer(self) -> Any:
        """PopTorch's optimizer."""
        return self.optimization.optimizer

    def module_checks(self) -> list[Callable[[], None]]:
        """Return functions that refuse what a training program would ignore."""
        return [
            partial(refuse_gradient_hooks, [self.module, *self.loss_modules]),
            partial(refuse_synchronized_norms, self.module, self.plan),
        ]

    def checks(self, step: Step) -> list[Callable[[], None]]:
        """Return functions that refuse what a training program can't train."""
        return [partial(require_trained_weights, step), *super().checks(step)]

    def executor(
        self, step: Step, options: poptorch.Options
    ) -> poptorch.PoplarExecutor:
        """Return PopTorch's executor of a step."""
        _give_states(self.optimizer, step)
        return poptorch.trainingModel(step, options=options, optimizer=self.optimizer)

    def program(
        self, executor: poptorch.PoplarExecutor, step: Step, baked_in: BakedInValues
    ) -> Any:
        """Return the program of a step that PopTorch has just compiled."""
        options, count = self.options, self.plan.micro_batches_per_call
        loops = options.device_iterations * options.Training.gradient_accumulation
        increments = step.findings.increments.items()
        return TrainingProgram(
            *(executor, step, count, baked_in, self.key, Wrappers(step.weights)),
            *(self.optimizer, executor.rng_state),
            counted_up(step, {name: number * loops for name, number in increments}),
            self.trained_parts,
        )


_TRAINERS: MutableMapping[Tensor, weakref.ReferenceType[Executors]]
_TRAINERS = WeakIdKeyDictionary()  # type: ignore[no-untyped-call,unused-ignore]
"""Who trains each weight: PopTorch wraps it for one program at a time."""


class Executors:
    """The training and inference programs of one module.

    The programs used last are kept (`KEPT_PROGRAMS` of each kind), so that batches of
    another size, or another evaluation in between, build nothing again.

    A run holds its program and passes it to each call, because another run may have
    programs in between, in a callback. One training program at a time is on the device:
    it has the optimizer's state, and the wrapper classes of the weights.

    `fetch_weights` says when weights are copied between the host and the devices.

    Args:
        module: The user's module.
        config: Stages, replicas and precision.
        processes: The processes that run the module together.
    """

    _num_trained = 0  # calls of training, of all models

    def __init__(
        self, module: torch.nn.Module, config: IPUConfig, processes: Processes
    ) -> None:
        self.module = module
        self._processes = processes
        self._are_alike = False  # the weights of all processes
        self._lent: list[tuple[Tensor, int, Tensor]] = []
        self._has_lent = False  # process 0's buffers to the others
        self._trainings: list[TrainingProgram] = []
        self._inferences: list[Program] = []
        self._trainer: TrainingProgram | None = None  # on the device, or the last there
        self._ahead: TrainingProgram | None = None  # it has newer weights
        self._is_trainer = False  # of all weights: no other model has some of them
        self._lenders: weakref.WeakSet[Executors] = (
            weakref.WeakSet()
        )  # trained some before
        self._exact: list[tuple[Tensor, Tensor]] = []  # values before float32
        self._moved: list[HostValue] = []  # 0-d buffers that `forward` changes
        self._news: list[str] = []
        self.seconds = 0.0  # that compilations have taken
        self._takes_turns = _env.waits_for_ipus()
        self._set_config(config)

    def __del__(self) -> None:
        """Download the weights when the model is deleted: its module may be in use."""
        if getattr(self, "_ahead", None) is not None and not sys.is_finalizing():
            with contextlib.suppress(Exception):  # of a device that has failed
                self.fetch_weights()

    def _set_config(self, config: IPUConfig) -> None:
        """Set the config, and refuse names of submodules that don't exist."""
        find_beginnings(self.module, config)
        find_beginnings(self.module, config.inference_config)
        kept_submodules(self.module, config.recompute_patterns)
        self.config = config

    def _programs(self) -> list[Program]:
        """Return all programs that are kept."""
        return [*self._inferences, *self._trainings]

    # Building ---------------------------------------------------------------

    @uninterrupted
    def prepare_inference(self, spec: ProgramSpec, display: ProgressDisplay) -> Program:
        """Attach a program; its next call uses the newest weights.

        The program is built, unless a kept program has the same key and the same values
        compiled in.

        Args:
            spec: All that the program is built for.
            display: Shows that PopTorch compiles.
        """
        self.begin_alike()
        self.fetch_weights()
        self.share_buffers()
        program = self._find(self._inferences, spec)
        if program is None:
            program = self._build(self._inferences, spec, display)
        program.num_trained = Executors._num_trained
        self._attach(program)
        return program

    @uninterrupted
    def prepare_training(
        self, spec: TrainingSpec, display: ProgressDisplay
    ) -> TrainingProgram:
        """Attach a program and its optimizer, as `prepare_inference` does.

        Args:
            spec: All that the program is built for.
            display: Shows that PopTorch compiles.
        """
        for check in spec.module_checks():
            check()
        optimizer = spec.optimizer
        self._take_over()
        self.begin_alike(spec.loss_modules)
        program = self._find(self._trainings, spec)
        if program is None or program is not self._trainer:
            self._leave_training()
        if program is None:
            has_state = optimizer.has_state()
            values = OptimizerValues(optimizer).variable
            with torch.enable_grad():  # PopTorch traces in the mode that it finds
                program = self._build(self._trainings, spec, display)
            program.sent = () if has_state else values  # a state brings its own
        else:
            spec.objective.ignore_as(program.step.objective)
        self._trainer = program
        self._bind_optimizer(program, optimizer)
        self._attach(program)
        return program

    def _find(self, programs: list[P], spec: ProgramSpec) -> P | None:
        """Return the kept program of a spec; destroy it if its values have changed."""
        key = spec.key
        program = next((kept for kept in programs if kept.key == key), None)
        if program is None:
            return None
        programs.remove(program)
        changes = program.baked_in.changes()
        if not changes:
            programs.append(program)  # the last is the one used last
            return program
        self._news.append(f"Compiling anew: {changes}")
        if program is self._trainer:
            self._leave_training()
        program.executor.destroy()
        return None

    def has(self, program: Program) -> bool:
        """Return whether a program is kept, so that it can be called."""
        return program in self._programs()

    def _take_over(self) -> None:
        """Download the weights that other models train, if this module has them too."""
        if self._is_trainer:
            return
        for other in self._sharing():
            other.fetch_weights()
            other._is_trainer = False
            self._lenders.add(other)
        weights = weights_of(self.module)
        remove_wrappers(weights)  # another may be gone
        _TRAINERS.update(dict.fromkeys(weights, weakref.ref(self)))
        self._is_trainer = True

    def _sharing(self) -> set[Executors]:
        """Return other models that train some of this module's weights."""
        references = filter(None, map(_TRAINERS.get, weights_of(self.module)))
        trainers = {reference() for reference in references}
        return {model for model in trainers if model is not None and model is not self}

    def _build(
        self, programs: list[P], spec: ProgramSpec, display: ProgressDisplay
    ) -> P:
        """Build a program, and again if its trace shows changed 0-d buffers.

        Args:
            programs: Programs of the kind, to which the new program is added.
            spec: All that the program is built for.
            display: Shows that PopTorch compiles.
        """
        spec.refuse_sums()
        while len(programs) >= KEPT_PROGRAMS:
            programs.pop(0).executor.destroy()
        options = spec.options.clone()  # which isn't frozen
        if not display.shows_poptorch_bar:
            options.showCompilationProgressBar(False)
        is_default = options.connection_type == poptorch.ConnectionType.Always
        if is_default and not self._takes_turns and self._attached():
            # IPUs may be short: the program compiles before it takes some, so that it
            # isn't traced twice.
            options.connectionType(poptorch.ConnectionType.OnDemand)
        may_be_sharded = spec.may_be_sharded
        while True:
            try:
                program = self._compiled(spec, options, display)
                break
            except MovedOnDeviceError as error:
                self._moved.extend(error.moved)
            except ShortPipelineError:
                if not may_be_sharded:
                    raise
                # One stage after the other, the numbers are the same.
                may_be_sharded = False
                options = options.clone()
                options.setExecutionStrategy(poptorch.ShardedExecution())
        programs.append(program)
        return program

    def _compiled(
        self, spec: ProgramSpec, options: poptorch.Options, display: ProgressDisplay
    ) -> Any:
        """Let PopTorch trace and compile a program."""
        host_values = host_values_of([self.module, *spec.loss_modules], self._moved)
        step, baked_in = spec.step(host_values), spec.baked_in()
        for check in spec.checks(step):
            check()
        refuse_tied_buffers(step)  # a survey finds them by itself
        weights = weights_of(step)
        remove_wrappers(weights)
        remember_classes(weights)
        values = host_tensors(step.host_values, spec.plan.micro_batches_per_call)
        tensors = [tensor.contiguous() for tensor in (*spec.example, *values)]
        others = [program.baked_in for program in self._programs()]
        with span("compile"), baked_in.record_after_trace(others):
            with contextlib.ExitStack() as stack:
                # PopTorch may give weights classes of its own even if it fails, and
                # refuses to wrap them again: `destroy()` does nothing so early.
                stack.callback(remove_wrappers, weights)
                stack.enter_context(traced_mode(step))
                executor = spec.executor(step, options)
                while self._news:
                    display.noted(self._news.pop(0))
                start = time.perf_counter()

                def attach() -> None:
                    if executor.isCompiled():  # and IPUs were short after it
                        executor.attachToDevice()
                    else:
                        try:
                            executor.compile(*tensors)
                        except DataError as error:
                            first = [tensor[:1] for tensor in spec.example]
                            _refuse_index(error, step.module, first, "the first sample")
                            raise

                stack.enter_context(display.compiling(spec.name))
                self._acquire(executor, attach)
                program = spec.program(executor, step, baked_in)
            seconds = time.perf_counter() - start
            try:  # it calls losses, as the trace does
                spec.on_host.refuse_traced_sums(step)
            except ConfigError:
                executor.destroy()
                raise
        self.seconds += seconds
        display.compiled(spec.name, seconds)
        ending = f": {spec.remark}" if spec.remark else ""
        logger.info("Compiled the %s program in %.1f s%s", spec.name, seconds, ending)
        if executor.isAttachedToDevice():
            program.on_device = fingerprint(step.weights)
        return program

    @uninterrupted
    def place(self, config: IPUConfig, news: str) -> None:
        """Download the weights, and use other stages for later programs.

        Args:
            config: The config with the stages.
            news: Line about the stages, which is shown with the next compilation.
        """
        self._set_config(config)
        self.drop_training()
        _drop(self._inferences)
        self._news = [news]

    @uninterrupted
    def drop_training(self) -> None:
        """Download the weights, and destroy the training programs."""
        self._leave_training()
        _drop(self._trainings)

    # Calls ------------------------------------------------------------------

    @uninterrupted
    def train(
        self, program: TrainingProgram, batch: list[Tensor]
    ) -> tuple[Tensor, Any]:
        """Make one call of a training program.

        Changes of the optimizer since the last call, such as another learning rate,
        take effect in this call.

        Args:
            program: The program, which is kept.
            batch: Tensors of the call.

        Returns:
            The vectors of metrics' sums, and the outputs if the program returns them.

        Raises:
            ConfigError: A value that is compiled into the program has changed.
        """
        self._take_over()  # a callback may have trained another model
        if self._has_lent:
            self.take_back()
        program.check()
        if program is not self._trainer:  # another run had a program of its own
            self._leave_training()
            self._trainer, program.must_compare = program, True
            self._bind_optimizer(program, program.optimizer)
        self._attach(program)
        if self._ahead is None:
            program.wrappers.take_off()
            wide = [w for w in program.weights if w.dtype == torch.float64]
            self._exact = [(weight, weight.detach().clone()) for weight in wide]
        if program.must_compare:
            self._refresh(program)
        values = OptimizerValues(program.optimizer).variable
        if values != program.sent:
            program.executor.setOptimizer(program.optimizer)
            program.sent = values
        program.on_device, program.must_compare = None, True  # if the call fails
        vector, _, *outputs = program.run(batch)
        if self._ahead is None:
            program.wrappers.put_on(self._copy_weights_to_host)
        self._ahead, program.must_compare = program, False
        Executors._num_trained = program.num_trained = Executors._num_trained + 1
        if program.counted_up:  # without fetching the buffers from the device
            with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
                for buffer, number in program.counted_up:
                    Tensor.add_(buffer, number)
        if not outputs:
            return vector, None
        packing = program.step.findings.packing
        return vector, packing.nest(packing.split(outputs)[0])

    @uninterrupted
    def infer(
        self, program: Program, batch: list[Tensor]
    ) -> tuple[list[Tensor], Scalars]:
        """Make one call of an inference program, with the newest weights.

        Args:
            program: The program, which is kept.
            batch: Tensors of the call; the program takes those that it needs.

        Returns:
            The flat tensors of the model's outputs; and the scalars of every
            micro-batch, by name.

        Raises:
            ConfigError: A value that is compiled into the program has changed.
        """
        program.check()
        if program.num_trained != Executors._num_trained or not self._has_lent:
            self.fetch_weights()  # something was trained between two calls
            if not self._has_lent:
                self.share_buffers()
            program.must_compare, program.num_trained = True, Executors._num_trained
        self._attach(program)
        if program.must_compare:
            self._refresh(program)
        returned = program.run(batch[: program.step.num_given])
        return program.step.findings.packing.split(returned)

    # Weights ----------------------------------------------------------------

    @uninterrupted
    def fetch_weights(self) -> None:
        """Bring the newest weights to the host, where they may be read and changed.

        A training call leaves the newest weights on its device, and nothing is copied
        until the other side needs them. They are copied to the host when

        * Python reads a weight of the module, which the user has (`Wrappers`);
        * ipufit reads or changes the module: it saves, copies, checks, exports or
          summarizes the model, or sets or averages its weights;
        * an inference program is prepared, or called after training, because it gets
          its weights from the host;
        * another program trains, or another model that has some of the weights, for
          the same reason;
        * the IPUs are released, because attaching a program uploads the host's weights;
        * a run ends or the model is deleted, because nothing of ipufit may be called
          afterwards;
        * a call ends and there is a running average, which is computed on the host: the
          device keeps the newest weights (`weights_shown`).

        After each of these but the last, the host may have changed the weights. So the
        next call of each program compares, and copies them to the device if they differ
        (`_refresh`). PopTorch copies them itself when a program is attached.
        (`begin_alike` and `share_buffers` copy them from process 0 to other processes.)
        `docs/concepts/calls.md` counts the copies that each method makes.
        """
        with span("weights"):
            for model in (self, *self._sharing()):
                model._copy_weights_to_host()
                if model._trainer is not None:
                    model._trainer.wrappers.take_off()
            for program in self._programs():
                program.must_compare = True

    @uninterrupted
    def _copy_weights_to_host(self) -> None:
        """Download the newest weights to the host, and keep the wrapper classes."""
        program = self._ahead
        if program is not None:
            with self.weights_shown():
                program.on_device = fingerprint(program.weights)
                program.must_compare = True
            self._ahead = None

    @contextlib.contextmanager
    def weights_shown(self) -> Iterator[None]:
        """Provide the newest weights in the user's module, read-only."""
        program = self._ahead
        if program is None:
            yield
            return
        self._ahead = None  # PopTorch itself touches weights when it fetches them
        program.wrappers.take_off()
        program.executor.copyWeightsToHostIfNeeded()
        restore_exact(self._exact)
        try:
            yield
        finally:
            program.wrappers.put_on(self._copy_weights_to_host)
            self._ahead = program

    @uninterrupted
    def begin_alike(self, more: Iterable[torch.nn.Module] = ()) -> None:
        """Copy the weights of process 0 to all processes, at the first call only.

        Afterwards all processes make the same updates, and only buffers differ.

        Args:
            more: Further modules, such as losses with weights.
        """
        if not self._processes.are_several or self._are_alike:
            return
        self.fetch_weights()
        modules = (self.module, *more)
        with torch.no_grad():
            self._processes.broadcast([w for m in modules for w in weights_of(m)])
        self._are_alike = True

    @uninterrupted
    @torch.no_grad()
    def share_buffers(self) -> None:
        """Copy the buffers of process 0 to all processes.

        Each replica has its own running statistics, such as those of batch norm.
        Evaluations and the end of training use the first replica's buffers, so that all
        processes have the same results. Before training continues, `take_back` restores
        the buffers of each process: otherwise only some devices would get their weights
        again.
        """
        buffers = list(self.module.buffers())
        if self._processes.are_several and buffers:
            self.fetch_weights()
            self.take_back()
            before = [buffer.detach().clone() for buffer in buffers]
            self._processes.broadcast(buffers)
            if not self._processes.is_first:
                self._lent = list(zip(buffers, map(checksum, buffers), before))
        self._has_lent = True

    @uninterrupted
    @torch.no_grad()
    def take_back(self) -> None:
        """Restore the buffers that `share_buffers` replaced, except changed ones."""
        for buffer, lent, before in self._lent:
            if checksum(buffer) == lent:
                buffer.copy_(before)
        self._lent, self._has_lent = [], False

    def _refresh(self, program: Program) -> None:
        """Upload the host's weights if those on the device differ."""
        program.must_compare = False
        if program is self._ahead:
            return
        now = fingerprint(program.weights)
        if program.on_device != now:
            with span("weights"):
                program.executor.copyWeightsToDevice()
            program.on_device = now

    @staticmethod
    def _bind_optimizer(
        program: TrainingProgram, optimizer: torch.optim.Optimizer
    ) -> None:
        """Connect another optimizer of the same kind to a compiled program.

        An optimizer without a state gets the initial state of a new program.
        """
        executor, previous = program.executor, program.optimizer
        if previous is not optimizer:
            if not optimizer.has_state():  # type: ignore[attr-defined]
                _give_first_state(optimizer, previous)
                if program.random_state is not None:
                    executor.rng_state = program.random_state
            program.optimizer, program.sent = optimizer, ()
        if previous is not optimizer or not executor.isAttachedToDevice():
            # Another program may have had it meanwhile: `optimizer.state_dict()` reads
            # from the executor that it was set on last.
            _give_states(optimizer, program.step)
            executor.setOptimizer(optimizer)

    # IPUs -------------------------------------------------------------------

    def _attached(self) -> list[Program]:
        """Return the programs that hold IPUs."""
        return [kept for kept in self._programs() if kept.executor.isAttachedToDevice()]

    def _attach(self, program: Program) -> None:
        """Attach a program if it isn't attached; this uploads the host's weights.

        A program that was compiled for an offline target stays detached.
        """
        executor = program.executor
        if executor.isAttachedToDevice():
            return
        if executor.options.connection_type == poptorch.ConnectionType.Never:
            return
        self._acquire(executor, executor.attachToDevice)
        program.on_device = fingerprint(program.weights)
        if isinstance(program, TrainingProgram):
            program.sent = ()  # the optimizer's state brings the values of its time

    def _acquire(
        self, executor: poptorch.PoplarExecutor, action: Callable[[], Any]
    ) -> None:
        """Call a function that needs IPUs, and detach other programs if needed."""
        others = [
            (owner, program)
            for owner in (self, *self._lenders)
            for program in owner._attached()
            if program.executor is not executor
        ]
        if not self._takes_turns:
            try:
                action()
            except poptorch.Error as error:
                if "acquire" not in str(error):
                    raise
                gc.collect()  # executors of models that are gone hold IPUs until then
                self._takes_turns = bool(others)
            else:
                return
        for owner, other in others:
            owner._detach(other)
        action()

    def _detach(self, program: Program) -> None:
        """Detach a program."""
        if isinstance(program, TrainingProgram):
            self.fetch_weights()
        program.executor.detachFromDevice()

    def _leave_training(self) -> None:
        """Download weights and optimizer state, for another program."""
        if self._trainer is not None:
            self.fetch_weights()
            if self._trainer.executor.isAttachedToDevice():
                self._trainer.executor.detachFromDevice()
            self._trainer = None

    @uninterrupted
    def detach(self) -> None:
        """Release all IPUs; the next run acquires them again."""
        for program in self._attached():
            self._detach(program)


def _drop(programs: list[Any]) -> None:
    """Destroy all programs in a list, and empty it."""
    while programs:
        programs.pop().executor.destroy()


def _give_states(optimizer: torch.optim.Optimizer, step: torch.nn.Module) -> None:
    """Add initial states to an optimizer for weights that it hasn't trained yet.

    PopTorch uploads the state that the optimizer has from another program, and logs a
    line for each missing tensor: those of layers that were frozen then. The added
    states are zeros, as on the device. (Values such as learning rates are sent before
    the first call; the added ones don't matter.)

    Args:
        optimizer: An optimizer of `poptorch.optim`.
        step: Module that PopTorch traces; its parameters have PopTorch's names.
    """
    if not optimizer.has_state():  # type: ignore[attr-defined]
        return
    state = optimizer.state_dict()
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        shapes = {name: weight.shape for name, weight in step.named_parameters()}
    is_full = True
    for part in ("ipu_state", "ipu_param"):
        full = dict(state.get(part) or {})
        kinds: dict[str, list[str]] = {}  # names are a kind of state, `___`, a weight's
        for key in full:
            start, mark, name = key.rpartition("___")
            if name in shapes:
                kinds.setdefault(start + mark, []).append(name)
        for kind, names in kinds.items():
            has_shape = all(full[kind + name].shape == shapes[name] for name in names)
            like = torch.as_tensor(full[kind + names[0]])
            for name, shape in shapes.items():
                if name not in names:
                    full[kind + name] = like.new_zeros(
                        shape if has_shape else like.shape
                    )
                    is_full = False
        if full:
            state[part] = full
    if not is_full:
        optimizer.load_state_dict(state)


_LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"


def _give_first_state(
    optimizer: torch.optim.Optimizer, previous: torch.optim.Optimizer
) -> None:
    """Set the state of an optimizer to the initial state on a device.

    The state is zeros, and 1 for the factor of automatic loss scaling (PopART,
    `addStateTensor`; `program_key` excludes the optimizer that begins otherwise).

    Args:
        optimizer: An optimizer without a state.
        previous: An optimizer of the same kind and parameters; the device has its
            state.
    """
    state = previous.state_dict()
    if state["ipu_state"] is None:
        return
    first = {
        name: torch.full_like(torch.as_tensor(value), float(name == _LOSS_SCALE_FACTOR))
        for name, value in state["ipu_state"].items()
    }
    more = {"ipu_state": first, "ipu_param": state["ipu_param"]}
    optimizer.load_state_dict({**optimizer.state_dict(), **more})


GRADIENT_OF = "gradient of "


def gradient_anchors(names: Iterable[str]) -> dict[str, str]:
    """Return PopART's names of parameters' gradients, by ipufit's names.

    Args:
        names: Names of the parameters.

    Example:
        >>> gradient_anchors(["0.weight"])
        {'gradient of 0.weight': 'Gradient___module.0.weight'}
    """
    return {GRADIENT_OF + name: f"Gradient___{MODULE}{name}" for name in names}


class TrialFindings(NamedTuple):
    """What a trial trace of a training program finds.

    Attributes:
        survey: The emulator's survey.
        refusals: Errors that `fit` would raise before PopTorch traces the program.
        warnings: Warnings that `fit` would give in the trace.
        tensors: Tensors of the micro-batch.
    """

    survey: Any
    refusals: list[IpufitError]
    warnings: list[IpufitWarning]
    tensors: list[Tensor]


def survey_training(spec: TrainingSpec) -> TrialFindings:
    """Trace the training program, and record all refusals without changing the module.

    Args:
        spec: The spec of the program; the first micro-batch of its call is traced.

    Raises:
        UnsupportedError: This process runs on PopTorch itself.
    """
    tensors = [*spec.on_host.example]
    moved: list[HostValue] = []
    while True:
        host_values = host_values_of([spec.module, *spec.loss_modules], moved)
        step, baked_in = spec.step(host_values), spec.baked_in()
        refusals: list[IpufitError] = []
        for check in (*spec.module_checks(), *spec.checks(step)):
            try:
                check()
            except IpufitError as error:
                refusals.append(error)
        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(baked_in.record_after_trace())
            stack.enter_context(traced_mode(step))
            stack.enter_context(torch.enable_grad())
            results = survey()(
                step,
                [*tensors, *host_tensors(host_values, 1)],
                spec.options,
                is_training=True,
                optimizer=spec.optimizer,
            )
            is_whole = results.error is None
            is_whole &= not any(remark.is_refused for remark in results.remarks)
            baked_in.may_call = is_whole
        if isinstance(results.error, MovedOnDeviceError):
            moved += results.error.moved
        elif not isinstance(results.error, CountsMissingError):
            break
    try:
        spec.refuse_sums()
        spec.on_host.refuse_traced_sums(step)
    except ConfigError as error:
        refusals.append(error)
    messages = [warning.message for warning in caught]
    ours = [message for message in messages if isinstance(message, IpufitWarning)]
    return TrialFindings(results, refusals, ours, tensors)
