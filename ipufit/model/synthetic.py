# SPDX-License-Identifier: Apache-2.0
"""`fit(synthetic=True)`: a copy of the model trains, and its figures mean nothing."""

from __future__ import annotations

import warnings

from ipufit import callbacks as known  # whose names are imported at their first use
from ipufit.callbacks import CallbackList
from ipufit.callbacks.base import CallbackLike
from ipufit.config import Instruments
from ipufit.errors import ConfigError, SyntheticDataWarning
from ipufit.types import PathLike

from .copying import independent_copy
from .parts import Model, settings_of


def instrumented(
    model: Model,
    instruments: Instruments,
    resume: PathLike | None,
    callbacks: CallbackLike,
) -> Model:
    """The model itself, or its copy that trains on synthetic data; called by `fit`.

    Args:
        model: A compiled model.
        instruments: Settings that this run adds to those of the config.
        resume: As for `fit`.
        callbacks: As for `fit`.

    Raises:
        NotCompiledError: `compile` wasn't called.
        ConfigError: The run goes on from a checkpoint, or callbacks write some.
        UnsupportedError: The model can't be copied.
    """
    if not instruments.is_synthetic:
        return model
    settings_of(model)
    writers = known.BackupAndRestore, known.ModelCheckpoint
    keeping = [
        type(callback).__name__
        for callback in CallbackList(callbacks).callbacks
        if isinstance(callback, writers)
    ]
    if resume is not None or keeping:
        what = "resume=" if resume is not None else " and ".join(keeping)
        raise ConfigError(
            f"synthetic=True and {what}: nothing is learnt from synthetic data, so "
            "there is nothing to go on from or to keep. Leave it out while you measure."
        )
    if model.processes.is_first:
        warnings.warn(
            "fit(synthetic=True): the devices make their inputs themselves and send "
            "nothing back. Losses and metrics mean nothing, and the model stays as it "
            "is; only times count.",
            SyntheticDataWarning,
            stacklevel=3,
        )
    return independent_copy(model, "fit(synthetic=True)")
