# SPDX-License-Identifier: Apache-2.0
"""The parts of a model: settings of `compile`, runs, and what it knows of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Protocol, Sequence

import torch

from ipufit.callbacks import CallbackList, History
from ipufit.config import IPUConfig
from ipufit.data import Source
from ipufit.distributed import Processes
from ipufit.engine import (
    Counterparts,
    Executors,
    Figures,
    Inferred,
    Objective,
    OutputSize,
)
from ipufit.errors import NotCompiledError
from ipufit.mixing import Mixing
from ipufit.optimizers import Optimization, WeightAverage
from ipufit.resume import Snapshot
from ipufit.state import RunState


@dataclass(frozen=True)
class CompileSettings:
    """The settings that `compile` has made of its arguments.

    Attributes:
        objective: Losses and metrics.
        optimization: The optimiser and its schedule.
        training_figures: Figures of `fit`.
        test_figures: Figures of `evaluate` and of validations.
        average: The running average of the weights; None for none.
        mixing: How samples are mixed in training; None if they aren't.
        in_words: Each setting as text, which a resumed run compares.
        arguments: The arguments of `compile` by name, of which copies are made.
    """

    objective: Objective
    optimization: Optimization
    training_figures: Figures
    test_figures: Figures
    average: WeightAverage | None
    mixing: Mixing | None
    in_words: dict[str, str]
    arguments: Mapping[str, Any]


class Runs:
    """The runs of a model that are under way, and the last `fit`.

    Attributes:
        fit: State of the `fit` under way, or else of the last one.
        innermost: State of the run under way; of an evaluation in a callback of `fit`
            rather than of the `fit`.
        hooks: Callbacks of the innermost run; None between runs.
        snapshot: Takes checkpoints of the `fit` under way; None between fits.
        batch_loop: The optimiser that `train_on_batch` goes on with; None if a `fit`
            came since, after which schedules begin anew.
        output_sizes: Sizes of the outputs of computations that were looked at since
            `compile`, each after all that it depends on; None if unknown.
    """

    def __init__(self) -> None:
        self.fit = self.innermost = RunState()
        self.hooks: CallbackList | None = None
        self.snapshot: Snapshot | None = None
        self.batch_loop: Optimization | None = None
        self.output_sizes: list[tuple[Any, OutputSize | None]] = []


@dataclass
class PastData:
    """Facts that a model keeps about the data it was given.

    Attributes:
        source: Data of the last run, whose inputs `summary()` shows; None before any.
        target_columns: Columns that the last `fit` or `evaluate` had as targets:
            `predict` leaves them alone.
        num_passes: Passes over training data, so that no fit repeats an order.
    """

    source: Source | None = None
    target_columns: Sequence[str] = ()
    num_passes: int = 0


class Model(Protocol):
    """The attributes of an `IPUModel`.

    Attributes:
        config: The layout, with `compile`'s `steps_per_execution`.
        processes: The processes that run the model together.
        history: History of the last `fit`.
    """

    module: torch.nn.Module
    config: IPUConfig
    processes: Processes
    history: History | None
    _given_config: IPUConfig
    _counterparts: Counterparts
    _executors: Executors
    _settings: CompileSettings | None
    _runs: Runs
    _data: PastData


def predicted(model: Model) -> Inferred:
    """The computation of a program for `predict`, also before `compile`."""
    settings = model._settings
    return Inferred(False) if settings is None else settings.objective.predicted


def settings_of(model: Model) -> CompileSettings:
    """The settings of a compiled model.

    Raises:
        NotCompiledError: `compile` wasn't called.
    """
    if model._settings is None:
        raise NotCompiledError(
            "You must call compile() before using the model: "
            "model.compile(optimizer='adamw', loss='cross_entropy')."
        )
    return model._settings
