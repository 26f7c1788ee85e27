# SPDX-License-Identifier: Apache-2.0
"""The programs of one module: built, attached, run, and their weights in step.

The newest weights are in the host's module, or on the device of the training program;
they are moved when somebody needs them elsewhere, and only if they differ.
"""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Any,
    Callable,
    ContextManager,
    List,
    MutableMapping,
    NamedTuple,
    Sequence,
    TypeVar,
)

import torch
from torch import Tensor

from ipufit._poptorch import poptorch, survey
from ipufit._spans import span
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, SampleStructure, TrainingBatches
from ipufit.distributed import Processes
from ipufit.engine.constants import (
    BakedInValues,
    Roots,
    changed_numbers_warned,
    changes_accepted,
    roots_of,
)
from ipufit.engine.device import (
    CommonWeights,
    HostWeights,
    IPUs,
    KeptPrograms,
    Program,
    ProgramT,
    TrainingProgram,
    bind_optimizer,
    give_states,
    ready,
    send_changes,
)
from ipufit.engine.metric_state import Entry
from ipufit.engine.objective import Inferred, Objective
from ipufit.engine.step import (
    InferenceHead,
    Packing,
    ShortPipelineError,
    Step,
    TrainingHead,
    kept_submodules,
    recomputed_between,
    stage_blocks,
)
from ipufit.engine.trace_checks import (
    refuse_gradient_hooks,
    refuse_synchronised_norms,
    refuse_tied_buffers,
    require_trained_weights,
)
from ipufit.engine.weights import (
    Counters,
    HostValue,
    MovedOnDeviceError,
    TrainedParts,
    Wrappers,
    check_values,
    fingerprint,
    host_tensors,
    host_values_of,
    make_plain,
    mode,
    remember_classes,
    weights_of,
)
from ipufit.errors import IpufitError, IpufitWarning
from ipufit.optimizers import Optimization, hyper_parameters
from ipufit.placement import find_beginnings
from ipufit.scalars import Scalars
from ipufit.types import Batch

Compile = Callable[[Any, List[Tensor]], None]
"""Has PopTorch compile an executor, for the tensors at hand and the host's values."""

T = TypeVar("T")


@dataclass(frozen=True)
class Builder:
    """Builds programs of a module, and leaves the module as it was.

    Attributes:
        config: Has its stages and precision.
        moved: 0-d buffers that `forward` changes, as far as traces have shown.
    """

    module: torch.nn.Module
    config: IPUConfig
    moved: list[HostValue] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Refuse names in the config that the module doesn't have."""
        find_beginnings(self.module, self.config)
        find_beginnings(self.module, self.config.inference_config)
        kept_submodules(self.module, self.config.recompute_patterns)

    def training(
        self,
        structure: SampleStructure,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        options: poptorch.Options,
        num_micro_batches: int,
        compile_it: Compile,
    ) -> TrainingProgram:
        """Build a program that trains.

        Args:
            structure: Nesting of a batch.
            objective: Losses and metrics.
            optimizer: An optimiser of `poptorch.optim`.
            options: Options of PopTorch.
            num_micro_batches: Micro-batches of a call, over all replicas.
            compile_it: Compiles the executor.

        Raises:
            MovedOnDeviceError: The trace has shown that buffers move.
        """
        values = host_values_of([self.module, *objective.modules], self.moved)
        head = TrainingHead(objective, structure)
        step = Step(self.module, self.config, structure, values, head)
        give_states(optimizer, step)
        require_trained_weights(step)
        # A state brings the values of its time to the device.
        has_state: bool = optimizer.has_state()  # type: ignore[attr-defined]
        sent = () if has_state else hyper_parameters(optimizer)
        roots = roots_of(self.module, objective)

        def trace(given: list[Tensor]) -> tuple[poptorch.PoplarExecutor, Wrappers]:
            with torch.enable_grad():  # PopTorch traces in the grad mode that it finds
                executor = poptorch.trainingModel(
                    step, options=options, optimizer=optimizer
                )
                compile_it(executor, given)
            return executor, Wrappers(step.weights)

        executor, wrappers = self._traced(
            step, roots, num_micro_batches, trace, training=True
        )
        per_call = options.device_iterations * options.Training.gradient_accumulation
        return TrainingProgram(
            executor,
            step,
            num_micro_batches,
            BakedInValues(roots),
            fingerprint(step.weights) if executor.isAttachedToDevice() else None,
            wrappers,
            optimizer,
            executor.rng_state,
            sent,
            Counters(step, step.findings.increments, per_call),
            TrainedParts(self.module),
        )

    def inference(
        self,
        structure: SampleStructure,
        options: poptorch.Options,
        num_micro_batches: int,
        compile_it: Compile,
        inferred: Inferred,
    ) -> Program:
        """Build a program that computes outputs.

        Args:
            structure: Nesting of a batch.
            options: Options of PopTorch.
            num_micro_batches: Micro-batches of a call, over all replicas.
            compile_it: Compiles the executor.
            inferred: The computation of the program.

        Raises:
            MovedOnDeviceError: The trace has shown that buffers move.
        """
        values = host_values_of([self.module], self.moved)
        head = InferenceHead(inferred)
        config = self.config.inference_config
        step = Step(self.module, config, structure, values, head)
        roots = roots_of(self.module, step=inferred.step)

        def trace(
            given: list[Tensor], options: poptorch.Options = options
        ) -> poptorch.PoplarExecutor:
            executor = poptorch.inferenceModel(step, options=options)
            compile_it(executor, given)
            return executor

        def traced(trace: Callable[[list[Tensor]], T]) -> T:
            return self._traced(step, roots, num_micro_batches, trace, training=False)

        try:
            executor = traced(trace)
        except ShortPipelineError:
            given = config.placement, config.customize, config.inference_options
            if any(one is not None for one in given):
                raise
            # One stage after the other, the numbers are the same.
            sharded = options.clone()
            sharded.setExecutionStrategy(poptorch.ShardedExecution())
            executor = traced(lambda given: trace(given, sharded))
        return Program(
            executor,
            step,
            num_micro_batches,
            BakedInValues(roots),
            fingerprint(step.weights) if executor.isAttachedToDevice() else None,
        )

    def _traced(
        self,
        step: Step,
        roots: Roots,
        num_micro_batches: int,
        trace: Callable[[list[Tensor]], T],
        *,
        training: bool,
    ) -> T:
        """Have PopTorch trace a step, in the right mode and with blocks for stages."""
        check_values(step)
        refuse_tied_buffers(step)
        weights = weights_of(step)
        make_plain(weights)
        remember_classes(weights)
        given = host_tensors(step.host_values, num_micro_batches)
        with contextlib.ExitStack() as stack:
            # PopTorch may give weights classes of its own even if it fails, and
            # refuses to wrap them again: `destroy()` does nothing so early.
            stack.callback(make_plain, weights)
            stack.enter_context(changed_numbers_warned(roots))
            stack.enter_context(mode(step, training=training, root=self.module))
            config = self.config if training else self.config.inference_config
            stack.enter_context(stage_blocks(self.module, config))
            kept = self.config.recompute_patterns if training else ()
            stack.enter_context(recomputed_between(self.module, kept))
            return trace(given)


_TRAINERS: MutableMapping[torch.nn.Module, weakref.ReferenceType[Executors]] = (
    weakref.WeakKeyDictionary()
)
"""Who trains a module: PopTorch wraps its weights for one program at a time."""


class Executors:
    """The training and the inference programs of one module.

    The programs used last are kept (`KEPT_PROGRAMS` of each kind), so that batches of
    another size, or another evaluation in between, build nothing again.

    Args:
        config: Its stages, replicas and precision.
        processes: The processes that run the module together.
    """

    def __init__(
        self, module: torch.nn.Module, config: IPUConfig, processes: Processes
    ) -> None:
        self.common = CommonWeights(module, processes)
        self._builder = Builder(module, config)
        self._news: list[str] = []
        self._trainings: KeptPrograms[TrainingProgram] = KeptPrograms()
        self._inferences: KeptPrograms[Program] = KeptPrograms()
        self._training: TrainingProgram | None = None
        self._inference: Program | None = None
        self._on_host = HostWeights()
        self._ipus = IPUs(self._programs, self._on_host)

    def _programs(self) -> list[Program]:
        return [*self._inferences, *self._trainings]

    # Building ---------------------------------------------------------------

    def prepare_training(
        self,
        batches: TrainingBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        optimization: Optimization,
        objective: Objective,
        watched: list[str],
        display: ProgressDisplay,
        remark: str,
    ) -> tuple[Entry, ...]:
        """Have the training program attached; its next call has the host's weights.

        It is built if none of those kept is for such data, this plan, loss, optimizer
        and watched gradients, these trainable weights and modes, and the values that
        the code reads now.

        Args:
            batches: Batches that it will train on; their first call is an example.
            plan: Factors of a call.
            options: Options of PopTorch.
            optimization: The optimiser and its schedule.
            objective: Losses and metrics.
            watched: Names of the gradients that come back.
            display: Shows that PopTorch compiles.
            remark: Text that it shows afterwards.

        Returns:
            The figures in the vectors that calls return.
        """
        refuse_gradient_hooks([self.module, *objective.modules])
        refuse_synchronised_norms(self.module, plan)
        example = batches.example()
        key = (
            _signature(plan, example),
            batches.structure,
            TrainedParts(self.module),
            objective.program_key,
            optimization.program_key,
            watched,
        )
        self._take_over()
        self.common.begin_alike(self.fetch_weights, objective.modules)
        if self._training is not None and self._training.baked_in.changed():
            self._leave_training()
        program = self._trainings.get(key)
        if program is not self._training:
            self._leave_training()
        if program is None:
            own = self._ipus.cloned(options)
            program = self._built(
                self._trainings,
                key,
                lambda: self._builder.training(
                    batches.structure,
                    objective,
                    optimization.optimizer,
                    own,
                    plan.micro_batches_per_call,
                    self._compile("training", example, display, remark),
                ),
            )
        self._training = program
        bind_optimizer(program, optimization.optimizer)
        self._ipus.attach(program)
        program.must_compare = True
        return program.findings.entries

    def _take_over(self) -> None:
        """Have another model that trains the same module bring its weights back."""
        reference = _TRAINERS.get(self.module)
        owner = None if reference is None else reference()
        if owner is not self:
            if owner is not None:
                owner._leave_training()
            make_plain(weights_of(self.module))  # an owner may be gone
            _TRAINERS[self.module] = weakref.ref(self)

    def prepare_inference(
        self,
        batches: InferenceBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        display: ProgressDisplay,
        inferred: Inferred,
        remark: str = "",
    ) -> None:
        """Have the inference program attached, with what training has learnt.

        Args:
            batches: Batches that it will see; their first call is an example.
            plan: Factors of a call.
            options: Options of PopTorch.
            display: Shows that PopTorch compiles.
            inferred: The computation of the program.
            remark: Text that the display shows after a compilation.
        """
        self.common.begin_alike(self.fetch_weights)
        self.fetch_weights()
        self.share_buffers()
        example = batches.example(inputs_only=not inferred.takes_labels)
        parts = batches.structure.parts
        nesting = parts if inferred.takes_labels else parts[0]
        key = (_signature(plan, example), nesting, inferred)
        program = self._inferences.get(key)
        if program is None:
            own = self._ipus.cloned(options)
            program = self._built(
                self._inferences,
                key,
                lambda: self._builder.inference(
                    batches.structure,
                    own,
                    plan.micro_batches_per_call,
                    self._compile("inference", example, display, remark),
                    inferred,
                ),
            )
        self._inference = program
        self._ipus.attach(program)
        program.must_compare = True

    def _built(
        self,
        kept: KeptPrograms[ProgramT],
        key: object,
        build: Callable[[], ProgramT],
    ) -> ProgramT:
        """Build a program; once more if its trace has shown that buffers move."""
        kept.make_room()
        with changes_accepted([program.baked_in for program in self._programs()]):
            while True:
                try:
                    with span("compile"):
                        program = build()
                    break
                except MovedOnDeviceError as error:
                    self._builder.moved.extend(error.moved)
        kept.add(key, program)
        return program

    def _compile(
        self, what: str, example: Batch, display: ProgressDisplay, remark: str
    ) -> Compile:
        """Have an executor compiled for an example, once IPUs are free.

        Args:
            what: "training" or "inference".
            example: A call's batch.
            display: Shows that PopTorch compiles, and how long it took.
            remark: Text that it shows afterwards.
        """

        def compile_it(executor: poptorch.PoplarExecutor, values: list[Tensor]) -> None:
            display.compiling(what)
            while self._news:
                display.noted(self._news.pop(0))
            start = time.perf_counter()
            given = [tensor.contiguous() for tensor in (*example, *values)]

            def attach() -> None:
                if executor.isCompiled():  # and IPUs were short after it
                    executor.attachToDevice()
                else:
                    executor.compile(*given)

            self._ipus.acquire(executor, attach)
            display.compiled(what, time.perf_counter() - start, remark)

        return compile_it

    def drop_incomplete(self) -> None:
        """Destroy the programs that may have baked in values which nobody compares.

        Who has changed such a value calls `IPUModel.compile()` to have it count.
        """
        if self._training and not self._training.baked_in.is_complete:
            self._leave_training()
        self._trainings.drop_incomplete()
        self._inferences.drop_incomplete()

    def place(self, config: IPUConfig, news: str) -> None:
        """Build programs for other stages from now on; the weights come back first.

        Args:
            config: Has the stages.
            news: Line about them, which is shown with the next compilation.
        """
        moved, self._builder = self._builder.moved, Builder(self.module, config)
        self._builder.moved.extend(moved)
        self.drop_training()
        self._inferences.clear()
        self._inference, self._news = None, [news]

    def drop_training(self) -> None:
        """Destroy the training programs; the weights come back first."""
        self._leave_training()
        self._trainings.clear()

    # Calls ------------------------------------------------------------------

    def train(self, batch: list[Tensor]) -> tuple[Tensor, Any]:
        """Make one call of the training program.

        Changes of the optimiser since the last call, such as another learning rate,
        count from this call on.

        Returns:
            The vectors of figures, and the outputs if the program returns them.

        Raises:
            ConfigError: The code would read another value now than the program has.
        """
        program = ready(self._training)
        self.common.take_back()
        program.baked_in.check()
        program.trained_parts.check()
        self._ipus.attach(program)
        self._on_host.begin_call(program)
        if program.must_compare:
            self._refresh(program)
        send_changes(program)
        program.on_device, program.must_compare = None, True  # if the call fails
        vector, _, *outputs = program.run(batch)
        self._on_host.end_call(program)
        program.counters.count_call()
        if not outputs:
            return vector, None
        return vector, program.findings.packing.unpack(outputs)[0]

    def anchored(self, name: str) -> Tensor:
        """The tensors that an anchor of the training program got in the last call.

        Returns:
            One tensor after the other in dim 0, as the output mode returns them.
        """
        value: Tensor = ready(self._training).executor.getAnchoredTensor(name)
        return value

    def infer(self, batch: list[Tensor]) -> tuple[Any, Scalars]:
        """Make one call of the inference program, with the tensors that it takes.

        Returns:
            The model's outputs; and the scalars of every micro-batch, by name.

        Raises:
            ConfigError: The code would read another value now than the program has.
        """
        program = ready(self._inference)
        program.baked_in.check()
        self._ipus.attach(program)
        if program.must_compare:
            self._refresh(program)
        packing: Packing = program.findings.packing
        return packing.unpack(program.run(batch[: program.step.num_given]))

    def latency(self, *, is_training: bool) -> tuple[float, float, float]:
        """Least, largest and mean latency of the last call in seconds, by PopTorch."""
        program = ready(self._training if is_training else self._inference)
        low, high, mean = program.executor.getLatency()
        return low, high, mean

    # Weights ----------------------------------------------------------------

    def fetch_weights(self) -> None:
        """Bring what training has learnt into the user's module.

        The host may change it there: the next call compares.
        """
        with span("weights"):
            self._on_host.bring_for_good(self._training)

    def share_buffers(self) -> None:
        """Bring what training has learnt, if it has buffers: those of process 0."""
        self.common.share_buffers(self.fetch_weights)

    def weights_shown(self) -> ContextManager[None]:
        """Have what training has learnt in the user's module, to be read only."""
        return self._on_host.shown()

    def send_weights(self) -> None:
        """Have the next calls go on with the weights of the user's module."""
        self._on_host.be_newest()
        for program in self._programs():
            make_plain(program.weights)
            program.must_compare = True

    def _refresh(self, program: Program) -> None:
        """Upload the host's weights, if the device has others."""
        program.must_compare = False
        if self._on_host.is_behind(program):
            return
        now = fingerprint(program.weights)
        if program.on_device != now:
            with span("weights"):
                program.executor.copyWeightsToDevice()
            program.on_device = now

    @property
    def config(self) -> IPUConfig:
        """The config that the programs are built for."""
        return self._builder.config

    @property
    def module(self) -> torch.nn.Module:
        """The user's module."""
        return self._builder.module

    def device_random_state(self) -> list[int] | None:
        """State of the training device's generator; None without a program or seed."""
        program = self._training
        state = None if program is None else program.executor.rng_state
        return None if state is None else list(state)

    def set_device_random_state(self, state: list[int]) -> None:
        """Have the training device's generator go on from a state."""
        ready(self._training).executor.rng_state = state

    @property
    def inference_program(self) -> object:
        """The inference program of now, to be compared by identity."""
        return self._inference

    @property
    def gives_scalars(self) -> bool:
        """Whether the inference program gives scalars: an own loss, or logged ones."""
        return bool(ready(self._inference).findings.packing.names)

    @property
    def probabilities(self) -> dict[str, str]:
        """The outputs of the inference program that are probabilities, by name."""
        found: dict[str, str] = ready(self._inference).findings.probabilities
        return found

    # IPUs -------------------------------------------------------------------

    def _leave_training(self) -> None:
        """Bring weights and the optimiser's state to the host, for another program."""
        if self._training is not None:
            self.fetch_weights()
            if self._training.executor.isAttachedToDevice():
                self._ipus.detach(self._training)
            self._training = None

    def detach(self) -> None:
        """Give all IPUs back; the next run takes them again."""
        for program in self._ipus.attached():
            self._ipus.detach(program)


def _signature(plan: BatchPlan, example: Batch) -> tuple[Any, ...]:
    """The part of a key that two kinds of programs share."""
    return plan, [(tuple(tensor.shape), tensor.dtype) for tensor in example]


class Surveyed(NamedTuple):
    """The findings of a survey of a training program.

    Attributes:
        survey: The survey, as the emulator gives it.
        refusals: Errors that `fit` would raise before PopTorch traces the program.
        warnings: Warnings that it would give meanwhile.
        tensors: Tensors of the micro-batch.
    """

    survey: Any
    refusals: list[IpufitError]
    warnings: list[IpufitWarning]
    tensors: list[Tensor]


def surveyed(
    module: torch.nn.Module,
    config: IPUConfig,
    structure: SampleStructure,
    objective: Objective,
    options: poptorch.Options,
    plan: BatchPlan,
    example: Sequence[Tensor],
) -> Surveyed:
    """Trace what `fit` would train, and note all that is refused.

    Args:
        module: The user's module, whose weights are its own. It stays as it is.
        config: Its stages and precision.
        structure: Nesting of a batch.
        objective: Losses and metrics.
        options: Options of PopTorch.
        plan: Factors of a call.
        example: Tensors of a call; the first micro-batch is traced.

    Raises:
        UnsupportedError: This process runs on PopTorch itself.
    """
    rows = plan.micro_batch_size
    tensors = [tensor[:rows] if tensor.dim() else tensor for tensor in example]
    moved: list[HostValue] = []
    while True:
        values = host_values_of([module, *objective.modules], moved)
        step = Step(
            module, config, structure, values, TrainingHead(objective, structure)
        )
        refusals = _refusals(
            partial(refuse_gradient_hooks, [module, *objective.modules]),
            partial(refuse_synchronised_norms, module, plan),
            partial(require_trained_weights, step),
            partial(check_values, step),
        )
        with contextlib.ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(changed_numbers_warned(roots_of(module, objective)))
            stack.enter_context(mode(step, training=True, root=module))
            stack.enter_context(stage_blocks(module, config))
            stack.enter_context(recomputed_between(module, config.recompute_patterns))
            stack.enter_context(torch.enable_grad())
            given = [*tensors, *host_tensors(values, 1)]
            found = survey()(step, given, options, is_training=True)
        if not isinstance(found.error, MovedOnDeviceError):
            break
        moved += found.error.moved
    given_warnings = [one.message for one in caught]
    ours = [one for one in given_warnings if isinstance(one, IpufitWarning)]
    return Surveyed(found, refusals, ours, tensors)


def _refusals(*checks: Callable[[], None]) -> list[IpufitError]:
    """The errors of checks, one of each that fails."""
    found = []
    for check in checks:
        try:
            check()
        except IpufitError as error:
            found.append(error)
    return found
