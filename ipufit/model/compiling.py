# SPDX-License-Identifier: Apache-2.0
"""`compile`, and two methods that change its averages and figures."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Sequence, Union

from ipufit.batching import check_positive
from ipufit.config import IPUConfig
from ipufit.engine import Figures, Objective, StepFunction, resolve_objective
from ipufit.errors import ConfigError, UnsupportedError
from ipufit.losses import LossLike, check_smoothing
from ipufit.metrics import MetricLike
from ipufit.mixing import Mixing
from ipufit.optimizers import (
    OptimizerLike,
    ScheduleLike,
    SchedulesLike,
    WeightAverage,
    resolve_optimization,
)
from ipufit.resume import compiled_settings, described

from .own_steps import resolve_steps
from .parts import CompileSettings, Model, settings_of

PerOutput = Union[Sequence[Any], Dict[str, Any]]
MetricsLike = Union[MetricLike, PerOutput, None]
"""A list of metrics; or one for each output, in a list or in a dict by name."""


def compile(
    self: Model,
    optimizer: OptimizerLike = "rmsprop",
    loss: LossLike | PerOutput | None = None,
    loss_weights: float | PerOutput | None = None,
    metrics: MetricsLike = None,
    weighted_metrics: MetricsLike = None,
    steps_per_execution: int | None = None,
    *,
    lr_schedule: ScheduleLike = None,
    schedules: SchedulesLike = None,
    augment: Mixing | None = None,
    label_smoothing: float = 0.0,
    step: StepFunction | None = None,
    validation_step: StepFunction | None = None,
    predict_step: StepFunction | None = None,
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
        loss_weights: Factor of each output's loss in the total; 1 by default.
        metrics: Names such as "accuracy" or "AUC", `ipufit.Metric` objects, ones
            of torchmetrics or a `MetricCollection`, or functions of outputs and
            targets with one value per sample. Sample weights don't count in them.
        weighted_metrics: The same, and sample weights count.
        steps_per_execution: Weight updates per call: `IPUConfig`'s
            `device_iterations` under Keras's name; `fit` chooses by default.
        lr_schedule: A name ("cosine", "linear", ...), an `ipufit.Schedule`, a
            scheduler of `torch.optim.lr_scheduler` for the optimizer given, or a
            function that makes one from an optimizer. Counted in weight updates;
            `ipufit.PerEpoch` has a scheduler of torch stepped per epoch.
        schedules: Schedules of other values of parameter groups by name, as in
            `{"weight_decay": ipufit.Schedule("cosine")}`: "momentum", "eps", "alpha",
            and "beta1" and "beta2", the parts of `betas`. They are factors, too.
        augment: `ipufit.Mixing(mixup=0.2, cutmix=1.0)` mixes the images that it is
            trained on, on the device. Metrics of training then count the target that
            has the larger share of an image.
        label_smoothing: Part of each target that all classes share in training, 0.1
            for example. `evaluate` and validations report the loss without it, so
            that models are compared by the same loss.
        step: A step of your own in the place of the module and a loss: a function of
            the module and a batch, which is traced as one program. The batch nests as
            the data do: inputs, `(inputs, targets)` or `(inputs, targets, weights)`.
            It returns the mean loss over the samples; or `(loss, outputs)`; or a dict
            of "loss", "outputs" for metrics, and further scalars to report. A subclass
            has a method `training_step(self, batch)` instead.
        validation_step: The same for `evaluate` and validations, in eval mode; by
            default `step`, or the method `validation_step(self, batch)`.
        predict_step: A function of the module and inputs for `predict`; by default the
            module is called, or the method `predict_step(self, inputs)`.

    Raises:
        ConfigError: Something of an unusable type, or settings that contradict
            each other.
        UnknownNameError: A name that stands for nothing; the nearest is suggested.
        UnsupportedError: An optimizer or a setting that IPUs don't have; or samples
            can't be mixed, or labels smoothed, in the loss.
    """
    config = _with_steps(self._given_config, steps_per_execution)
    steps = resolve_steps(
        self,
        step,
        validation_step,
        predict_step,
        {"loss": loss, "loss_weights": loss_weights},
    )
    objective = resolve_objective(loss, loss_weights, metrics, weighted_metrics, steps)
    trained = _augmented(objective, augment, label_smoothing)
    own = self._counterparts.own
    optimization = resolve_optimization(
        optimizer,
        lr_schedule,
        self.module,
        schedules,
        own=own,
        is_half=config.types.is_half,
    )
    momentum = optimization.ema_momentum
    self._settings = CompileSettings(
        objective=objective,
        optimization=optimization,
        training_figures=Figures(trained.fresh(), self.processes),
        test_figures=Figures(objective.fresh(), self.processes),
        average=None if momentum is None else WeightAverage(self.module, momentum),
        in_words={
            **compiled_settings(objective, optimization),
            "augment": described(augment),
            "label_smoothing": described(label_smoothing),
            "step": described(None if steps is None else steps.training),
        },
        mixing=augment,
        arguments={
            "optimizer": optimizer,
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "steps_per_execution": steps_per_execution,
            "lr_schedule": lr_schedule,
            "schedules": schedules,
            "augment": augment,
            "label_smoothing": label_smoothing,
            "step": step,
            "validation_step": validation_step,
            "predict_step": predict_step,
        },
    )
    self.config = config
    self._executors.drop_incomplete()
    self._runs.output_sizes.clear()


def _augmented(
    objective: Objective, mixing: Mixing | None, label_smoothing: float
) -> Objective:
    """The objective of training, which has smoothed labels.

    Raises:
        ConfigError: `augment` or `label_smoothing` is of an unusable type or number.
        UnsupportedError: The module returns its own loss, or the loss has no classes.
    """
    if mixing is not None and not isinstance(mixing, Mixing):
        raise ConfigError(
            f"augment={mixing!r} is no ipufit.Mixing: pass Mixing(mixup=0.2, "
            "cutmix=1.0), or one of its two numbers."
        )
    check_smoothing(label_smoothing)
    for what, is_given in (
        (f"augment={mixing!r}", mixing is not None),
        (f"label_smoothing={label_smoothing!r}", label_smoothing > 0),
    ):
        if is_given and objective.steps is not None:
            raise UnsupportedError(
                f"{what} was given, but the model has a step of its own, which "
                "computes the loss. Do it there, or leave it out."
            )
        if is_given and objective.owns_loss:
            raise UnsupportedError(
                f"{what} was given, but the module returns its own loss, of whose "
                "targets nothing is known: compile() got none. Pass "
                "loss='cross_entropy' or the like, or leave it out."
            )
    return objective.smoothed(label_smoothing)


def _with_steps(config: IPUConfig, steps_per_execution: int | None) -> IPUConfig:
    if steps_per_execution is None:
        return config
    check_positive("steps_per_execution", steps_per_execution)
    own = config.training_options
    now = config.device_iterations if own is None else own.device_iterations
    if now not in (None, steps_per_execution):
        raise ConfigError(
            f"steps_per_execution={steps_per_execution}, but the config has "
            f"device_iterations={now}, which is the same thing. Give one of them."
        )
    return dataclasses.replace(config, device_iterations=steps_per_execution)


def swap_weights(self: Model, *, is_average: bool, is_joint: bool = False) -> None:
    """Put the running average in the place of the weights, or the weights back.

    Training on would average the averages: have the weights back before.

    Args:
        is_average: True for the average, False for the weights.
        is_joint: Whether all processes of a run call it together. Then all get the
            averages that process 0 has of buffers, as it is with buffers in an
            evaluation.

    Raises:
        ConfigError: There is no average: `compile` got no `ema_momentum`.
    """
    average = None if self._settings is None else self._settings.average
    if average is None:
        raise ConfigError(
            "There is no running average of the weights: compile with an optimizer "
            "that keeps one, Optimizer('adamw', ema_momentum=0.999)."
        )
    if is_average == average.is_swapped:
        return
    self._executors.fetch_weights()
    if is_average:
        self._executors.common.take_back()
        average.swap_in()
        if is_joint:
            self._executors.share_buffers()
    else:
        average.swap_out()
    self._executors.send_weights()


def reset_metrics(self: Model) -> None:
    """Forget the figures so far; every epoch and evaluation does so itself."""
    settings = settings_of(self)
    settings.training_figures.reset()
    settings.test_figures.reset()
