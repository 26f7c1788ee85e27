# SPDX-License-Identifier: Apache-2.0
"""How a program of the user's module is built."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Callable, ContextManager, List, TypeVar

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure
from ipufit.engine.baked_in.values import (
    BakedInValues,
    changed_numbers_warned,
    roots_of,
)
from ipufit.engine.objective.objective import Objective
from ipufit.engine.traced.refusals import refuse_tied_buffers, require_trained_weights
from ipufit.engine.traced.stages import stage_blocks
from ipufit.engine.traced.step import InferenceStep, TrainingStep
from ipufit.engine.weights.counters import Counters
from ipufit.engine.weights.fingerprint import fingerprint
from ipufit.engine.weights.host_values import (
    HostValue,
    MovedOnDeviceError,
    host_tensors,
    host_values_of,
)
from ipufit.engine.weights.modes import TrainedParts, mode
from ipufit.engine.weights.wide import check_values
from ipufit.engine.weights.wrapping import (
    Wrappers,
    make_plain,
    remember_classes,
    weights_of,
)
from ipufit.optimizers import hyper_parameters

from .optimizer_link import give_states
from .programs import Program, TrainingProgram

Compile = Callable[[Any, List[Tensor]], None]
"""Compiles an executor for the data at hand, and the host's values."""

BuildT = TypeVar("BuildT", bound=Callable[..., Any])


def _retried(build: BuildT) -> BuildT:
    """Have a program built once more if its trace has shown that buffers move."""

    @functools.wraps(build)
    def built(builder: Builder, *arguments: Any, **settings: Any) -> Any:
        while True:
            try:
                return build(builder, *arguments, **settings)
            except MovedOnDeviceError as error:
                builder._moved.extend(error.moved)

    return built  # type: ignore[return-value]


@dataclass(frozen=True)
class Builder:
    """Wraps a module for PopTorch, has it compiled, and leaves it as it was.

    Attributes:
        module: The user's.
        config: Its layout on IPUs.
    """

    module: torch.nn.Module
    config: IPUConfig
    _moved: list[HostValue] = field(default_factory=list, init=False)

    @_retried
    def training(
        self,
        structure: SampleStructure,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        options: poptorch.Options,
        num_micro_batches: int,
        compile_it: Compile,
    ) -> TrainingProgram:
        """A program that trains.

        Args:
            structure: How the tensors of a batch nest.
            objective: What is minimised, and what is measured.
            optimizer: Of `poptorch.optim`.
            options: PopTorch's.
            num_micro_batches: In a call, over all replicas.
            compile_it: Compiles the executor.
        """
        modules = [self.module, *objective.modules]
        values = host_values_of(modules, self._moved)
        step = TrainingStep(self.module, self.config, structure, values, objective)
        give_states(optimizer, step)
        require_trained_weights(step)
        refuse_tied_buffers(step)
        # A state brings the values of its time to the device.
        has_state: bool = optimizer.has_state()  # type: ignore[attr-defined]
        sent = () if has_state else hyper_parameters(optimizer)
        check_values(step)
        weights = weights_of(step)
        make_plain(weights)
        remember_classes(weights)
        given = host_tensors(values, num_micro_batches)
        roots = roots_of(self.module, objective)
        in_mode = mode(step, training=True, root=self.module)
        try:
            # PopTorch traces in the grad mode that it finds.
            with changed_numbers_warned(
                roots
            ), in_mode, self._stages(), torch.enable_grad():
                executor = poptorch.trainingModel(
                    step, options=options, optimizer=optimizer
                )
                compile_it(executor, given)
            wrappers = Wrappers(step.weights)
        finally:
            # If it failed, too: `destroy()` does nothing before the first compilation,
            # so PopTorch would refuse to wrap them again once the fault is mended.
            make_plain(weights)
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
            Counters(
                step,
                step.findings.increments,
                options.device_iterations * options.Training.gradient_accumulation,
            ),
            TrainedParts(self.module),
        )

    @_retried
    def inference(
        self,
        structure: SampleStructure,
        options: poptorch.Options,
        num_micro_batches: int,
        compile_it: Compile,
        *,
        owns_loss: bool,
    ) -> Program:
        """A program that looks.

        Args:
            structure: How the tensors of a batch nest.
            options: PopTorch's.
            num_micro_batches: In a call, over all replicas.
            compile_it: Compiles the executor.
            owns_loss: Whether the module returns its own loss.
        """
        values = host_values_of([self.module], self._moved)
        step = InferenceStep(
            self.module, self.config, structure, values, owns_loss=owns_loss
        )
        check_values(step)
        refuse_tied_buffers(step)
        weights = weights_of(step)
        remember_classes(weights)
        given = host_tensors(values, num_micro_batches)
        roots = roots_of(self.module)
        in_mode = mode(step, training=False)
        try:
            with changed_numbers_warned(roots), in_mode, self._stages():
                executor = poptorch.inferenceModel(step, options=options)
                compile_it(executor, given)
        finally:
            make_plain(weights)  # PopTorch may have brought a class back
        return Program(
            executor,
            step,
            num_micro_batches,
            BakedInValues(roots),
            fingerprint(step.weights) if executor.isAttachedToDevice() else None,
        )

    def _stages(self) -> ContextManager[None]:
        return stage_blocks(self.module, self.config.stages)
