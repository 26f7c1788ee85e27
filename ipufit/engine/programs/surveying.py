# SPDX-License-Identifier: Apache-2.0
"""A training program that is surveyed: traced on one micro-batch, not compiled."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch, survey
from ipufit.batching import BatchPlan
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure
from ipufit.engine.baked_in.values import changed_numbers_warned, roots_of
from ipufit.engine.objective.objective import Objective
from ipufit.engine.traced.heads import TrainingHead
from ipufit.engine.traced.recomputing import recomputed_between
from ipufit.engine.traced.refusals import (
    refuse_gradient_hooks,
    refuse_synchronised_norms,
    require_trained_weights,
)
from ipufit.engine.traced.stages import stage_blocks
from ipufit.engine.traced.step import Step
from ipufit.engine.weights.host_values import (
    HostValue,
    MovedOnDeviceError,
    host_tensors,
    host_values_of,
)
from ipufit.engine.weights.modes import mode
from ipufit.engine.weights.wide import check_values
from ipufit.errors import IpufitError, IpufitWarning


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
