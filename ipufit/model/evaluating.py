# SPDX-License-Identifier: Apache-2.0
"""Plans, checks and figures that `fit`, `evaluate` and `predict` share."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple

import torch

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import DEFAULT_BATCH_SIZE, BatchPlan, check_positive
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, Loading, Source
from ipufit.engine import (
    Evaluation,
    Figures,
    Inferred,
    Objective,
    describe_coverage,
)
from ipufit.errors import ConfigError, CoverageWarning, UnsupportedError
from ipufit.placement import own_stages
from ipufit.planning.choices import Choice
from ipufit.types import Logs

from .call_sizes import passes_per_call
from .parts import Model, settings_of
from .splitting import settle


def evaluation_of(
    model: Model,
    source: Source,
    batch_size: int,
    max_rows: int | None = None,
    name: str = "x",
    purpose: str = "evaluate",
    rows_in_one_call: int | None = None,
    callbacks: CallbackLike = None,
) -> Evaluation:
    """An evaluation of a compiled model on data.

    Args:
        model: The model.
        source: The data.
        batch_size: Samples of one pass over all replicas.
        max_rows: Samples to evaluate, from the beginning; None for all.
        name: The argument that gave the data, for messages.
        purpose: The use of the targets, for messages.
        rows_in_one_call: As for `inference_plan`.
        callbacks: Callbacks of the run.

    Raises:
        NotCompiledError: `compile` wasn't called.
        DataError: Targets are missing.
        ConfigError: The own inference options return sums of outputs.
    """
    settings = settings_of(model)
    require_targets(source, settings.objective, name, purpose)
    settle(model, source)
    inferred = settings.objective.evaluated
    choice = None
    if rows_in_one_call is None:
        plan, options, choice = plan_of_calls(
            model, source, batch_size, max_rows, inferred, callbacks, "test"
        )
    else:
        plan, options = inference_plan(
            *(model.module, model.config, batch_size),
            rows_in_one_call=rows_in_one_call,
        )
    if options.output_mode == poptorch.OutputMode.Sum.value:
        raise ConfigError(
            "inference_options or customize ask for OutputMode.Sum, which adds outputs "
            "of different samples: nothing can be evaluated from that. Use "
            "OutputMode.All, or leave the mode at its default."
        )
    batches = inference_batches(model, source, plan, options, max_rows)
    return Evaluation(
        model._executors,
        batches,
        plan,
        options,
        settings.test_figures,
        choice,
    )


class PlanOfCalls(NamedTuple):
    """The calls of a run over data.

    Attributes:
        plan: The factors of a call.
        options: PopTorch's options.
        choice: The passes of a call and their reason; None if nothing was chosen.
    """

    plan: BatchPlan
    options: poptorch.Options
    choice: Choice | None


def plan_of_calls(
    model: Model,
    source: Source,
    batch_size: int,
    max_rows: int | None,
    inferred: Inferred,
    callbacks: CallbackLike,
    kind: str,
) -> PlanOfCalls:
    """Plan the calls of a run, whose passes are chosen if they are left open.

    Args:
        model: The model.
        source: The data.
        batch_size: Samples of one pass over all replicas.
        max_rows: Samples to go through, from the beginning; None for all.
        inferred: The computation of the program.
        callbacks: Callbacks of the run.
        kind: "test" or "predict", as in the names of the hooks.

    Raises:
        ConfigError: The replicas don't divide the batch size.
    """
    config, choice, passes = model.config, None, None
    if config.inference_iterations is None and config.inference_options is None:
        least = _plan(model.module, config, batch_size, 1)
        # Of other output modes the number of passes says which rows come back.
        if config.customize is None or _returns_all(config, least):
            choice = passes_per_call(
                model, source, least, max_rows, inferred, callbacks, kind
            )
    if choice is not None:
        passes = choice.value
    given = model.module, model.config, batch_size
    return PlanOfCalls(*inference_plan(*given, inference_iterations=passes), choice)


def _returns_all(config: IPUConfig, plan: BatchPlan) -> bool:
    options = config.build_inference_options(plan)
    return bool(options.output_mode == poptorch.OutputMode.All.value)


def inference_plan(
    module: torch.nn.Module,
    config: IPUConfig,
    batch_size: int,
    *,
    rows_in_one_call: int | None = None,
    inference_iterations: int | None = None,
) -> tuple[BatchPlan, poptorch.Options]:
    """The factors of a call that evaluates or predicts, and PopTorch's options.

    Args:
        module: The user's module, which may begin stages itself.
        config: The layout.
        batch_size: Samples of one pass over all replicas.
        rows_in_one_call: Samples that one call takes, if the config leaves the
            micro-batch open; None to go by the batch size.
        inference_iterations: Passes of a call, if the config leaves them open.

    Raises:
        ConfigError: The replicas don't divide the batch size.
    """
    plan = _plan(module, config, batch_size, inference_iterations)
    if rows_in_one_call is not None and config.micro_batch_size is None:
        num_micro_batches = plan.micro_batches_per_call * plan.processes
        micro_batch_size = -(-rows_in_one_call // num_micro_batches)
        plan = replace(plan, micro_batch_size=micro_batch_size)
    return plan, config.build_inference_options(plan)


def _plan(
    module: torch.nn.Module,
    config: IPUConfig,
    batch_size: int,
    inference_iterations: int | None,
) -> BatchPlan:
    count = config.process.count
    stages = own_stages(module, config.inference_config)
    size = -(-batch_size // count) * count
    plan: BatchPlan = config.inference_plan(size, stages, inference_iterations)
    return plan


def inference_batches(
    model: Model,
    source: Source,
    plan: BatchPlan,
    options: poptorch.Options,
    max_rows: int | None,
) -> InferenceBatches:
    """The calls that cover each sample once."""
    check_processes(model, plan)
    return InferenceBatches(
        source,
        plan,
        options,
        max_rows=max_rows,
        loading=loading_of(model.config),
        seed=model.config.seed,
        processes=model.processes,
    )


def default_batch_size(config: IPUConfig, micro_batch_size: int | None = None) -> int:
    """Samples of a pass over all replicas, where the user gives no `batch_size`.

    Args:
        config: Its `micro_batch_size` counts, if it has one.
        micro_batch_size: The one to take else; None for Keras's 32.

    Example:
        >>> default_batch_size(IPUConfig(replicas=2))
        64
        >>> default_batch_size(IPUConfig(replicas=2, micro_batch_size=4))
        8
    """
    copies = config.num_inference_replicas * config.process.count
    micro = config.micro_batch_size or micro_batch_size or DEFAULT_BATCH_SIZE
    return micro * copies


def rows_to_evaluate(
    config: IPUConfig,
    source: Source,
    batch_size: int | None,
    steps: int | None,
    training: BatchPlan | None = None,
) -> tuple[int, int | None]:
    """Samples of one pass over all replicas, and of all `steps`.

    Args:
        config: The layout.
        source: The data; steps are batches of its loader, if it has one.
        batch_size: Samples of a pass, and of a step; None for the default.
        steps: Number of steps; None for all samples.
        training: Plan of the training that is validated; None outside `fit`.

    Raises:
        ConfigError: `steps` is no positive whole number.
    """
    micro = None if training is None else training.micro_batch_size
    size = default_batch_size(config, micro) if batch_size is None else batch_size
    if steps is None:
        return size, None
    check_positive("steps" if training is None else "validation_steps", steps)
    own = size if training is None else training.batch_size
    return size, steps * (batch_size or source.batch_size or own)


def check_processes(model: Model, plan: BatchPlan) -> None:
    """Refuse other processes than the model was made with.

    Raises:
        ConfigError: A process group was made, or a launcher's variables were set,
            after the model.
    """
    if plan.processes != model.processes.count:
        raise ConfigError(
            f"There are {plan.processes} processes now, and there were "
            f"{model.processes.count} when the model was made. Make the process group "
            "(torch.distributed.init_process_group) before ipufit.IPUModel(...)."
        )


def require_ipus(model: Model) -> None:
    """Refuse to run programs that are compiled for IPUs which aren't there.

    Raises:
        ConfigError: The config is offline, or programs are only compiled.
    """
    if _env.compile_only() is not None:
        raise ConfigError(
            f"{_env.COMPILE_ONLY} is set, so that fit, evaluate and predict compile "
            "their programs. Nothing else can be run."
        )
    if model.config.offline:
        raise ConfigError(
            "The config has offline=True, so that programs are compiled and can't be "
            "run. model.build(x, y) compiles them here, and cache_dir= keeps them; run "
            "where the IPUs are, with offline=False."
        )


def loading_of(config: IPUConfig) -> Loading:
    """How map-style data is loaded."""
    return Loading(config.num_workers, config.loader_mode)


def require_targets(
    source: Source, objective: Objective, name: str, purpose: str
) -> None:
    """Refuse samples without targets if a loss or metric needs them.

    Raises:
        DataError: Targets are missing.
        UnsupportedError: There are weights, and the module returns its own loss.
    """
    if not objective.owns_loss:
        source.require_targets(name, purpose)
    elif objective.measures:
        source.require_targets(name, "compute metrics")
    is_of_module = objective.owns_loss and objective.steps is None
    if is_of_module and source.structure.has_weights:
        raise UnsupportedError(
            f"`{name}` has sample weights, but the module returns its own loss, in "
            "which samples can't be told apart. Give the weights to the module as an "
            "input, or compile() with a loss."
        )


def figures_of(figures: Figures, return_dict: bool) -> Logs | float | list[float]:
    """The figures by name; or as Keras's list, or the loss if there is only that."""
    if return_dict:
        return figures.logs()
    values = list(figures.in_order().values())
    return values[0] if len(values) == 1 else values


def warn_of_coverage(options: poptorch.Options, plan: BatchPlan, method: str) -> str:
    """Warn if figures are about a part of the samples; called by a public method.

    Returns:
        Which samples; empty for all.
    """
    coverage = describe_coverage(options, plan)
    if coverage:
        warnings.warn(
            f"{method}() reports figures of a part of the samples, as the own options "
            f"ask: {coverage}. For exact figures leave the output mode at its default.",
            CoverageWarning,
            stacklevel=3,
        )
    return coverage
