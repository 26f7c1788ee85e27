# SPDX-License-Identifier: Apache-2.0
"""Compile the programs of a model ahead of its runs, and report them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Iterator

from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.callbacks.progress import Notes
from ipufit.data.datasets import Source
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import example_of, num_trained_on, validation_sources
from ipufit.distributed import exchanges_off
from ipufit.engine.loop import Inference, Training
from ipufit.engine.metric_state import MetricState
from ipufit.engine.step import NoForwardError
from ipufit.errors import do_all
from ipufit.types import ShownAsText

from .arguments import FitArguments, InferenceArguments
from .calls import CallPlanner


@dataclass(frozen=True, repr=False)
class BuiltProgram(ShownAsText):
    """A program that `build` has prepared.

    Attributes:
        name: "training" or "inference".
        plan: The factors of a call.
        seconds: Time for tracing and compiling; 0 if the model had the program already.
        cache: "hit" if PopTorch has found the executable in its cache, "miss" if it has
            compiled one and stored it, "none" otherwise: there is no cache, or PopTorch
            doesn't use it (an IPU model, the emulator), or the model had the program.
        remark: The updates or passes of a call, and why not more, if the config leaves
            them open.
    """

    name: str
    plan: BatchPlan
    seconds: float
    cache: str
    remark: str = ""

    def __str__(self) -> str:
        """Describe the program in a line."""
        ending = {"hit": ", from the cache", "miss": ", put into the cache"}
        return (
            f"{self.name} program of {self.plan.samples_per_call} samples per call: "
            f"{self.seconds:.1f}s{ending.get(self.cache, '')}"
            f"{'; ' if self.remark else ''}{self.remark}"
        )


@dataclass(frozen=True, repr=False)
class Build(ShownAsText):
    """The programs that `build` has prepared, in the order of their compilation.

    Example:
        >>> plan = BatchPlan(4)
        >>> print(Build((BuiltProgram("inference", plan, 2.5, "miss"),)))
        inference program of 4 samples per call: 2.5s, put into the cache
    """

    programs: tuple[BuiltProgram, ...]

    @property
    def seconds(self) -> float:
        """Time for all of them."""
        return sum(program.seconds for program in self.programs)

    def __str__(self) -> str:
        """Return a line for each program."""
        return "\n".join(map(str, self.programs))


def built(program: Training | Inference, display: ProgressDisplay) -> BuiltProgram:
    """Prepare a program, and compare the cache of executables before and after."""
    options = program.options.toDict()
    folder = options.get("cachePath") if options.get("enableEngineCaching") else ""
    before, seconds = _executables(folder), program.executors.seconds
    program.prepare(display)
    taken = program.executors.seconds - seconds
    new = _executables(folder) - before
    cache = "none"
    if taken and (before or new):
        cache = "miss" if new else "hit"
    name = "training" if isinstance(program, Training) else "inference"
    return BuiltProgram(name, program.plan, taken, cache, program.remark)


def _executables(folder: Any) -> set[str]:
    """Return the names of the executables in PopART's cache, a file per program.

    Their names are hashes of the programs (PopART, `Executablex::getCachePath`), so a
    program whose executable was found adds no file.
    """
    try:
        names = os.listdir(folder) if folder else []
    except OSError:  # PopART makes the folder
        names = []
    return {name for name in names if name.endswith(".popef")}


def build_fit(
    planner: CallPlanner, arguments: FitArguments, display: ProgressDisplay
) -> Build:
    """Compile the programs of a `fit` to come, of `evaluate` and of `predict`.

    Args:
        planner: Plans the calls of the model.
        arguments: Arguments of the `fit`.
        display: Shows what is compiled.

    Raises:
        DataError: Data that can't be used, or a generator, which would lose its first
            batch.
    """
    source = example_of(*arguments.data, is_whole=arguments.pads, **planner.loading)
    planner.settle(source)
    training, settings = None, planner.settings
    try:
        with HostRandomState():
            if settings is not None and (
                settings.objective.owns_loss or source.structure.has_targets
            ):
                training = planner.training(source, arguments)
            programs: dict[object, Training | Inference] = {}
            for inference in _inference_programs(planner, source, arguments, training):
                left_over = tuple(getattr(inference, "left_over", ()))
                key = inference.computation, inference.plan, left_over
                programs.setdefault(key, inference)
            if training is not None:
                programs[training] = training
            prepared = []
            for program in programs.values():
                try:
                    prepared.append(built(program, display))
                except NoForwardError:
                    is_called = (
                        isinstance(program, Training) or program.computation.step
                    )
                    if training is None or is_called:
                        raise  # else only its steps are used
            return Build(tuple(prepared))
    except BaseException:
        with exchanges_off():  # other processes are elsewhere
            do_all([planner.executors.detach], is_failing=True)
        raise


def build_offline(model: Any, arguments: FitArguments, cache_dir: str) -> Build:
    """Compile the programs of a `fit` for IPUs that may be elsewhere.

    Args:
        model: The model, which can't run any more.
        arguments: Arguments of the `fit`.
        cache_dir: Directory for the executables, if the config has none.
    """
    planner: CallPlanner = model._planner
    planner.compile_offline(cache_dir)
    if planner.settings is not None:
        model.compile(**planner.settings.arguments)
    return build_fit(planner, arguments, Notes())


def _inference_programs(
    planner: CallPlanner,
    source: Source,
    arguments: FitArguments,
    training: Training | None,
) -> Iterator[Inference]:
    """Yield plans with the arguments for which a run may have a program of its own."""
    sets, num_validated = {"": source}, None
    split, count = arguments.validation_split, source.num_certain
    if arguments.validation_data is not None:
        x, y, _ = arguments.data
        sets = validation_sources(arguments.validation_data, y, x, **planner.loading)
    elif count is not None and split:
        num_validated = count - num_trained_on(count, split)
    if training is None:
        sizes = InferenceArguments(arguments.batch_size)
        for data in sets.values():
            yield planner.inference(data, planner.predicted, "predict", sizes)
        return
    usual = InferenceArguments()
    for data in sets.values():
        objective, metrics = training.metrics.objective, None
        if arguments.validation_data is not None or num_validated is not None:
            # The number of rows is known, and so are those left over.
            metrics = MetricState(objective)
        of_validation = InferenceArguments(
            arguments.validation_batch_size,
            callbacks=arguments.callbacks,
            training=training.plan,
            beside=[other for other in sets.values() if other is not data],
            max_rows=num_validated,
        )
        for sizes in (of_validation, usual):
            yield planner.inference(data, objective.evaluated, "test", sizes, metrics)
    for data in sets.values():
        yield planner.inference(data, planner.predicted, "predict", usual)
