# SPDX-License-Identifier: Apache-2.0
"""Runs that only compile, as `ipufit compile` asks for: programs, and no figures."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Callable, Iterable, NoReturn

from ipufit import _env
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import History, ProgressDisplay
from ipufit.data import HostRandomState, TrainingBatches
from ipufit.engine import Evaluation, Objective, Training
from ipufit.types import Logs

from .building import Watch
from .parts import Model


def compiled(
    model: Model,
    name: str,
    plan: BatchPlan,
    options: poptorch.Options,
    prepare: Callable[[ProgressDisplay], None],
) -> None:
    """Have a program compiled, and write a file that describes it.

    Random states are put back. A program that the model had already has no file of its
    own.

    Args:
        model: The model.
        name: "training" or "inference".
        plan: The factors of a call.
        options: Options of the program.
        prepare: Compiles, and tells a display.
    """
    display = _Lines() if model.processes.is_first else ProgressDisplay()
    watch, before = Watch(display, options), HostRandomState()
    try:
        prepare(watch)
    finally:
        before.put_back()
    folder = _env.compile_only()
    if folder is None or not watch.has_compiled or not model.processes.is_first:
        return
    built = watch.built(name, plan)
    about = {
        "program": name,
        "module": type(model.module).__name__,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation": plan.gradient_accumulation,
        "replicas": plan.replicas,
        "device_iterations": plan.device_iterations,
        "samples_per_call": plan.samples_per_call,
        "seconds": round(built.seconds, 3),
        "cache": built.cache,
        "executables": sorted(watch.new_files),
        "poptorch": str(poptorch.__version__),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    number = 1 + sum(1 for _ in Path(folder).glob("*-*.json"))
    target = Path(folder) / f"{number:03d}-{name}.json"
    partial = target.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, target)
    sys.stderr.write(f"ipufit: {built}\n")


class _Lines(ProgressDisplay):
    """Prints lines about what was chosen, as those about programs are printed."""

    def noted(self, line: str) -> None:
        """Print the line."""
        sys.stderr.write(f"ipufit: {line}\n")


def fitted(
    model: Model,
    training: Training,
    batches: TrainingBatches,
    test: Evaluation | None,
    epochs: Iterable[int],
) -> History:
    """Compile what a `fit` would run.

    Args:
        model: The model.
        training: Its training.
        batches: The calls of a pass over the data.
        test: The validation; None for none.
        epochs: Indices of the epochs.

    Returns:
        A history with NaN for each figure of each epoch.
    """
    if test is not None:
        compiled(model, "inference", test.plan, test.options, test.prepare)

    def prepare(display: ProgressDisplay) -> None:
        training.prepare(batches, display)

    compiled(model, "training", training.plan, training.options, prepare)
    training.figures.reset()
    names = {*training.figures.logs(), *unknown_figures(training.figures.objective)}
    if test is not None:
        validated = unknown_figures(test.figures.objective)
        names.update([f"val_{name}" for name in validated])
    history = model.history = History()
    history.epoch = list(epochs)
    history.history = {name: [math.nan] * len(history.epoch) for name in sorted(names)}
    return history


def unknown_figures(objective: Objective) -> Logs:
    """Figures of a run that wasn't made: NaN, by their names."""
    measured = [measure.full_name for measure in objective.measures]
    return dict.fromkeys(sorted({"loss", *measured}), math.nan)


def unknown(objective: Objective, return_dict: bool) -> Logs | float | list[float]:
    """Such figures by name; or as Keras's list, or the loss if there is only that."""
    figures = unknown_figures(objective)
    if return_dict:
        return figures
    return list(figures.values()) if len(figures) > 1 else math.nan


def end_script() -> NoReturn:
    """End a script that asks for outputs: nothing was computed.

    Raises:
        SystemExit: With status 0.
    """
    sys.stderr.write(
        "ipufit: the script ends at its first prediction, because programs are only "
        "compiled and there are no outputs.\n"
    )
    raise SystemExit(0)
