# SPDX-License-Identifier: Apache-2.0
"""What every method of a model shares: `compile`, weights, and the frame of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterator, Sequence, Union

import torch

from ipufit._poptorch import poptorch
from ipufit.batching import DEFAULT_BATCH_SIZE, BatchPlan, check_positive
from ipufit.callbacks import CallbackList, History, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike
from ipufit.config import IPUConfig
from ipufit.data import InferenceBatches, Loading, Source
from ipufit.engine import (
    Evaluation,
    Executors,
    Figures,
    Objective,
    Snapshot,
    compiled_settings,
    describe_coverage,
    resolve_objective,
)
from ipufit.errors import (
    ConfigError,
    CoverageWarning,
    NotCompiledError,
    UnsupportedError,
)
from ipufit.losses import LossLike
from ipufit.metrics import MetricLike
from ipufit.optimizers import (
    OptimizerLike,
    ScheduleLike,
    Updates,
    WeightAverage,
    resolve_updates,
)
from ipufit.state import RunState
from ipufit.types import Logs, Verbose

if TYPE_CHECKING:
    from ipufit.summary import Summary

PerOutput = Union[Sequence[Any], Dict[str, Any]]
MetricsLike = Union[MetricLike, PerOutput, None]
"""A list of metrics; or one for each output, in a list or in a dict by name."""


@dataclass(frozen=True)
class Compiled:
    """What `compile` was told.

    Attributes:
        objective: Losses and metrics.
        updates: The optimiser and its schedule.
        training_figures: Of `fit`.
        test_figures: Of `evaluate` and validation.
        average: The running average of the weights; None for none.
        settings: All of that in words.
    """

    objective: Objective
    updates: Updates
    training_figures: Figures
    test_figures: Figures
    average: WeightAverage | None
    settings: dict[str, str]


class ModelBase:
    """A module, its layout on IPUs, and what `compile` was told."""

    def __init__(
        self, module: torch.nn.Module, config: IPUConfig | None = None
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module={module!r} is not a torch.nn.Module.")
        if config is not None and not isinstance(config, IPUConfig):
            raise ConfigError(f"config={config!r} is not an ipufit.IPUConfig.")
        self.module = module
        self.config = self._given_config = config or IPUConfig()
        self._executors = Executors(module, self.config)
        if self.config.precision == "float16":
            module.half()
        self.history: History | None = None
        self._run = self._looking = RunState()
        self._hooks: CallbackList | None = None  # of the run under way
        self._how: Compiled | None = None
        self._micro_batch_size = self.config.micro_batch_size
        self._seen: Source | None = None
        self._stepped: Updates | None = None
        self._snapshot: Snapshot | None = None
        self._passes = 0  # over training data, so that no fit repeats an order

    # Compile ----------------------------------------------------------------

    def compile(
        self,
        optimizer: OptimizerLike = "rmsprop",
        loss: LossLike | PerOutput | None = None,
        loss_weights: float | PerOutput | None = None,
        metrics: MetricsLike = None,
        weighted_metrics: MetricsLike = None,
        steps_per_execution: int | None = None,
        *,
        lr_schedule: ScheduleLike = None,
    ) -> None:
        """Say how to train and what to report.

        Nothing is compiled for a device yet: that happens when the first data shows
        the shapes.

        With several outputs, `loss`, `loss_weights`, `metrics` and `weighted_metrics`
        take a list in their order or a dict by their names: the keys of a dict, and
        `output_1`, `output_2` of a tuple. One name or torch loss is then taken for
        each of them; a function of yours gets all outputs and targets as they nest.

        Args:
            optimizer: A name ("sgd", "adam", "adamw", "rmsprop", "lamb"), an
                `ipufit.Optimizer`, a `torch.optim` SGD, Adam, AdamW or RMSprop of this
                module's parameters, or an optimizer of `poptorch.optim`.
            loss: A name such as "cross_entropy" or "mse", a torch loss module, or a
                function of outputs and targets. It is reported as the mean over
                samples; one with `reduction="sum"` as the sum divided by them. None
                if the module returns its own: as "loss" in a dict, as transformers
                do, or as the first of a tuple.
            loss_weights: What each output's loss counts in the total; 1 by default.
            metrics: Names such as "accuracy" or "AUC", `ipufit.Metric` objects, ones
                of torchmetrics, or functions of outputs and targets with one value
                per sample. Sample weights don't count in them.
            weighted_metrics: The same, and sample weights count.
            steps_per_execution: Weight updates per call: `IPUConfig`'s
                `device_iterations` under Keras's name.
            lr_schedule: A name ("cosine", "linear", ...), an `ipufit.Schedule`, a
                scheduler of `torch.optim.lr_scheduler` for the optimizer given, or a
                function that makes one from an optimizer. Counted in weight updates.

        Raises:
            ConfigError: Something of an unusable type, or settings that contradict
                each other.
            UnknownNameError: A name that stands for nothing; the nearest is suggested.
            UnsupportedError: An optimizer or a setting that IPUs don't have.
        """
        config = self._with_steps(steps_per_execution)
        objective = resolve_objective(loss, loss_weights, metrics, weighted_metrics)
        updates = resolve_updates(optimizer, lr_schedule, self.module)
        momentum = updates.ema_momentum
        self._how = Compiled(
            objective,
            updates,
            Figures(objective.fresh()),
            Figures(objective.fresh()),
            None if momentum is None else WeightAverage(self.module, momentum),
            compiled_settings(objective, updates),
        )
        self.config = config

    def _with_steps(self, steps_per_execution: int | None) -> IPUConfig:
        config = self._given_config
        if steps_per_execution is None:
            return config
        check_positive("steps_per_execution", steps_per_execution)
        own = config.training_options
        now = config.device_iterations if own is None else own.device_iterations
        if now not in (1, steps_per_execution) or (own and now != steps_per_execution):
            raise ConfigError(
                f"steps_per_execution={steps_per_execution}, but the config has "
                f"device_iterations={now}, which is the same thing. Give one of them."
            )
        return dataclasses.replace(config, device_iterations=steps_per_execution)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `poptorch.optim` optimizer that trains; None before `compile`."""
        return None if self._how is None else self._how.updates.optimizer

    @property
    def has_lr_schedule(self) -> bool:
        """Whether a schedule sets the learning rates, so that callbacks must not."""
        return self._how is not None and self._how.updates.has_schedule

    @property
    def num_updates(self) -> int:
        """Weight updates made since `compile`."""
        return 0 if self._how is None else self._how.updates.num_updates

    @property
    def weight_average(self) -> WeightAverage | None:
        """The running average of the weights (`ema_momentum`); None for none."""
        return None if self._how is None else self._how.average

    def swap_weights(self, *, is_average: bool) -> None:
        """Have the running average of the weights in their place, or the weights again.

        Training on would average the averages: have the weights back before.

        Args:
            is_average: Which of them.

        Raises:
            ConfigError: There is no average: `compile` got no `ema_momentum`.
        """
        average = self.weight_average
        if average is None:
            raise ConfigError(
                "There is no running average of the weights: compile with an optimizer "
                "that keeps one, Optimizer('adamw', ema_momentum=0.999)."
            )
        if is_average == average.is_swapped:
            return
        self._executors.fetch_weights()
        if is_average:
            average.swap_in()
        else:
            average.swap_out()
        self._executors.send_weights()

    def _compiled(self) -> Compiled:
        if self._how is None:
            raise NotCompiledError(
                "You must call compile() before using the model: "
                "model.compile(optimizer='adamw', loss='cross_entropy')."
            )
        return self._how

    def reset_metrics(self) -> None:
        """Forget the figures so far; every epoch and evaluation does so itself."""
        how = self._compiled()
        how.training_figures.reset()
        how.test_figures.reset()

    # Around a run -------------------------------------------------------------

    def summary(self, x: Any = None) -> Summary:
        """Show the layers: shapes, parameters, and the stage and IPU of each.

        Args:
            x: Inputs to show shapes for; those of the last run by default. One sample
                of them is run through the module on the host.

        Returns:
            What is shown, with `total_parameters`; a notebook prints it once more.
        """
        inputs = None
        if x is not None:
            from ipufit.data import as_source

            inputs = as_source(x)
        source = inputs or self._seen
        self._executors.fetch_weights()
        example = None
        if source is not None:
            leaves = source.example(1, inputs_only=True)
            example = source.layout.inputs.rebuild(leaves)
        from ipufit.summary import summarize  # few processes ask for it

        summary = summarize(self.module, self.config, example)
        summary.print()
        return summary

    def detach(self) -> None:
        """Give the IPUs back; the weights stay in `module`, the programs compiled."""
        self._executors.detach()

    @property
    def stop_training(self) -> bool:
        """Keras's flag: a callback sets it to end `fit` after this call."""
        return self._run.is_stopping

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value:
            self._run.stop("model.stop_training was set")
        else:
            self._run.stop_reason = None

    @property
    def stop_evaluating(self) -> bool:
        """Keras's flag: a callback sets it to end the evaluation after this call."""
        return self._looking.stop_evaluating

    @stop_evaluating.setter
    def stop_evaluating(self, value: bool) -> None:
        self._looking.stop_evaluating = value

    @property
    def stop_predicting(self) -> bool:
        """Keras's flag: a callback sets it to end `predict` after this call."""
        return self._looking.stop_predicting

    @stop_predicting.setter
    def stop_predicting(self, value: bool) -> None:
        self._looking.stop_predicting = value

    def _checked(self, plan: BatchPlan) -> BatchPlan:
        if plan.processes > 1:
            raise UnsupportedError(
                f"{plan.processes} processes are configured (PopRun, mpirun or "
                "Distributed.configureProcessId), but ipufit trains in one process so "
                "far. Use replicas on one host instead."
            )
        return plan

    def _loading(self) -> Loading:
        return Loading(self.config.num_workers, self.config.loader_mode)

    def _inference(self, batch_size: int | None) -> tuple[BatchPlan, Any]:
        if batch_size is None:
            own = self.config.inference_options
            replicas = self.config.replicas if own is None else own.replication_factor
            batch_size = (self._micro_batch_size or DEFAULT_BATCH_SIZE) * replicas
        plan = self._checked(self.config.inference_plan(batch_size))
        return plan, self.config.build_inference_options(plan)

    def _evaluation(
        self,
        source: Source,
        batch_size: int | None,
        steps: int | None,
        name: str = "x",
        purpose: str = "evaluate",
        step_rows: int | None = None,
    ) -> Evaluation:
        how = self._compiled()
        _require_targets(source, how.objective, name, purpose)
        plan, options = self._inference(batch_size)
        if options.output_mode == poptorch.OutputMode.Sum.value:
            raise ConfigError(
                "inference_options ask for OutputMode.Sum, which adds outputs of "
                "different samples: nothing can be evaluated from that. Use "
                "OutputMode.All, or leave the mode at its default."
            )
        batches = InferenceBatches(
            source,
            plan,
            options,
            max_rows=_rows_of_steps(
                steps,
                batch_size or source.batch_size or step_rows or plan.samples_per_update,
                "validation_steps" if purpose == "validate" else "steps",
            ),
            loading=self._loading(),
            seed=self.config.seed,
        )
        return Evaluation(self._executors, batches, plan, options, how.test_figures)

    @contextlib.contextmanager
    def _running(
        self,
        run: RunState,
        callbacks: CallbackLike,
        history: History | None,
        verbose: Verbose,
    ) -> Iterator[tuple[CallbackList, ProgressDisplay]]:
        """Callbacks in Keras's order; whatever happens, weights and terminal return."""
        given = CallbackList(callbacks).callbacks
        displays = [one for one in given if isinstance(one, ProgressDisplay)]
        display = make_progress(verbose)
        if displays:  # the user's own shows instead, as in Keras
            display = displays[0]
        own = [] if history is None else [history]
        hooks = CallbackList([given, own, [] if displays else display])
        hooks.set_model(self)
        hooks.set_run(run)
        before, self._looking = self._looking, run
        around, self._hooks = self._hooks, hooks
        if history is not None:
            self._run = run
        is_failing = False
        try:
            yield hooks, display
        except GeneratorExit:  # somebody doesn't want the rest of a stream
            raise
        except BaseException:
            is_failing = True
            self._executors.detach()  # nobody may come back to free the IPUs
            raise
        finally:
            self._looking, self._hooks = before, around
            try:
                hooks.end(around, is_failing=is_failing)
            finally:
                self._executors.fetch_weights()
        run.act()  # what waits until all has ended well


def _require_targets(
    source: Source, objective: Objective, name: str, purpose: str
) -> None:
    """Refuse samples without targets if a loss or metric needs them.

    Raises:
        DataError: There are none.
        UnsupportedError: There are weights, and the module returns its own loss.
    """
    if not objective.owns_loss:
        source.require_targets(name, purpose)
    elif objective.measures:
        source.require_targets(name, "compute metrics")
    if objective.owns_loss and source.layout.has_weights:
        raise UnsupportedError(
            f"`{name}` has sample weights, but the module returns its own loss, in "
            "which samples can't be told apart. Give the weights to the module as an "
            "input, or compile() with a loss."
        )


def _rows_of_steps(
    steps: int | None, rows_per_step: int, name: str = "steps"
) -> int | None:
    if steps is None:
        return None
    check_positive(name, steps)
    return steps * rows_per_step


def figures_of(figures: Figures, return_dict: bool) -> Logs | float | list[float]:
    """The figures by name; or as Keras's list, or the loss if there is only that."""
    if return_dict:
        return figures.logs()
    values = list(figures.in_order().values())
    return values[0] if len(values) == 1 else values


def warn_of_coverage(
    options: poptorch.Options, plan: BatchPlan, method: str, stacklevel: int
) -> str:
    """Say which samples figures are about, if not about all."""
    coverage = describe_coverage(options, plan)
    if coverage:
        warnings.warn(
            f"{method}() reports figures of a part of the samples, as the own options "
            f"ask: {coverage}. For exact figures leave the output mode at its default.",
            CoverageWarning,
            stacklevel=stacklevel,
        )
    return coverage
