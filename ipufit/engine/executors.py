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
from typing import Any, Callable, Iterator, List, MutableMapping, Tuple

import torch
from torch import Tensor

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.config import IPUConfig
from ipufit.data import Source
from ipufit.losses import Loss
from ipufit.metrics import MetricCollection
from ipufit.optimizers import hyper_parameters

from .step import Step, check_stage_names, mode, stage_blocks

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

    def _new_step(self, module: torch.nn.Module) -> Step:
        return Step(
            module,
            loss_block=self._config.last_block,
            dtype=_DTYPES[self._config.precision],
        )

    # Programs ---------------------------------------------------------------

    def prepare_training(
        self,
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        figures: MetricCollection,
        display: ProgressDisplay,
    ) -> None:
        """Have the training program attached, with the host's weights.

        It is compiled if it wasn't, or for other data, another plan, another loss or
        other trainable weights.

        Args:
            source: Shows what a sample looks like.
            plan: The factors of a call.
            options: Its options.
            optimizer: Of `poptorch.optim`.
            loss: What is minimised.
            figures: What comes back.
            display: Hears of the compilation.
        """
        trainable = [p.requires_grad for p in self._step.module.parameters()]
        signature = _signature(source, plan, has_targets=True)
        key = (signature, trainable, optimizer, loss, figures)
        if self._training is not None and key == self._training_key:
            if not self._attach(self._training):
                self._training.copyWeightsToDevice()
            self._send_changes(self._training)
            return
        self.drop_training()
        self._optimizer, self._sent_values = optimizer, hyper_parameters(optimizer)
        self._take_over()
        self._step.describe(source.inputs, source.targets, loss, figures)
        with mode(self._step, training=True), self._undone_on_failure():
            self._training = poptorch.trainingModel(
                self._step, options=options, optimizer=optimizer
            )
            display.compiling("training")
            seconds = self._compile(self._training, source, plan, has_targets=True)
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
        source: Source,
        plan: BatchPlan,
        options: poptorch.Options,
        display: ProgressDisplay,
    ) -> None:
        """The same for the inference program, with what training has learnt."""
        self.fetch_weights()
        key = _signature(source, plan, has_targets=False)
        if self._inference is not None and key == self._inference_key:
            if not self._attach(self._inference):
                self._inference.copyWeightsToDevice()
            return
        self.drop_inference()
        self._step.describe_inputs(source.inputs)
        with mode(self._step, training=False):
            self._inference = poptorch.inferenceModel(self._step, options=options)
            display.compiling("inference")
            seconds = self._compile(self._inference, source, plan, has_targets=False)
        self._inference_key = key
        display.compiled("inference", seconds)

    def _compile(
        self,
        executor: poptorch.PoplarExecutor,
        source: Source,
        plan: BatchPlan,
        *,
        has_targets: bool,
    ) -> float:
        start = time.perf_counter()
        example = source.example(plan.samples_per_call, has_targets=has_targets)
        with stage_blocks(self._step.module, self._config.stages):
            self._with_ipus(executor, lambda: executor.compile(*example))
        return time.perf_counter() - start

    # Runs -------------------------------------------------------------------

    def train(self, batch: list[Tensor]) -> Tensor:
        """One call of the training program; gives the sums that came back.

        What was changed in the optimiser since the last one, such as the learning
        rate, counts from this call on.
        """
        executor = _ready(self._training)
        self._attach(executor)
        self._send_changes(executor)
        self._is_host_stale = True
        sums: Tensor = executor(*batch)
        return sums

    def _send_changes(self, executor: poptorch.PoplarExecutor) -> None:
        if self._optimizer is None:
            return
        values = hyper_parameters(self._optimizer)
        if values != self._sent_values:
            executor.setOptimizer(self._optimizer)
            self._sent_values = values

    def infer(self, batch: list[Tensor]) -> Any:
        """One call of the inference program; gives the model's outputs."""
        return _ready(self._inference)(*batch)

    # Weights ----------------------------------------------------------------

    def fetch_weights(self) -> None:
        """Bring what training has learnt into the user's module."""
        if self._is_host_stale and self._training is not None:
            self._training.copyWeightsToHost()
        self._is_host_stale = False

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
        self._training = self._training_key = None

    def drop_inference(self) -> None:
        """Forget the inference program."""
        if self._inference is not None:
            self._inference.destroy()
        self._inference = self._inference_key = None


def _signature(
    source: Source, plan: BatchPlan, *, has_targets: bool
) -> tuple[Any, ...]:
    """What a program was compiled for: anything else needs another."""
    leaves = [
        (tuple(t.shape), t.dtype) for t in source.example(1, has_targets=has_targets)
    ]
    return plan, source.inputs, source.targets if has_targets else None, leaves


def _restore(classes: _Classes) -> None:
    for tensor, original in classes:
        tensor.__class__ = original


def _ready(executor: poptorch.PoplarExecutor | None) -> poptorch.PoplarExecutor:
    if executor is None:
        raise RuntimeError("the program was not prepared")
    return executor
