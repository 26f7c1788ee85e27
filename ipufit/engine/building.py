# SPDX-License-Identifier: Apache-2.0
"""How a program of the user's module is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, ContextManager

import torch

from ipufit._poptorch import poptorch
from ipufit.config import IPUConfig
from ipufit.data import Layout
from ipufit.optimizers import hyper_parameters

from .baked import BakedIn
from .fingerprint import fingerprint
from .modes import mode
from .objective import Objective
from .programs import Program, TrainingProgram
from .stages import stage_blocks
from .step import InferenceStep, TrainingStep
from .wrapping import Wrappers, make_plain, remember_classes, weights_of

Compile = Callable[[Any], None]
"""Compiles an executor for the data at hand."""


@dataclass(frozen=True)
class Builder:
    """Wraps a module for PopTorch, has it compiled, and leaves it as it was.

    Attributes:
        module: The user's.
        config: Its layout on IPUs.
    """

    module: torch.nn.Module
    config: IPUConfig

    def training(
        self,
        layout: Layout,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        options: poptorch.Options,
        compile_it: Compile,
    ) -> TrainingProgram:
        """A program that trains.

        Args:
            layout: How the tensors of a batch nest.
            objective: What is minimised, and what is measured.
            optimizer: Of `poptorch.optim`.
            options: PopTorch's.
            compile_it: Compiles the executor.
        """
        step = TrainingStep(self.module, self.config, layout, objective)
        # A state brings the values of its time to the device.
        has_state: bool = optimizer.has_state()  # type: ignore[attr-defined]
        sent = () if has_state else hyper_parameters(optimizer)
        weights = weights_of(step)
        make_plain(weights)
        remember_classes(weights)
        try:
            with mode(step, training=True, root=self.module), self._stages():
                executor = poptorch.trainingModel(
                    step, options=options, optimizer=optimizer
                )
                compile_it(executor)
            wrappers = Wrappers(weights)
        finally:
            # If it failed, too: `destroy()` does nothing before the first compilation,
            # so PopTorch would refuse to wrap them again once the fault is mended.
            make_plain(weights)
        return TrainingProgram(
            executor,
            step,
            BakedIn(self.module, step.losses),
            fingerprint(weights) if executor.isAttachedToDevice() else None,
            wrappers,
            optimizer,
            executor.rng_state,
            sent,
        )

    def inference(
        self,
        layout: Layout,
        options: poptorch.Options,
        compile_it: Compile,
        *,
        owns_loss: bool,
    ) -> Program:
        """A program that looks.

        Args:
            layout: How the tensors of a batch nest.
            options: PopTorch's.
            compile_it: Compiles the executor.
            owns_loss: Whether the module returns its own loss.
        """
        step = InferenceStep(self.module, self.config, layout, owns_loss=owns_loss)
        weights = weights_of(step)
        remember_classes(weights)
        try:
            with mode(step, training=False), self._stages():
                executor = poptorch.inferenceModel(step, options=options)
                compile_it(executor)
        finally:
            make_plain(weights)  # PopTorch may have brought a class back
        return Program(
            executor,
            step,
            BakedIn(self.module),
            fingerprint(weights) if executor.isAttachedToDevice() else None,
        )

    def _stages(self) -> ContextManager[None]:
        return stage_blocks(self.module, self.config.stages)
