# SPDX-License-Identifier: Apache-2.0
"""Callbacks that watch a metric, and callbacks that set the learning rate."""

from __future__ import annotations

import inspect
import math
import os
import time
from typing import Any, Callable, ClassVar, Mapping, Sequence

import numpy as np

from ipufit._arguments import check_choice, check_flags, number_in, refuse, shown
from ipufit._env import whole_number
from ipufit._kinds import Kind, array, count, list_of, number, optional, whole
from ipufit._lazy import need
from ipufit.errors import (
    ConfigError,
    DamagedCheckpointError,
    IpufitWarning,
    UnknownNameError,
    warn,
)

from .base import Callback, check_argument, check_verbose, say


class MonitorCallback(Callback):
    """Base of callbacks that monitor a metric in the logs.

    Args:
        monitor: Name of the metric, such as `"val_loss"`.
        mode: `"min"` or `"max"`, whichever is better; `"auto"` asks the metrics. Any
            other mode is taken as `"auto"`, with a warning, as in Keras.
        min_delta: Change that an improvement must exceed; its sign doesn't matter.
        verbose: 1 or more lets `say` print its messages.
        best: Value that the first value must beat; None for no such value.

    Attributes:
        best: Best value so far.
        direction: `"min"` or `"max"`; None before the first value of a run.
    """

    def __init__(
        self,
        monitor: str,
        mode: str,
        min_delta: float,
        verbose: int,
        best: float | None = None,
    ) -> None:
        if not isinstance(monitor, str):
            words = "the name of one metric in the logs, such as 'val_loss'"
            refuse("monitor", monitor, words, type(self).__name__)
        check_argument(self, "min_delta", min_delta)
        check_verbose(self, verbose)
        if best is not None:
            check_argument(self, "initial_value_threshold", best)
        if not isinstance(mode, str):
            check_choice("mode", mode, ("auto", "min", "max"), of=type(self).__name__)
        if mode not in ("auto", "min", "max"):
            warn(
                f"{type(self).__name__} mode '{mode}' is unknown, fallback to auto "
                "mode.",
                IpufitWarning,
            )
            mode = "auto"
        self.monitor = monitor
        self.mode = mode
        self.min_delta = abs(min_delta)
        self.verbose = verbose
        self.best = best
        self.direction: str | None = None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Check that the run has the metric, and reset the metric's direction.

        Raises:
            ConfigError: If the run can't have the metric, or it is a matrix.
        """
        self.direction = None
        names = self.run.names
        if self.needs_metric and self.monitor in self.run.matrices:
            raise self._not_a_number("is a matrix")
        if names is None or not self.needs_metric or self.monitor in names:
            return
        of_validation = [name for name in names if name.startswith("val_")]
        text = str(UnknownNameError("metric", self.monitor, names))
        if self.monitor.startswith("val_") and not of_validation:
            text = f"{text} Those with val_ need fit(validation_data=)."
        raise ConfigError(f"{type(self).__name__}(monitor={self.monitor!r}): {text}")

    @property
    def needs_metric(self) -> bool:
        """Whether a run without the monitored metric is refused."""
        return self.monitor != "learning_rate"

    def say(self, message: str) -> None:
        """Print a line if `verbose` is set, in the first process only."""
        if self.verbose > 0 and self.run.processes.is_first:
            say(message)

    @property
    def state_name(self) -> str:
        """Name in checkpoints: the class and the metric."""
        return f"{type(self).__name__}({self.monitor})"

    def improves(self, value: float, reference: float | None) -> bool:
        """Return whether a value is better than another by more than `min_delta`.

        As in Keras, the comparison is strict and in float32, so `0.7` is no improvement
        over `0.8` by more than `0.1`, whatever float64 leaves in the last digit.

        Args:
            value: New value. NaN is never an improvement.
            reference: Value to beat; every number beats None and NaN.

        Raises:
            ConfigError: If the mode is `"auto"`, and no metric has a direction.
        """
        is_less = self.known_direction() == "min"
        if math.isnan(value):
            return False
        if reference is None or math.isnan(reference):
            return True
        delta = self.min_delta if is_less else -self.min_delta
        with np.errstate(over="ignore"):  # larger numbers are infinite in float32
            shifted, best = np.float32(value + delta), np.float32(reference)
        return bool(shifted < best if is_less else shifted > best)

    def value_in(
        self, logs: Mapping[str, Any], purpose: str, end: str = ""
    ) -> float | None:
        """Return the metric; if the logs don't have it, warn and return None.

        Args:
            logs: Metrics of the epoch, whose names the warning lists.
            purpose: The beginning of the warning, such as "Early stopping conditioned".
            end: The end of the warning.
        """
        value = self.monitored(logs)
        if value is None:
            warn(
                f"{purpose} on metric `{self.monitor}` which is not available. "
                f"Available metrics are: {','.join(logs)}{end}",
                IpufitWarning,
            )
        return value

    def monitored(self, logs: Mapping[str, Any]) -> float | None:
        """Return the metric's value in the logs; None if they don't have it.

        Raises:
            ConfigError: The value isn't a number.
        """
        value = logs.get(self.monitor)
        number = number_in(value)
        if number is None and value is not None:
            raise self._not_a_number(f"is {shown(value)}")
        return None if number is None else float(number)

    def _not_a_number(self, fault: str) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}(monitor={self.monitor!r}): this metric {fault}, "
            "not one number. Monitor another metric."
        )

    def known_direction(self) -> str:
        """Return `"min"` or `"max"`, whichever of the metric is better.

        Raises:
            ConfigError: If the mode is `"auto"`, and no metric has a direction.
        """
        if self.direction is None and self.mode != "auto":
            self.direction = self.mode
        elif self.direction is None:
            self.direction = direction_of(self.monitor, self.run.directions)
        if self.direction is None:
            known = ", ".join(sorted(self.run.directions)) or "none"
            raise ConfigError(
                f"{type(self).__name__}(monitor={self.monitor!r}) can't tell whether "
                "more or less of it is better. Pass mode='min' or mode='max'. Metrics "
                f"whose direction is known: {known}; each also with val_ before it."
            )
        return self.direction


def direction_of(monitor: str, directions: Mapping[str, str]) -> str | None:
    """Return `"min"` or `"max"`, whichever of a metric is better; None if unknown.

    The direction of a loss is always known.

    Args:
        monitor: Name in the logs, with or without `val_`.
        directions: `"min"` or `"max"` by name, without `val_`.

    Example:
        >>> direction_of("val_accuracy", {"accuracy": "max"})
        'max'
        >>> direction_of("val_depth_loss", {})
        'min'
    """
    name = monitor[len("val_") :] if monitor.startswith("val_") else monitor
    if name in directions:
        return directions[name]
    return "min" if name == "loss" or name.endswith("_loss") else None


class EarlyStopping(MonitorCallback):
    """Stop when a metric hasn't improved for some epochs.

    As in Keras, but a NaN never becomes the best value, and `"auto"` knows the metrics
    of several outputs.

    Args:
        monitor: Name of the metric in the logs.
        min_delta: Smallest change that counts as an improvement.
        patience: Number of epochs without improvement after which to stop; 0 and 1 both
            stop at the first such epoch, as in Keras.
        verbose: 1 prints a line when it stops or restores weights.
        mode: `"min"`, `"max"`, or `"auto"`.
        baseline: Value that a metric must also beat to reset `wait`.
        restore_best_weights: If True, the run ends with the weights of its best epoch,
            stopped or not. Every improvement fetches the weights from the device.
        start_from_epoch: Index of the first epoch that counts.

    Attributes:
        best: Best value of this run.
        best_epoch: Index of the best epoch.
        best_weights: Weights of the best epoch, if they are to be restored.
        stopped_epoch: Index of the epoch that stopped the run; 0 if the run wasn't
            stopped.
        wait: Number of epochs since the last improvement.

    Raises:
        ConfigError: If an argument has an invalid value. When `fit` begins, if the run
            has no such metric. At the metric's first value, if `mode="auto"` and its
            direction isn't known.

    Example:
        >>> from ipufit.state import RunState
        >>> stopping = EarlyStopping("loss", patience=2)
        >>> stopping.set_run(RunState())
        >>> stopping.on_train_begin({})
        >>> for epoch, loss in enumerate([3.0, 2.0, 2.5, 2.2]):
        ...     stopping.on_epoch_end(epoch, {"loss": loss})
        >>> stopping.stopped_epoch, stopping.best
        (3, 2.0)
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "wait": count,
        "best": optional(number),
        "best_epoch": count,
        "stopped_epoch": count,
        "best_weights": optional(list_of(array)),
    }

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta, verbose)
        check_argument(self, "patience", patience, least=0)
        check_argument(self, "start_from_epoch", start_from_epoch, least=0)
        check_flags("EarlyStopping", restore_best_weights=restore_best_weights)
        if baseline is not None:
            check_argument(self, "baseline", baseline)
        self.patience = patience
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best = None
        self.best_epoch = 0
        self.best_weights: list[Any] | None = None
        self.stopped_epoch = 0

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state with other keys, other kinds or weights of another module."""
        super().check_state(state)
        if state["best_weights"] is None:
            return
        shapes = [tuple(weight.shape) for weight in self.model.get_weights()]
        if [tuple(weight.shape) for weight in state["best_weights"]] != shapes:
            raise DamagedCheckpointError(
                "The state of EarlyStopping has best_weights of another module. Use "
                "another checkpoint."
            )

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        super().on_train_begin(logs)
        self._reset()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Compare the metric with the best value, and stop after `patience` epochs."""
        value = self.value_in(logs, "Early stopping conditioned")
        if value is None or epoch < self.start_from_epoch:
            return
        self.wait += 1
        if self.improves(value, self.best):
            self.best, self.best_epoch = value, epoch
            if self.restore_best_weights:
                self.best_weights = self.model.get_weights()
            if self.baseline is None or self.improves(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.run.stop(
                f"{self.monitor} hasn't improved for {self.wait} epochs (EarlyStopping)"
            )

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Restore the best weights if `restore_best_weights` is set."""
        if self.stopped_epoch > 0:
            self.say(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            self.say(
                "Restoring model weights from the end of the best epoch: "
                f"{self.best_epoch + 1}."
            )
            self.model.set_weights(self.best_weights)


class OptunaPruning(MonitorCallback):
    """End a run when Optuna prunes its trial.

    The trial gets the metric after each epoch that has it. If the study's pruner gives
    the trial up, the run ends in order, as by `EarlyStopping`: all callbacks finish
    their files. Then `fit` raises `optuna.TrialPruned`, which `study.optimize` expects.

    If several processes train together, the first one has the study, and its decision
    holds for all; the others pass `trial=None`. `fit` raises in every process.

    Args:
        trial: Trial of the study, `optuna.trial.Trial`.
        monitor: Name of the metric in the logs. The study has its direction.

    Raises:
        ConfigError: If Optuna isn't installed. When `fit` begins, if the run has no
            such metric, or the study several objectives or the other direction.
        optuna.TrialPruned: At the end of a `fit` whose trial is pruned.

    Example:
        >>> def objective(trial):
        ...     rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
        ...     model.compile(Optimizer("adam", rate), "mse")
        ...     pruning = OptunaPruning(trial, "val_loss")
        ...     history = model.fit(x, y, validation_split=0.2, callbacks=[pruning])
        ...     return history.history["val_loss"][-1]
    """

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        super().__init__(monitor, "auto", 0.0, 0)
        need("optuna", "OptunaPruning", "optuna")
        self.trial = trial
        self._reason: str | None = None

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Check that the run has the metric, and the first process the trial."""
        super().on_train_begin(logs)
        self._reason = None
        if self.run.processes.is_first and not hasattr(self.trial, "should_prune"):
            words = "the trial of the study; None is for the other processes"
            refuse("trial", self.trial, words, "OptunaPruning")
        study = getattr(self.trial, "study", None)  # FixedTrial has no study
        if study is not None and len(study.directions) > 1:
            raise ConfigError(
                f"OptunaPruning(monitor={self.monitor!r}): the study has "
                f"{len(study.directions)} objectives, and Optuna prunes trials of a "
                "single one only. Leave OptunaPruning out."
            )
        better = direction_of(self.monitor, self.run.directions)
        if study is None or better is None:
            return
        direction = study.direction.name.lower()
        if not direction.startswith(better):
            raise ConfigError(
                f"OptunaPruning(monitor={self.monitor!r}): the study has the direction "
                f"{direction!r} and would prune its best trials, as {better} is better "
                "for this metric. Monitor the metric that the objective returns, or "
                f"create_study(direction='{better}imize')."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Report the metric, and stop the run if the trial is pruned."""
        value = self.monitored(logs)
        if value is None:  # not every epoch is validated
            return
        is_pruned = False
        if self.run.processes.is_first:
            self.trial.report(value, epoch)
            is_pruned = self.trial.should_prune()
        if any(self.run.processes.gathered(is_pruned)):
            self._reason = f"Trial was pruned at epoch {epoch + 1}."
            self.run.stop(f"{self._reason[:-1]} (OptunaPruning)")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Let `fit` raise `TrialPruned` once all callbacks have ended the run."""
        if self._reason is not None:
            self.run.after_hooks(self._raise)

    def _raise(self) -> None:
        optuna = need("optuna", "OptunaPruning", "optuna")
        raise optuna.TrialPruned(self._reason)


class TerminateOnNaN(Callback):
    """Stop when the training loss of the epoch so far becomes NaN or infinite.

    As in Keras. The loss is checked after every call. ipufit warns of such a loss in
    any case (`NonFiniteLossWarning`).

    Args:
        raise_error: If True, raise an error instead of ending the run in order.
            `on_train_end` isn't called then, so no callback uses the lost weights.

    Raises:
        RuntimeError: With `raise_error`, when the loss becomes NaN or infinite.

    Example:
        >>> from ipufit.state import RunState
        >>> terminate = TerminateOnNaN()
        >>> terminate.set_run(RunState())
        >>> terminate.on_train_batch_end(7, {"loss": float("nan")})
        Batch 7: Invalid loss, terminating training
        >>> terminate.run.stop_reason
        'the loss is nan (TerminateOnNaN)'
    """

    def __init__(self, raise_error: bool = False) -> None:
        check_flags("TerminateOnNaN", raise_error=raise_error)
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Stop the run if the loss isn't finite."""
        loss = number_in(logs.get("loss"))
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(
                f"NaN or Inf loss: it is {loss} at batch {batch} of epoch "
                f"{self.run.epoch + 1}. The weights are probably lost."
            )
        say(f"Batch {batch}: Invalid loss, terminating training")
        self.run.stop(f"the loss is {loss} (TerminateOnNaN)")


_JOB_END = "SLURM_JOB_END_TIME"


class StopAfter(Callback):
    """Save the run and end it in order before the time of its job is up.

    The run ends after the call in which the time comes, as on SIGTERM: a
    `ModelCheckpoint` or `BackupAndRestore` saves it whole, and the next job goes on
    with `fit(resume="auto")` or with the same `BackupAndRestore`.

    Args:
        minutes: Time from the beginning of the run. None: until the job of Slurm ends
            (`SLURM_JOB_END_TIME`, in seconds since 1970), less the margin.
        margin: Minutes that are left for the last call and the checkpoint, if `minutes`
            is None.

    Raises:
        ConfigError: `minutes` isn't above 0, `margin` is negative, or neither `minutes`
            nor the variable is set.

    Example:
        >>> import torch
        >>> from ipufit import IPUModel, StopAfter
        >>> model = IPUModel(torch.nn.Linear(2, 1))
        >>> model.compile("sgd", "mse")
        >>> x, y = torch.zeros(8, 2), torch.ones(8, 1)
        >>> stop = StopAfter(minutes=1e-9)
        >>> history = model.fit(x, y, 4, epochs=9, verbose=0, callbacks=[stop])
        StopAfter: the time is up, the run ends after this call
    """

    hears_every = None  # the callback doesn't shorten calls

    def __init__(self, minutes: float | None = None, *, margin: float = 2.0) -> None:
        check_argument(self, "margin", margin, least=0)
        if minutes is not None:
            check_argument(self, "minutes", minutes, above=0)
        elif whole_number(os.environ.get(_JOB_END, "")) is None:
            raise ConfigError(
                f"StopAfter() ends with the job of Slurm, and {_JOB_END} isn't set to "
                "a number of seconds: pass minutes."
            )
        self.minutes, self.margin = minutes, margin
        self._deadline = 0.0

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Set the time at which the run ends."""
        if self.minutes is None:
            self._deadline = int(os.environ[_JOB_END]) - 60.0 * self.margin
        else:
            self._deadline = time.time() + 60.0 * self.minutes

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """End the run if the time is up."""
        if time.time() >= self._deadline:
            self._deadline = math.inf
            if self.run.processes.is_first:
                say("StopAfter: the time is up, the run ends after this call")
            self.run.stop("StopAfter", is_eviction=True)


_RATES = ("rates",)
"""Keys of states of 0.3.0; now the optimizer's groups have the rates."""


def set_learning_rate(
    optimizer: Any, rate: float, ratios: Sequence[float] = ()
) -> list[float]:
    """Set the rate of the first parameter group, and scale the other groups' rates.

    Args:
        optimizer: An optimizer of torch or `poptorch.optim`.
        rate: New rate of the first group.
        ratios: Result of the last call, used while the first group's rate is zero.

    Returns:
        Rate of each group divided by that of the first.

    Example:
        >>> import torch
        >>> groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.5, 1.0)]
        >>> sgd = torch.optim.SGD(groups, lr=0.5)
        >>> ratios = set_learning_rate(sgd, 0.0)
        >>> ratios = set_learning_rate(sgd, 0.25, ratios)
        >>> [group["lr"] for group in sgd.param_groups]
        [0.25, 0.5]
    """
    groups = optimizer.param_groups
    first = learning_rate(optimizer)
    if first != 0:
        kept = [float(group["lr"]) / first for group in groups]
    else:
        kept = list(ratios) if len(ratios) == len(groups) else [1.0] * len(groups)
    for group, ratio in zip(groups, kept):
        group["lr"] = rate * ratio
    return kept


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of an optimizer's first parameter group.

    Example:
        >>> import torch
        >>> learning_rate(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        0.5
    """
    return float(optimizer.param_groups[0]["lr"])


def refuse_schedule(model: Any, who: str) -> None:
    """Refuse a model whose schedule sets the learning rate too.

    Args:
        model: An `IPUModel`.
        who: Name of the callback, for the message.

    Raises:
        ConfigError: If the model was compiled with a schedule.
    """
    if model.has_lr_schedule:
        raise ConfigError(
            f"{who} sets the learning rate, and so does the schedule that compile() "
            "got. Use one of the two."
        )


class LearningRateScheduler(Callback):
    """Set the learning rate of every epoch by a function.

    As in Keras. The function sets the rate of the first parameter group, which is
    `learning_rate` in the logs. The other groups keep their ratio to it.

    Args:
        schedule: `schedule(epoch, learning_rate)`, or just `schedule(epoch)`, with a
            0-based epoch. It returns the new rate, a float.
        verbose: 1 prints the rate of every epoch.

    Raises:
        ConfigError: If `schedule` isn't a function of one or two arguments, or returns
            no float of 0 or more. When `fit` begins, if the model was compiled with a
            schedule.

    Example:
        >>> halving = LearningRateScheduler(lambda epoch, rate: rate / 2)
        >>> halving = LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {"group_ratios": list_of(number)}
    former_attributes = _RATES

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self._takes_rate = _takes_two(schedule)
        check_verbose(self, verbose)
        self.schedule = schedule
        self.verbose = verbose
        self.group_ratios: list[float] = []

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Refuse a model whose schedule sets the rate too."""
        refuse_schedule(self.model, "LearningRateScheduler")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Set the rate of the epoch."""
        optimizer = self.model.optimizer
        before = (learning_rate(optimizer),) if self._takes_rate else ()
        rate = self.schedule(epoch, *before)
        if not isinstance(rate, (float, np.float32)):  # np.float64 is a float
            raise ConfigError(
                "The output of the `schedule` function should be a float. Got: "
                f"{rate!r}"
            )
        name = f"schedule({epoch}, ...)"
        check_argument(self, name, float(rate), least=0, is_finite=True)
        self.group_ratios = set_learning_rate(optimizer, float(rate), self.group_ratios)
        if self.verbose > 0:
            say(
                f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to "
                f"{rate}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the rate to the logs."""
        logs["learning_rate"] = learning_rate(self.model.optimizer)


def _takes_two(schedule: Any) -> bool:
    """Return whether a schedule takes the rate besides the epoch."""
    if not callable(schedule):
        refuse("schedule", schedule, "a function schedule(epoch, learning_rate)")
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # some functions in C have no signature
        return True
    for arguments in ((0, 0.0), (0,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return len(arguments) == 2
    raise ConfigError(
        f"schedule{signature} takes neither (epoch, learning_rate) nor (epoch)."
    )


class ReduceLROnPlateau(MonitorCallback):
    """Reduce the learning rate when a metric hasn't improved for some epochs.

    As in Keras. All parameter groups are reduced by the same ratio. The rate of the
    first group is `learning_rate` in the logs of each epoch.

    Args:
        monitor: Name of the metric in the logs.
        factor: Factor of each reduction, below 1.
        patience: Number of epochs without improvement after which to reduce.
        verbose: 1 prints a line for each reduction.
        mode: `"min"`, `"max"`, or `"auto"`.
        min_delta: Smallest change that counts as an improvement.
        cooldown: Number of epochs to pause after a reduction.
        min_lr: Lower bound of the rate.

    Attributes:
        best: Best value of this run.
        wait: Number of epochs since the last improvement.
        cooldown_counter: Number of epochs left of the pause.

    Raises:
        ConfigError: If `factor` is 1 or more, or an argument is negative. When `fit`
            begins, if the model was compiled with a schedule. At the metric's first
            value, if `mode="auto"` and its direction isn't known.

    Example:
        >>> ReduceLROnPlateau("loss", factor=2.0)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: ReduceLROnPlateau does not support a factor >= 1...
    """

    saved_attributes: ClassVar[Mapping[str, Kind]] = {
        "best": optional(number),
        "wait": count,
        "cooldown_counter": whole,
    }
    former_attributes = _RATES

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta, verbose)
        for name, value in (("factor", factor), ("patience", patience)):
            check_argument(self, name, value, least=0)
        check_argument(self, "cooldown", cooldown, least=0, is_whole=True)
        check_argument(self, "min_lr", min_lr, least=0, is_finite=True)
        if factor >= 1.0:
            raise ConfigError(
                "ReduceLROnPlateau does not support a factor >= 1.0. Received "
                f"factor={factor}"
            )
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._reset()

    def _reset(self) -> None:
        self.best = None
        self.wait = 0
        self.cooldown_counter = 0

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Reset the values of an earlier run."""
        super().on_train_begin(logs)
        refuse_schedule(self.model, "ReduceLROnPlateau")
        self._reset()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Add the rate to the logs, and reduce it after `patience` epochs."""
        logs["learning_rate"] = learning_rate(self.model.optimizer)
        value = self.value_in(logs, "Learning rate reduction is conditioned", ".")
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.improves(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        old = learning_rate(self.model.optimizer)
        if np.float32(old) <= np.float32(self.min_lr):  # equal up to rounding
            return
        new = max(old * self.factor, self.min_lr)
        set_learning_rate(self.model.optimizer, new)
        self.say(
            f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {new}."
        )
        self.cooldown_counter = self.cooldown
        self.wait = 0
