# SPDX-License-Identifier: Apache-2.0
"""`lr_find`: a learning-rate range test, on a copy of the model."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, Iterator

from ipufit.batching import check_count
from ipufit.callbacks.messages import say
from ipufit.data import (
    Call,
    HostRandomState,
    TrainingBatches,
    as_source,
    generators_of,
    is_stream,
)
from ipufit.engine import Sums, Training
from ipufit.errors import ConfigError, DataError
from ipufit.state import RunState
from ipufit.types import Verbose

from .copying import independent_copy
from .parts import Model, settings_of
from .rate_curve import Divergence, LearningRateCurve
from .run_frame import under_way
from .training import training_of


def lr_find(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    sample_weight: Any = None,
    min_lr: float = 1e-7,
    max_lr: float = 10.0,
    num_rates: int = 100,
    early_stop_threshold: float | None = 4.0,
    verbose: Verbose = 1,
) -> LearningRateCurve:
    """Train at rising learning rates, and suggest one: Smith's range test.

    A copy of the model is trained, from its weights and the state of its optimizer as
    they are now. This model stays as it is: weights, the optimizer's state, random
    states, the order of the data and the number of updates. It gives its IPUs back, as
    the copy needs them, and takes them again for its next call.

    Each call of the device has a rate of its own, which rises exponentially from call
    to call. So the `device_iterations` updates of a call share one: with 1 of them each
    update has its own. The copy's program is compiled once: a new rate is only sent.

    Several parameter groups keep the ratios of their rates: the rates here are those
    of the first group, as `model.optimizer.learning_rate` is. The test ignores a
    learning-rate schedule.

    Args:
        x: Data, as for `fit`; it is gone through as often as needed. A generator that
            can't be restarted loses the batches that the test takes.
        y: As for `fit`.
        batch_size: As for `fit`.
        sample_weight: As for `fit`.
        min_lr: The first rate, above 0.
        max_lr: The last rate, above `min_lr`.
        num_rates: Number of rates, 2 or more.
        early_stop_threshold: Multiple of its lowest value at which the running mean of
            the loss ends the test, above 1; None to go on. NaN and infinities end it
            in any case.
        verbose: 0 prints nothing; else the suggestion is printed.

    Returns:
        Rates, losses and the suggestion, the same in all processes. `plot()` draws
        them.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: The rates aren't ascending numbers above 0, there are too few, the
            threshold is 1 or less, or the batch size is not made of its factors.
        DataError: Data that can't be used, or without one call.
        UnsupportedError: The model can't be copied.

    Example:
        >>> import torch
        >>> from ipufit import IPUModel
        >>> x = torch.randn(64, 4)
        >>> model = IPUModel(torch.nn.Linear(4, 1))
        >>> model.compile("sgd", "mse")
        >>> curve = model.lr_find(x, x.sum(1, keepdim=True), 16, verbose=0)
        >>> 1e-3 < curve.suggestion < 1
        True
        >>> model.num_updates
        0
    """
    settings_of(self)
    rates = _rates(min_lr, max_lr, num_rates)
    _check_threshold(early_stop_threshold)
    before = HostRandomState(generators_of(x) if is_stream(x) else ())
    try:
        source = as_source(
            x,
            y,
            sample_weight,
            num_workers=self.config.num_workers,
            processes=self.processes,
        )
        copied = independent_copy(self, "lr_find()")
        training, batches = training_of(
            copied,
            source,
            batch_size,
            shuffle=True,
            drop_last=True,
            class_weight=None,
        )
        # No average of the weights is wanted, which would fetch them after every call.
        training = dataclasses.replace(training, average=None)
        divergence = Divergence(early_stop_threshold)
        curve = _tested(copied, training, batches, rates, divergence, verbose)
    finally:
        before.put_back()
    if verbose and self.processes.is_first:
        say(str(curve))
    return curve


def _tested(
    model: Model,
    training: Training,
    batches: TrainingBatches,
    rates: list[float],
    divergence: Divergence,
    verbose: Verbose,
) -> LearningRateCurve:
    """Train at each rate until the loss diverges; the IPUs are free afterwards."""
    groups = training.optimization.optimizer.param_groups
    first = groups[0]["lr"]
    factors = [group["lr"] / first if first else 1.0 for group in groups]
    losses: list[float] = []
    reason = None
    with contextlib.ExitStack() as stack:
        _, display = stack.enter_context(under_way(model, RunState(), None, verbose))
        stack.callback(batches.close)
        training.prepare(batches, display)
        for rate, call in zip(rates, _endless(batches)):
            for group, factor in zip(groups, factors):
                group["lr"] = rate * factor
            losses.append(_loss_of(training, call))
            if not math.isfinite(losses[-1]):
                reason = f"the loss became {losses[-1]}"
            elif divergence.has_come(losses[-1]):
                reason = "the loss diverged"
            if reason is not None:
                break
    model._executors.detach()
    if not losses:
        raise DataError(
            f"`x` has not one call: it gave fewer samples than "
            f"{training.plan.describe()}. Lower one of these, or pass more data."
        )
    if reason is None and len(losses) < len(rates):
        reason = "the data ran out"
    return LearningRateCurve.of(rates[: len(losses)], losses, reason)


def _loss_of(training: Training, call: Call) -> float:
    """Train on a call; its mean loss over the samples of all processes."""
    figures = training.figures
    figures.reset()
    training.run(call, is_scheduled=False)
    if not figures.processes.are_several:
        return figures.loss
    everyone = figures.processes.gathered(figures.sums())
    return figures.running(Sums.joined(everyone)).get("loss", math.nan)


def _endless(batches: TrainingBatches) -> Iterator[Call]:
    """The calls of one pass after the other, until a pass has none."""
    has_calls = True
    while has_calls:
        has_calls = False
        for call in batches:
            if call.num_real_of_all:
                has_calls = True
                yield call


def _rates(low: float, high: float, count: int) -> list[float]:
    """Rates that rise exponentially.

    Raises:
        ConfigError: There are no such rates.

    Example:
        >>> [round(rate, 3) for rate in _rates(0.01, 1.0, 3)]
        [0.01, 0.1, 1.0]
    """
    for name, value in (("min_lr", low), ("max_lr", high)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r} is no number above 0.")
    check_count("num_rates", count)
    if low >= high or count < 2:
        raise ConfigError(
            f"lr_find() has no range: min_lr={low!r}, max_lr={high!r}, "
            f"num_rates={count!r}. max_lr must be above min_lr, with 2 rates or more."
        )
    step = math.log(high / low) / (count - 1)
    return [low, *(low * math.exp(step * at) for at in range(1, count - 1)), high]


def _check_threshold(threshold: float | None) -> None:
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if threshold is not None and not (is_number and threshold > 1):
        raise ConfigError(
            f"early_stop_threshold={threshold!r} is neither None nor a number above 1."
        )
