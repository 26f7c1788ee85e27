# SPDX-License-Identifier: Apache-2.0
"""The two programs of a model: built when needed, attached by turns, kept in step.

The host's module holds the truth between runs: training brings its weights back when
somebody wants them, and a program that is to run gets the host's. Nothing here relies
on PopTorch noticing by itself, which depends on the order in which models are wrapped.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, Callable, Collection, Iterator, List, MutableMapping, Tuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, TrainingBatches
from ipufit.optimizers import hyper_parameters
from ipufit.scalars import Scalars
from ipufit.types import Batch

from .baked import BakedIn
from .figures import Figures
from .step import Results, Step, check_stage_names, mode, stage_blocks

_Classes = List[Tuple[Tensor, type]]
_TRAINERS: MutableMapping[
    torch.nn.Module, tuple[weakref.ReferenceType[Executors], _Classes]
] = weakref.WeakKeyDictionary()
"""Who trains a module, and the classes that its weights had before."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class Executors:
    """The training and the inference program of one module.

    Args:
        module: The user's.
        config: How it is laid out.
    """

    def __init__(self, module: torch.nn.Module, config: IPUConfig) -> None:
        check_stage_names(module, config.stages)
        self._config = config
        self._step = self._new_step(module)
        self._training: poptorch.PoplarExecutor | None = None
        self._inference: poptorch.PoplarExecutor | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._sent_values: tuple[object, ...] = ()
        self._training_key: Any = None
        self._inference_key: Any = None
        self._takes_turns = _env.waits_for_ipus()
        self._is_host_stale = False
        self._training_baked_in: BakedIn | None = None
        self._inference_baked_in: BakedIn | None = None
        self._training_results = self._results = Results()

    def _new_step(self, module: torch.nn.Module) -> Step:
        return Step(
            module,
            loss_block=self._config.last_block,
            dtype=_DTYPES[self._config.precision],
        )

    # Programs ---------------------------------------------------------------

    def prepare_training(
        self,
        batches: TrainingBatches,
        plan: BatchPlan,
        options: poptorch.Options,
        optimizer: torch.optim.Optimizer,
        figures: Figures,
        anchors: Collection[str],
        display: ProgressDisplay,
    ) -> None:
        """Have the training program attached, with the host's weights.

        It is compiled if it wasn't, or for other data, another plan, another loss,
        other trainable weights, other anchors or other numbers in the module.

        Args:
            batches: Show what a call looks like.
            plan: The factors of a call.
            options: Its options.
            optimizer: Of `poptorch.optim`.
            figures: What comes back; they know what is minimised.
            anchors: What else does: the names that the options give these.
            display: Hears of the compilation.
        """
        if _is_outdated(self._training_baked_in):
            self.drop_training()
        trainable = _trainable(self._step.module)
        example = batches.example()
        signature = _signature(plan, example)
        key = (
            signature,
            batches.layout,
            trainable,
            optimizer,
            figures,
            sorted(anchors),
        )
        if self._training is not None and key == self._training_key:
            if not self._attach(self._training) and not self._is_host_stale:
                self._training.copyWeightsToDevice()
            self._send_changes(self._training)
            return
        self.drop_training()
        self._optimizer, self._sent_values = optimizer, hyper_parameters(optimizer)
        self._take_over()
        if optimizer.state_dict().get("ipu_param"):
            # The device gets these, and rates may have changed since they were read.
            self._sent_values = ()
        self._step.describe_training(batches.layout, figures)
        self._training_results = self._step.training_results
        traced = mode(self._step, training=True, root=self._step.module)
        with traced, self._undone_on_failure():
            self._training = poptorch.trainingModel(
                self._step, options=options, optimizer=optimizer
            )
            display.compiling("training")
            seconds = self._compile(self._training, example)
        losses = figures.objective.modules
        self._training_baked_in = BakedIn(self._step.module, losses)
        self._training_key = key
        display.compiled("training", seconds)

    def _take_over(self) -> None:
        """End the training program that another `Executors` has of this module.

        PopTorch wraps a module for training once at a time. An owner that is gone has
        fetched its weights, but left them with the classes that PopTorch gave them.
        """
        if self._step.module not in _TRAINERS:
            return
        owner, classes = _TRAINERS[self._step.module]
        previous = owner()
        if previous is None:
            _restore(classes)
        else:
            previous.drop_training()

    @contextlib.contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Leave the module unwrapped if its training program can't be compiled.

        `destroy()` does nothing before the first compilation, so PopTorch would keep
        the weights' classes and refuse to wrap the module once its fault is mended.
        """
        step = self._step
        classes = [(t, type(t)) for t in (*step.parameters(), *step.buffers())]
        _TRAINERS[step.module] = weakref.ref(self), classes
        try:
            yield
        except BaseException:
            self.drop_training()
            _restore(classes)
            self._step = self._new_step(step.module)
            raise

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
        if _is_outdated(self._inference_baked_in):
            self.drop_inference()
        example = batches.example()
        key = (_signature(plan, example), batches.layout.inputs, owns_loss)
        if self._inference is not None and key == self._inference_key:
            if not self._attach(self._inference):
                self._inference.copyWeightsToDevice()
            return
        self.drop_inference()
        self._step.describe_inference(batches.layout, owns_loss=owns_loss)
        self._results = self._step.results
        with mode(self._step, training=False):
            self._inference = poptorch.inferenceModel(self._step, options=options)
            display.compiling("inference")
            seconds = self._compile(self._inference, example)
        self._inference_baked_in = BakedIn(self._step.module)
        self._inference_key = key
        display.compiled("inference", seconds)

    @property
    def inference_program(self) -> object:
        """The inference program there is now, to tell it from others."""
        return self._inference

    @property
    def gives_scalars(self) -> bool:
        """Whether the inference program gives scalars: an own loss, or logged ones."""
        return self._results.has_scalars

    def _compile(self, executor: poptorch.PoplarExecutor, example: Batch) -> float:
        start = time.perf_counter()
        example = [tensor.contiguous() for tensor in example]
        others = (self._training_baked_in, self._inference_baked_in)
        before = BakedIn(self._step.module)
        with stage_blocks(self._step.module, self._config.stages):
            self._with_ipus(executor, lambda: executor.compile(*example))
        for other in others:
            if other is not None:
                other.absorb(before)
        return time.perf_counter() - start

    # Runs -------------------------------------------------------------------

    def train(self, batch: list[Tensor]) -> tuple[Tensor, Any]:
        """One call of the training program.

        What was changed in the optimiser since the last one, such as the learning
        rate, counts from this call on.

        Returns:
            The sums that came back, and the outputs if the program returns them.

        Raises:
            ConfigError: The module has a number that the program doesn't have.
        """
        executor = _ready(self._training)
        if self._training_baked_in is not None:
            self._training_baked_in.check()
        self._attach(executor)
        self._send_changes(executor)
        self._is_host_stale = True
        returned = executor(*batch)
        if isinstance(returned, Tensor):
            return returned, None
        return returned[0], self._training_results.unpack(returned[1:])[0]

    def anchored(self, name: str) -> Tensor:
        """What an anchor of the training program saw in the last call.

        Returns:
            One value after the other in dim 0, as the output mode returns them.
        """
        value: Tensor = _ready(self._training).getAnchoredTensor(name)
        return value

    def _send_changes(self, executor: poptorch.PoplarExecutor) -> None:
        if self._optimizer is None:
            return
        values = hyper_parameters(self._optimizer)
        if values != self._sent_values:
            executor.setOptimizer(self._optimizer)
            self._sent_values = values

    def infer(self, batch: list[Tensor]) -> tuple[Any, Scalars]:
        """One call of the inference program.

        Returns:
            The model's outputs; and the scalars of every micro-batch, if it gives any.

        Raises:
            ConfigError: The module has a number that the program doesn't have.
        """
        executor = _ready(self._inference)
        if self._inference_baked_in is not None:
            self._inference_baked_in.check()
        self._attach(executor)
        return self._results.unpack(executor(*batch))

    # Weights ----------------------------------------------------------------

    def fetch_weights(self) -> None:
        """Bring what training has learnt into the user's module."""
        if self._is_host_stale and self._training is not None:
            self._training.copyWeightsToHost()
        self._is_host_stale = False

    @property
    def config(self) -> IPUConfig:
        """How the module is laid out."""
        return self._config

    @property
    def module(self) -> torch.nn.Module:
        """The user's."""
        return self._step.module

    def device_random_state(self) -> list[int] | None:
        """The random state of the training program's device; None if it has none."""
        state = None if self._training is None else self._training.rng_state
        return None if state is None else list(state)

    def set_device_random_state(self, state: list[int]) -> None:
        """Have the training program's device go on from a random state."""
        _ready(self._training).rng_state = state

    def send_weights(self) -> None:
        """Have the devices go on with the weights of the user's module."""
        self._is_host_stale = False
        for program in (self._training, self._inference):
            if program is not None and program.isAttachedToDevice():
                program.copyWeightsToDevice()

    # Devices ----------------------------------------------------------------

    def _attach(self, executor: poptorch.PoplarExecutor) -> bool:
        """Attach if it isn't, which uploads the host's weights; say whether."""
        if executor.isAttachedToDevice():
            return False
        self._with_ipus(executor, executor.attachToDevice)
        return True

    def _with_ipus(
        self, executor: poptorch.PoplarExecutor, action: Callable[[], Any]
    ) -> None:
        """Do what needs IPUs, and make the other program give way if they are short."""
        other = self._inference if executor is self._training else self._training
        if self._takes_turns:
            self._detach(other)
        try:
            action()
        except poptorch.Error as error:
            is_short = "acquire" in str(error)
            if not is_short or other is None or not other.isAttachedToDevice():
                raise
            self._takes_turns = True
            self._detach(other)
            action()

    def _detach(self, executor: poptorch.PoplarExecutor | None) -> None:
        if executor is None or not executor.isAttachedToDevice():
            return
        if executor is self._training:
            self.fetch_weights()
        executor.detachFromDevice()

    def detach(self) -> None:
        """Give all IPUs back; the next run takes them again."""
        self._detach(self._training)
        self._detach(self._inference)

    def drop_training(self) -> None:
        """Forget the training program; its weights come back first."""
        if self._training is not None:
            self.fetch_weights()
            self._training.destroy()
        self._training = self._training_key = self._training_baked_in = None

    def drop_inference(self) -> None:
        """Forget the inference program."""
        if self._inference is not None:
            self._inference.destroy()
        self._inference = self._inference_key = self._inference_baked_in = None


def _signature(plan: BatchPlan, example: Batch) -> tuple[Any, ...]:
    """What a program was compiled for: anything else needs another."""
    return plan, [(tuple(tensor.shape), tensor.dtype) for tensor in example]


def _trainable(module: torch.nn.Module) -> list[bool]:
    """Whether each parameter is trained.

    PopTorch fetches all weights when somebody looks at a parameter that it trains: not
    for this.
    """
    with DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        return [
            object.__getattribute__(parameter, "requires_grad")
            for parameter in module.parameters()
        ]


def _is_outdated(baked_in: BakedIn | None) -> bool:
    return baked_in is not None and baked_in.is_outdated()


def _restore(classes: _Classes) -> None:
    for tensor, original in classes:
        tensor.__class__ = original


def _ready(executor: poptorch.PoplarExecutor | None) -> poptorch.PoplarExecutor:
    if executor is None:
        raise RuntimeError("the program was not prepared")
    return executor
