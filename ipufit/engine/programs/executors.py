# SPDX-License-Identifier: Apache-2.0
"""The programs of one module: built, attached, run, and their weights in step.

The newest weights are in the host's module, or on the device of the training program;
they are moved when somebody needs them elsewhere, and only if they differ.
"""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any, Callable, Collection, ContextManager, MutableMapping

import torch
from torch import Tensor

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, TrainingBatches
from ipufit.engine.baked_in.values import changes_accepted
from ipufit.engine.objective.figures import Entry
from ipufit.engine.objective.objective import Objective
from ipufit.engine.traced.packing import Packing
from ipufit.engine.traced.refusals import (
    refuse_gradient_hooks,
    refuse_synchronised_norms,
)
from ipufit.engine.traced.stages import check_stage_names
from ipufit.engine.weights.fingerprint import fingerprint
from ipufit.engine.weights.modes import TrainedParts
from ipufit.engine.weights.wrapping import make_plain, weights_of
from ipufit.optimizers import Optimization
from ipufit.scalars import Scalars
from ipufit.types import Batch

from .building import Builder, Compile
from .host_weights import HostWeights
from .optimizer_link import bind_optimizer, send_changes
from .programs import KeptPrograms, Program, TrainingProgram

_TRAINERS: MutableMapping[torch.nn.Module, weakref.ReferenceType[Executors]] = (
    weakref.WeakKeyDictionary()
)
"""Who trains a module: PopTorch wraps its weights for one program at a time."""


class Executors:
    """The training and the inference programs of one module.

    The programs used last are kept (`KEPT_PROGRAMS` of each kind), so that batches of
    another size, or another evaluation in between, compile nothing again.

    Args:
        module: The user's.
        config: How it is laid out.
    """

    def __init__(self, module: torch.nn.Module, config: IPUConfig) -> None:
        check_stage_names(module, config.stages)
        self._builder = Builder(module, config)
        self._trainings: KeptPrograms[TrainingProgram] = KeptPrograms()
        self._inferences: KeptPrograms[Program] = KeptPrograms()
        self._training: TrainingProgram | None = None
        self._inference: Program | None = None
        self._takes_turns = _env.waits_for_ipus()
        self._on_host = HostWeights()

    # Programs ---------------------------------------------------------------

    def prepare_training(
        self,
        batches: TrainingBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        optimization: Optimization,
        objective: Objective,
        anchors: Collection[str],
        display: ProgressDisplay,
    ) -> tuple[Entry, ...]:
        """Have the training program attached; its next call has the host's weights.

        It is compiled if none of those kept is for such data, this plan, loss,
        optimizer and anchors, these trainable weights and modes, and the values that
        the code reads now.

        Args:
            batches: Show what a call looks like.
            plan: The factors of a call.
            options: Its options.
            optimization: The optimiser.
            objective: What is minimised, and what is measured.
            anchors: What else comes back: the names that the options give these.
            display: Hears of the compilation.

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
            sorted(anchors),
        )
        self._take_over()
        if self._training is not None and self._training.baked_in.changed():
            self._leave_training()
        program = self._trainings.get(key)
        if program is not self._training:
            self._leave_training()
        if program is None:
            self._trainings.make_room()
            options = self._own(options)
            with self._changes_accepted():
                program = self._builder.training(
                    batches.structure,
                    objective,
                    optimization.optimizer,
                    options,
                    plan.micro_batches_per_call,
                    self._compile("training", example, display),
                )
            self._trainings.add(key, program)
        self._training = program
        bind_optimizer(program, optimization.optimizer)
        self._attach(program)
        program.is_due = True
        return program.findings.entries

    def _take_over(self) -> None:
        """Have another model, that trains the same module, bring its weights back."""
        reference = _TRAINERS.get(self.module)
        owner = None if reference is None else reference()
        if owner is not self:
            if owner is not None:
                owner._leave_training()
            make_plain(weights_of(self.module))  # of an owner that is gone, too
            _TRAINERS[self.module] = weakref.ref(self)

    def prepare_inference(
        self,
        batches: InferenceBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        display: ProgressDisplay,
        *,
        owns_loss: bool,
    ) -> None:
        """The same for the inference program, with what training has learnt.

        Args:
            batches: Show what a call looks like.
            plan: The factors of a call.
            options: Its options.
            display: Hears of the compilation.
            owns_loss: Whether the module returns its own loss.
        """
        self.fetch_weights()
        example = batches.example()
        key = (_signature(plan, example), batches.structure.inputs, owns_loss)
        program = self._inferences.get(key)
        if program is None:
            self._inferences.make_room()
            options = self._own(options)
            with self._changes_accepted():
                program = self._builder.inference(
                    batches.structure,
                    options,
                    plan.micro_batches_per_call,
                    self._compile("inference", example, display),
                    owns_loss=owns_loss,
                )
            self._inferences.add(key, program)
        self._inference = program
        self._attach(program)
        program.is_due = True

    @property
    def inference_program(self) -> object:
        """The inference program there is now, to tell it from others."""
        return self._inference

    @property
    def gives_scalars(self) -> bool:
        """Whether the inference program gives scalars: an own loss, or logged ones."""
        return bool(_ready(self._inference).findings.packing.names)

    @property
    def probabilities(self) -> dict[str, str]:
        """The outputs of the inference program that are probabilities, by name."""
        found: dict[str, str] = _ready(self._inference).findings.probabilities
        return found

    def _compile(self, what: str, example: Batch, display: ProgressDisplay) -> Compile:
        def compile_it(executor: poptorch.PoplarExecutor, values: list[Tensor]) -> None:
            display.compiling(what)
            start = time.perf_counter()
            given = [tensor.contiguous() for tensor in (*example, *values)]

            def build() -> None:
                if executor.isCompiled():  # and IPUs were short after it
                    executor.attachToDevice()
                else:
                    executor.compile(*given)

            self._with_ipus(executor, build)
            display.compiled(what, time.perf_counter() - start)

        return compile_it

    def _changes_accepted(self) -> ContextManager[None]:
        programs = (*self._trainings, *self._inferences)
        return changes_accepted([program.baked_in for program in programs])

    def compile_anew(self) -> None:
        """Forget the programs that may have values which nobody looks at.

        Who has changed such a value calls `compile()` to have it count.
        """
        if self._training and not self._training.baked_in.is_complete:
            self._leave_training()
        self._trainings.drop_unsure()
        self._inferences.drop_unsure()

    def _own(self, options: poptorch.Options) -> poptorch.Options:
        """A copy that isn't frozen yet: a run may need a second program.

        If IPUs may be short, it compiles before it takes some: none is traced twice.
        """
        own = options.clone()
        is_default = own.connection_type == poptorch.ConnectionType.Always
        if is_default and not self._takes_turns and self._attached():
            own.connectionType(poptorch.ConnectionType.OnDemand)
        return own

    # Runs -------------------------------------------------------------------

    def train(self, batch: list[Tensor]) -> tuple[Tensor, Any]:
        """One call of the training program.

        What was changed in the optimiser since the last one, such as the learning
        rate, counts from this call on.

        Returns:
            The sums that came back, and the outputs if the program returns them.

        Raises:
            ConfigError: The code would read another value now than the program has.
        """
        program = _ready(self._training)
        program.baked_in.check()
        program.trained_parts.check()
        self._attach(program)
        self._on_host.begin_call(program)
        if program.is_due:
            self._refresh(program)
        send_changes(program)
        program.held, program.is_due = None, True  # if the call fails
        vector, _, *outputs = program.run(batch)
        self._on_host.end_call(program)
        program.counters.count_call()
        if not outputs:
            return vector, None
        return vector, program.findings.packing.unpack(outputs)[0]

    def anchored(self, name: str) -> Tensor:
        """What an anchor of the training program saw in the last call.

        Returns:
            One value after the other in dim 0, as the output mode returns them.
        """
        value: Tensor = _ready(self._training).executor.getAnchoredTensor(name)
        return value

    def infer(self, batch: list[Tensor]) -> tuple[Any, Scalars]:
        """One call of the inference program.

        Returns:
            The model's outputs; and the scalars of every micro-batch, if it gives any.

        Raises:
            ConfigError: The code would read another value now than the program has.
        """
        program = _ready(self._inference)
        program.baked_in.check()
        self._attach(program)
        if program.is_due:
            self._refresh(program)
        packing: Packing = program.findings.packing
        return packing.unpack(program.run(batch))

    # Weights ----------------------------------------------------------------

    def fetch_weights(self) -> None:
        """Bring what training has learnt into the user's module.

        The host may change it there: the next call compares.
        """
        self._on_host.bring()
        if self._training is not None:
            self._training.wrappers.take_off()

    def weights_shown(self) -> ContextManager[None]:
        """Have what training has learnt in the user's module, to be read only."""
        return self._on_host.shown()

    def send_weights(self) -> None:
        """Have the next calls go on with the weights of the user's module."""
        self._on_host.be_newest()
        for program in (*self._trainings, *self._inferences):
            make_plain(program.weights)
            program.is_due = True

    def _refresh(self, program: Program) -> None:
        """Upload the host's weights, if the device has others."""
        program.is_due = False
        if self._on_host.is_behind(program):
            return
        now = fingerprint(program.weights)
        if program.held != now:
            program.executor.copyWeightsToDevice()
            program.held = now

    @property
    def config(self) -> IPUConfig:
        """How the module is laid out."""
        return self._builder.config

    @property
    def module(self) -> torch.nn.Module:
        """The user's."""
        return self._builder.module

    def device_random_state(self) -> list[int] | None:
        """The random state of the training program's device; None if it has none."""
        program = self._training
        state = None if program is None else program.executor.rng_state
        return None if state is None else list(state)

    def set_device_random_state(self, state: list[int]) -> None:
        """Have the training program's device go on from a random state."""
        _ready(self._training).executor.rng_state = state

    # Devices ----------------------------------------------------------------

    def _attached(self) -> list[Program]:
        """The programs that hold IPUs."""
        programs = (*self._inferences, *self._trainings)
        return [one for one in programs if one.executor.isAttachedToDevice()]

    def _attach(self, program: Program) -> None:
        """Attach a program if it isn't, which uploads the host's weights."""
        if program.executor.isAttachedToDevice():
            return
        self._with_ipus(program.executor, program.executor.attachToDevice)
        program.held = fingerprint(program.weights)
        if isinstance(program, TrainingProgram):
            program.sent = ()  # the optimiser's state brings the values of its time

    def _with_ipus(
        self, executor: poptorch.PoplarExecutor, action: Callable[[], Any]
    ) -> None:
        """Do what needs IPUs, and make other programs give way if they are short."""
        others = [one for one in self._attached() if one.executor is not executor]
        if not self._takes_turns:
            try:
                action()
            except poptorch.Error as error:
                if "acquire" not in str(error):
                    raise
                gc.collect()  # PopTorch's executors of models that are gone
                self._takes_turns = bool(others)
            else:
                return
        for other in others:
            self._detach(other)
        action()

    def _detach(self, program: Program) -> None:
        if program is self._training:
            self.fetch_weights()
        program.executor.detachFromDevice()

    def _leave_training(self) -> None:
        """Have weights and the optimiser's state on the host, for another program."""
        if self._training is not None:
            self.fetch_weights()
            if self._training.executor.isAttachedToDevice():
                self._detach(self._training)
            self._training = None

    def detach(self) -> None:
        """Give all IPUs back; the next run takes them again."""
        for program in self._attached():
            self._detach(program)

    def drop_training(self) -> None:
        """Forget the training programs; the weights come back first."""
        self._leave_training()
        self._trainings.clear()


def _signature(plan: BatchPlan, example: Batch) -> tuple[Any, ...]:
    """What a program was compiled for: anything else needs another."""
    return plan, [(tuple(tensor.shape), tensor.dtype) for tensor in example]


def _ready(program: Any) -> Any:
    if program is None:
        raise RuntimeError("the program was not prepared")
    return program
