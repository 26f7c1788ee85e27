# SPDX-License-Identifier: Apache-2.0
"""Whether a run that goes on is the one that was saved, and in which layout."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Mapping

from ipufit import checkpoint as files
from ipufit.batching import BatchPlan
from ipufit.distributed import get_process_info
from ipufit.engine import Training
from ipufit.errors import ConfigError, OtherLayoutWarning

from .settings import check_settings

_SEEDED = "samples seeded one by one"  # a setting that depends on processes


def check_same_run(
    checkpoint: files.Checkpoint | None,
    training: Training,
    num_samples: int | None,
    settings: Mapping[str, str],
) -> None:
    """Refuse to go on with other settings than the checkpoint's.

    Micro-batch, gradient accumulation, replicas and processes may be others, if an
    update has as many samples.

    Args:
        checkpoint: From `Snapshot.take`; None for a new run, which may have any.
        training: Training of the run that is to go on.
        num_samples: Number of samples in the data; None if unknown.
        settings: Further settings of the run, in words.

    Raises:
        ConfigError: The samples of an update or call, the data or the settings are
            others.

    Warns:
        OtherLayoutWarning: What can't go on as it would have.
    """
    if checkpoint is None:
        return
    saved, now = BatchPlan(**checkpoint.state["plan"]), training.plan
    odd = [
        f"{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for name in ("batch_size", "device_iterations")
        if getattr(saved, name) != getattr(now, name)
    ]
    before = checkpoint.state["data"]["num_samples"]
    if before != num_samples:
        odd.append(f"samples were {before} and are {num_samples}")
    was = dict(checkpoint.state.get("settings", {}))
    if saved.processes != now.processes:
        was.pop(_SEEDED, None)
    odd += check_settings(was, settings)
    if odd:
        raise ConfigError(
            f"The run can't be resumed exactly: {'; '.join(odd)}. Use the settings and "
            "data that it began with; or, to train on from what was learnt, "
            "model.load(path) and fit() without resume."
        )
    if saved != now and get_process_info().is_first:
        _warn_of_layout(saved, now)


def _warn_of_layout(saved: BatchPlan, now: BatchPlan) -> None:
    """Warn of what can't be as it would have been."""
    names = [
        name
        for name in asdict(now)
        if name != "device_iterations" and getattr(saved, name) != getattr(now, name)
    ]
    changes = ", ".join(
        f"{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for name in names
    )
    others = ["random numbers of devices, such as dropout masks"]
    if {"replicas", "processes"} & set(names):
        others.append("running statistics, which go on from the first replica's")
    if "processes" in names:
        others.append("random numbers of transforms that don't belong to one sample")
    warnings.warn(
        f"The run goes on in another layout: {changes}. Order of the data, optimizer, "
        "schedule and figures go on, rounded otherwise. Other than they would have "
        f"been are {'; '.join(others)}.",
        OtherLayoutWarning,
        stacklevel=4,
    )


def has_other_layout(checkpoint: files.Checkpoint, training: Training) -> bool:
    """Whether a checkpoint is of a run whose devices divided samples otherwise."""
    return bool(checkpoint.state["plan"] != asdict(training.plan))
