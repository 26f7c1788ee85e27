# SPDX-License-Identifier: Apache-2.0
"""The parts of a model, as the functions of this package see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

import torch

from ipufit.callbacks import CallbackList, History
from ipufit.config import IPUConfig
from ipufit.data import Source
from ipufit.engine import Executors
from ipufit.errors import NotCompiledError
from ipufit.optimizers import Optimization
from ipufit.resume import Snapshot
from ipufit.state import RunState

from .compile_settings import CompileSettings


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
    """

    def __init__(self) -> None:
        self.fit = self.innermost = RunState()
        self.hooks: CallbackList | None = None
        self.snapshot: Snapshot | None = None
        self.batch_loop: Optimization | None = None


@dataclass
class PastData:
    """What a model remembers of the data that it was given.

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
        module: The user's module.
        config: The layout, with `compile`'s `steps_per_execution`.
        history: History of the last `fit`.
    """

    module: torch.nn.Module
    config: IPUConfig
    history: History | None
    _given_config: IPUConfig
    _executors: Executors
    _settings: CompileSettings | None
    _runs: Runs
    _data: PastData


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
