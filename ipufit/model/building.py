# SPDX-License-Identifier: Apache-2.0
"""`build`: has the programs of the next runs compiled before any of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from ipufit._failures import do_all
from ipufit._poptorch import poptorch
from ipufit.batching import BatchPlan
from ipufit.callbacks import CallbackList, ProgressDisplay, make_progress
from ipufit.callbacks.base import CallbackLike
from ipufit.data import (
    HostRandomState,
    Source,
    TrainingBatches,
    example_of,
    num_trained_on,
    validation_source,
)
from ipufit.distributed import exchanges_off
from ipufit.engine import (
    Inferred,
    NoForwardError,
    Training,
    remark_on_passes,
)
from ipufit.planning.choices import Choice
from ipufit.types import Verbose

from .evaluating import inference_batches, plan_of_calls, rows_to_evaluate
from .parts import Model, predicted
from .splitting import settle
from .training import training_of
from .updates_per_call import updates_per_call


@dataclass(frozen=True)
class BuiltProgram:
    """A program that `build` has made ready.

    Attributes:
        name: "training" or "inference".
        plan: The factors of a call.
        seconds: Time that PopTorch took to trace and compile it; 0 if the model had the
            program already.
        cache: "hit" if PopTorch has found the executable in its cache, "miss" if it has
            compiled one and put it there, "none" if it did neither: there is no cache,
            or PopTorch keeps nothing in it (an IPU model, the emulator), or the model
            had the program.
        remark: The updates or passes of its calls, and why not more, if the config
            leaves them open.
    """

    name: str
    plan: BatchPlan
    seconds: float
    cache: str
    remark: str = ""

    def __str__(self) -> str:
        """The program in a line."""
        ending = {"hit": ", from the cache", "miss": ", put into the cache"}
        return (
            f"{self.name} program of {self.plan.samples_per_call} samples per call: "
            f"{self.seconds:.1f}s{ending.get(self.cache, '')}"
            f"{'; ' if self.remark else ''}{self.remark}"
        )


@dataclass(frozen=True)
class Build:
    """The programs that `build` has made ready, in the order of their compilation.

    Example:
        >>> plan = BatchPlan(4)
        >>> print(Build((BuiltProgram("inference", plan, 2.5, "miss"),)))
        inference program of 4 samples per call: 2.5s, put into the cache
    """

    programs: tuple[BuiltProgram, ...]

    @property
    def seconds(self) -> float:
        """Time that all of them took."""
        return sum(program.seconds for program in self.programs)

    def __str__(self) -> str:
        """A line for each program."""
        return "\n".join(map(str, self.programs))


def build(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Verbose = "auto",
    callbacks: CallbackLike = None,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    validation_batch_size: int | None = None,
    *,
    drop_last: bool | str = True,
    validation_split: float = 0.0,
    steps_per_epoch: int | None = None,
    validation_updates: int | None = None,
    validation_data: Any = None,
) -> Build:
    """Have the programs of the next runs compiled, before any data is gone through.

    Compiling takes minutes on IPUs, and it is here that a module fails which an IPU
    can't run. The next `fit`, `evaluate` and `predict` with the same arguments compile
    nothing. The weights, the optimizer and the random states stay as they are.

    The training program is built if `compile` was called and there are targets, or
    the module returns its own loss. The inference program is built for validation in
    `fit`, and for `evaluate` and `predict` without a `batch_size`. These are one
    program if the config has a `micro_batch_size`, and may be two if it hasn't.

    Where the config leaves `device_iterations` open, the training program is that of
    `fit` with the same data and arguments. Of a sample or batch alone it has one update
    per call, and a line says so: then set `device_iterations`, or pass the data. So it
    is with `inference_iterations`: the inference programs are those for as many samples
    as `validation_data` or `validation_split` give, or else `x`.

    Args:
        x: Data as for `fit`; only its first sample is read, or the first batch of a
            loader. Or a batch; or tensors with shapes and types alone, such as
            `torch.empty(1, 3, 224, 224, device="meta")`. Dim 0 counts samples, and
            one is enough.
        y: Targets, as for `fit`.
        batch_size: As for `fit`; without a training program as for `predict`.
        verbose: 0 for nothing, else a line for each program.
        callbacks: Callbacks of the `fit` to come. One that watches gradients makes
            another program.
        class_weight: As for `fit`.
        sample_weight: As for `fit`.
        validation_batch_size: As for `fit`.
        drop_last: As for `fit`. To pad counts only if the samples don't fill their
            calls, so `x` must have as many samples as the data then.
        validation_split: As for `fit`; it counts where `device_iterations` is open.
        steps_per_epoch: As for `fit`, likewise.
        validation_updates: As for `fit`, likewise.
        validation_data: As for `fit`, where `inference_iterations` is open; only the
            number of samples and the first one count.

    Returns:
        The programs, with the seconds that each took, and whether it came from the
        cache of executables.

    Raises:
        DataError: Data that can't be used, or a generator, which would lose its first
            batch.
        ConfigError: The batch size is not made of its factors.
        Error: PopTorch refuses something (`ipufit.poptorch.Error`).

    Example:
        >>> import torch
        >>> from ipufit import IPUConfig, IPUModel
        >>> model = IPUModel(torch.nn.Linear(4, 3), IPUConfig(micro_batch_size=8))
        >>> model.compile("adamw", "cross_entropy")
        >>> x = torch.empty(1, 4, device="meta")
        >>> y = torch.empty(1, dtype=torch.int64, device="meta")
        >>> built = model.build(x, y, batch_size=32, verbose=0)
        >>> [program.name for program in built.programs]
        ['inference', 'training']
    """
    source = example_of(
        x,
        y,
        sample_weight,
        is_whole=drop_last is not True,
        num_workers=self.config.num_workers,
        processes=self.processes,
    )
    settle(self, source)
    arguments = {
        "drop_last": drop_last,
        "validation_split": validation_split,
        "steps_per_epoch": steps_per_epoch,
        "validation_updates": validation_updates,
    }
    before = HostRandomState()
    try:
        trained = None
        if _is_trained(self, source):
            trained = training_of(
                self,
                source,
                batch_size,
                shuffle=True,
                drop_last=drop_last,
                class_weight=class_weight,
                watched=CallbackList(callbacks).watched_gradients(self.module),
                choose=lambda plan: updates_per_call(
                    self, source, callbacks, None, arguments, plan
                ),
            )
        size = batch_size if trained is None else validation_batch_size
        training = None if trained is None else trained[0]
        tested = source, _num_validated(source, validation_split)
        if validation_data is not None:
            validated = validation_source(
                validation_data,
                y,
                num_workers=self.config.num_workers,
                processes=self.processes,
            )
            tested = validated, None
        inferences = _inferences(self, *tested, size, training, callbacks)
        shown = make_progress(verbose if self.processes.is_first else 0)
        return Build(tuple(_built(self, inferences, trained, shown)))
    except BaseException:
        with exchanges_off():  # other processes are elsewhere
            do_all([self._executors.detach], is_failing=True)
        raise
    finally:
        before.put_back()


def _is_trained(model: Model, source: Source) -> bool:
    """Whether there is a training program to build."""
    if model._settings is None:
        return False
    return model._settings.objective.owns_loss or source.structure.has_targets


class _Inference(NamedTuple):
    """An inference program to build.

    Attributes:
        inferred: The computation of the program.
        source: The data.
        plan: The factors of a call.
        options: PopTorch's options.
        choice: The passes of a call, if they were left open and chosen.
    """

    inferred: Inferred
    source: Source
    plan: BatchPlan
    options: poptorch.Options
    choice: Choice | None


def _num_validated(source: Source, validation_split: float) -> int | None:
    """Number of samples that a split leaves to validate on; None without a split."""
    count = source.num_certain
    if count is None or not validation_split:
        return None
    return count - num_trained_on(count, validation_split)


def _inferences(
    model: Model,
    source: Source,
    num_validated: int | None,
    batch_size: int | None,
    training: Training | None,
    callbacks: CallbackLike,
) -> list[_Inference]:
    """The inference programs of the next runs, each once.

    Args:
        model: The model.
        source: The data.
        num_validated: Number of the samples to validate on; None for all.
        batch_size: As for `predict`, or for the validation of `fit`.
        training: The training; None if there is none.
        callbacks: Callbacks of the `fit` to come.
    """
    plan = None if training is None else training.plan
    sizes = [rows_to_evaluate(model.config, source, batch_size, None, plan)[0]]
    runs: list[tuple[int, Inferred, CallbackLike, str]]
    runs = [(sizes[0], predicted(model), None, "predict")]
    if training is not None:
        sizes.append(rows_to_evaluate(model.config, source, None, None)[0])
        evaluated = training.figures.objective.evaluated
        runs = [(sizes[0], evaluated, callbacks, "test")]
        runs += [(sizes[1], evaluated, None, "test")]
        runs += [(sizes[1], predicted(model), None, "predict")]
    found: dict[object, _Inference] = {}
    for number, (size, inferred, listening, kind) in enumerate(runs):
        most = None if number or training is None else num_validated
        planned = plan_of_calls(model, source, size, most, inferred, listening, kind)
        one = _Inference(inferred, source, *planned)
        found.setdefault((inferred, planned.plan), one)
    return list(found.values())


def _built(
    model: Model,
    inferences: Sequence[_Inference],
    trained: tuple[Training, TrainingBatches] | None,
    display: ProgressDisplay,
) -> Iterator[BuiltProgram]:
    """Have programs built; that of the training is attached if IPUs are short."""
    for inferred, source, plan, options, choice in inferences:
        watch = Watch(display, options)
        remark = remark_on_passes(choice)
        batches = inference_batches(model, source, plan, options, None)
        try:
            model._executors.prepare_inference(
                batches, plan, options, watch, inferred, remark
            )
        except NoForwardError:
            if trained is None or inferred.step is not None:
                raise
            continue  # only its steps are used
        yield replace(watch.built("inference", plan), remark=remark)
    if trained is not None:
        training, calls = trained
        watch = Watch(display, training.options)
        training.prepare(calls, watch)
        built = watch.built("training", training.plan)
        yield replace(built, remark=training.remark)


class Watch(ProgressDisplay):
    """Looks at the cache of executables before a compilation and after it.

    Args:
        display: Display of the user's, which is told too.
        options: Options of the program.

    Attributes:
        has_compiled: Whether there was a compilation.
        new_files: Names of the files that the cache has got.
    """

    def __init__(self, display: ProgressDisplay, options: poptorch.Options) -> None:
        super().__init__()
        self._display = display
        given = options.toDict()
        self._folder = (
            given.get("cachePath") if given.get("enableEngineCaching") else ""
        )
        self._taken, self._cache = 0.0, "none"
        self._before: set[str] = set()
        self.has_compiled = False
        self.new_files: set[str] = set()

    def compiling(self, what: str) -> None:
        """Remember the files."""
        self._before = _executables(self._folder)
        self._display.compiling(what)

    def noted(self, line: str) -> None:
        """Pass it on."""
        self._display.noted(line)

    def compiled(self, what: str, seconds: float, remark: str = "") -> None:
        """Compare the files."""
        self._display.compiled(what, seconds, remark)
        self.has_compiled = True
        self._taken += seconds
        self.new_files = _executables(self._folder) - self._before
        if self.new_files:
            self._cache = "miss"
        elif self._before:
            self._cache = "hit"

    def built(self, name: str, plan: BatchPlan) -> BuiltProgram:
        """Say what was seen."""
        return BuiltProgram(name, plan, self._taken, self._cache)


def _executables(folder: Any) -> set[str]:
    """Names of the executables in PopART's cache: it writes one file for each program.

    Their names are hashes of the programs (PopART, `Executablex::getCachePath`), so a
    program whose executable was found adds no file.
    """
    try:
        names = os.listdir(folder) if folder else []
    except OSError:  # PopART makes the folder
        names = []
    return {name for name in names if name.endswith(".popef")}
