# SPDX-License-Identifier: Apache-2.0
"""Builds programs: wraps the user's module for PopTorch and has it compiled."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, Callable, List, TypeVar

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure
from ipufit.engine.baked_in.values import (
    BakedInValues,
    Roots,
    changed_numbers_warned,
    roots_of,
)
from ipufit.engine.objective.objective import Objective
from ipufit.engine.objective.steps import Inferred
from ipufit.engine.traced.heads import InferenceHead, TrainingHead
from ipufit.engine.traced.recomputing import kept_submodules, recomputed_between
from ipufit.engine.traced.refusals import refuse_tied_buffers, require_trained_weights
from ipufit.engine.traced.stages import ShortPipelineError, stage_blocks
from ipufit.engine.traced.step import Step
from ipufit.engine.weights.counters import Counters
from ipufit.engine.weights.fingerprint import fingerprint
from ipufit.engine.weights.host_values import HostValue, host_tensors, host_values_of
from ipufit.engine.weights.modes import TrainedParts, mode
from ipufit.engine.weights.wide import check_values
from ipufit.engine.weights.wrapping import (
    Wrappers,
    make_plain,
    remember_classes,
    weights_of,
)
from ipufit.optimizers import hyper_parameters
from ipufit.placement import find_beginnings

from .optimizer_link import give_states
from .programs import Program, TrainingProgram

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
