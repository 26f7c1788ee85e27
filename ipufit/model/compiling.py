# SPDX-License-Identifier: Apache-2.0
"""What `compile` was told, and what a model says of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Mapping, Sequence, Union

import torch

from ipufit.batching import check_positive
from ipufit.config import IPUConfig
from ipufit.engine import Executors, Figures, Objective, resolve_objective
from ipufit.errors import ConfigError, NotCompiledError
from ipufit.losses import LossLike
from ipufit.metrics import MetricLike
from ipufit.optimizers import (
    Optimization,
    OptimizerLike,
    ScheduleLike,
    WeightAverage,
    resolve_optimization,
)
from ipufit.resume import compiled_settings

PerOutput = Union[Sequence[Any], Dict[str, Any]]
MetricsLike = Union[MetricLike, PerOutput, None]
"""A list of metrics; or one for each output, in a list or in a dict by name."""


@dataclass(frozen=True)
class Compiled:
    """What `compile` was told.

    Attributes:
        objective: Losses and metrics.
        optimization: The optimiser and its schedule.
        training_figures: Of `fit`.
        test_figures: Of `evaluate` and validation.
        average: The running average of the weights; None for none.
        settings: All of that in words.
        arguments: As they were given, by name.
    """

    objective: Objective
    optimization: Optimization
    training_figures: Figures
    test_figures: Figures
    average: WeightAverage | None
    settings: dict[str, str]
    arguments: Mapping[str, Any]


class CompiledModel:
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
        self._how: Compiled | None = None

    def __repr__(self) -> str:
        """Module, layout, and what `compile` was told."""
        how = "not compiled"
        if self._how is not None:
            objective = self._how.objective
            losses = ", ".join(loss.name for _, loss in objective.losses)
            metrics = ", ".join(measure.full_name for measure in objective.measures)
            how = (
                f"compiled with {type(self.optimizer).__name__}, "
                f"loss {losses or 'of the module'}, metrics {metrics or 'none'}"
            )
        module = type(self.module).__name__
        return f"<{type(self).__name__}: {module} on {self.config}, {how}>"

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
                if the module returns its own, the mean over a micro-batch: as "loss"
                in a dict or an object, as the result of `poptorch.identity_loss`, or as
                a scalar that is all there is or that a tuple begins or ends with, as in
                `(output, loss)`. What it computes it from must be among the inputs.
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
        optimization = resolve_optimization(optimizer, lr_schedule, self.module)
        momentum = optimization.ema_momentum
        self._how = Compiled(
            objective,
            optimization,
            Figures(objective.fresh()),
            Figures(objective.fresh()),
            None if momentum is None else WeightAverage(self.module, momentum),
            compiled_settings(objective, optimization),
            {
                "optimizer": optimizer,
                "loss": loss,
                "loss_weights": loss_weights,
                "metrics": metrics,
                "weighted_metrics": weighted_metrics,
                "steps_per_execution": steps_per_execution,
                "lr_schedule": lr_schedule,
            },
        )
        self.config = config
        self._executors.compile_anew()

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
        return None if self._how is None else self._how.optimization.optimizer

    @property
    def has_lr_schedule(self) -> bool:
        """Whether a schedule sets the learning rates, so that callbacks must not."""
        return self._how is not None and self._how.optimization.has_schedule

    @property
    def num_updates(self) -> int:
        """Weight updates made since `compile`."""
        return 0 if self._how is None else self._how.optimization.num_updates

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
