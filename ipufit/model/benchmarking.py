# SPDX-License-Identifier: Apache-2.0
"""`benchmark`: samples per second and latency, of a copy of the model."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from ipufit.batching import BatchPlan, check_count, check_positive
from ipufit.callbacks import make_progress
from ipufit.callbacks.messages import say
from ipufit.data import (
    Call,
    HostRandomState,
    InferenceBatches,
    Source,
    TrainingBatches,
    as_source,
    column_names,
    generated_like,
    generators_of,
    is_stream,
)
from ipufit.errors import DataError, UnknownNameError
from ipufit.planning.choices import Choice
from ipufit.state import RunState

from .benchmark_result import (
    DATA_KINDS,
    MODES,
    REAL,
    SYNTHETIC,
    TRAINING,
    BenchmarkResult,
    Spread,
)
from .copying import independent_copy
from .evaluating import inference_batches, inference_plan, rows_to_evaluate
from .parts import Model, predicted, settings_of
from .run_frame import under_way
from .splitting import settle
from .training import Choose, training_of
from .updates_per_call import update_plan, updates_per_call


def benchmark(
    self: Model,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    mode: str = TRAINING,
    data: str = REAL,
    calls: int = 10,
    repeats: int = 2,
    warmup: int = 2,
    verbose: int = 1,
) -> BenchmarkResult:
    """Measure samples per second and latency, and print them.

    Compilation and the first calls are left out. A copy of the model is measured, and
    this one stays as it is: weights, the optimizer's state, random states and the
    number of updates. It gives its IPUs back, as the copy needs them, and takes them
    again for its next call. The learning rate stays as it is now.

    Args:
        x: Data, as for `fit`.
        y: As for `fit`.
        batch_size: As for `fit`, or in inference as for `predict`.
        mode: `"training"`, or `"inference"` for the calls of `predict`.
        data: `"real"` takes the samples of `x` from their loader. `"generated"` takes
            random inputs of the same shapes and types from the memory of the host,
            where nothing has to be loaded or decoded; targets are the first sample's.
            `"synthetic"` has the devices make their inputs and send nothing back, so
            that there is no input or output at all
            (`poptorch.Options.enableSyntheticData`).
        calls: Calls of a repeat.
        repeats: Number of times that the calls are measured; a line is printed for
            each. Benchmark files with `skip: 1` leave out the slowest line, so they
            need two or more.
        warmup: Calls that come first and don't count.
        verbose: 0 prints nothing.

    Returns:
        The figures, of all processes together.

    Raises:
        NotCompiledError: `compile` wasn't called, and the mode is training.
        UnknownNameError: `mode` or `data` is another word.
        ConfigError: A number of calls is not a whole number, or the batch size is not
            made of its factors.
        DataError: Data that can't be used, or a generator that ends too early.
        UnsupportedError: The model can't be copied.

    Example:
        >>> import torch
        >>> import ipufit
        >>> model = ipufit.IPUModel(torch.nn.Linear(4, 3))
        >>> model.compile("sgd", "cross_entropy")
        >>> x, y = torch.randn(64, 4), torch.randint(3, (64,))
        >>> result = model.benchmark(x, y, batch_size=16, calls=3, verbose=0)
        >>> result.samples_per_call, result.samples_per_second > 0
        (64, True)
        >>> model.num_updates
        0
    """
    _check(mode, data, calls=calls, repeats=repeats)
    check_count("warmup", warmup)
    if mode == TRAINING:
        settings_of(self)
    before = HostRandomState(generators_of(x) if is_stream(x) else ())
    try:
        source = _source_of(self, x, y, is_training=mode == TRAINING)
        copied = independent_copy(self, "benchmark()")
        prepare = _training if mode == TRAINING else _inference
        measured = prepare(copied, source, batch_size, data)
        result = _measure(copied, measured, mode, data, (warmup, calls, repeats))
    finally:
        before.put_back()
    if verbose and self.processes.is_first:
        say(str(result))
    return result


class _Subject(NamedTuple):
    """A program that is measured, and its calls.

    Attributes:
        batches: Batches of the calls.
        build: Has the program compiled, and on the device.
        run: Makes one call.
        latency: Latencies of the last call in seconds: least, largest and mean.
    """

    plan: BatchPlan
    batches: TrainingBatches | InferenceBatches
    build: Callable[[], Any]
    run: Callable[[Call], Any]
    latency: Callable[[], tuple[float, float, float]]


def _training(
    model: Model, source: Source, batch_size: int | None, data: str
) -> _Subject:
    """Have a model train."""
    choose: Choose = partial(updates_per_call, model, source, None, None, {})
    if data != REAL:  # as many samples as a call of the real ones takes
        settle(model, source)
        if batch_size is None and model.config.micro_batch_size is None:
            batch_size = source.batch_size
        plan = update_plan(model, source, batch_size)
        chosen = choose(plan)
        num_updates = plan.device_iterations if chosen is None else chosen.value
        source = generated_like(source, plan.batch_size * num_updates)
        choose = partial(_as_chosen, chosen)

    training, batches = training_of(
        model,
        source,
        batch_size,
        shuffle=True,
        drop_last=True,
        class_weight=None,
        choose=choose,
    )
    training.figures.reset()
    if data == SYNTHETIC:
        training.options.enableSyntheticData(True)

    def run(call: Call) -> None:
        if data == SYNTHETIC:  # nothing is written to what comes back
            model._executors.train(call.batch)
        else:
            training.run(call, is_scheduled=False)

    return _Subject(
        training.plan,
        batches,
        lambda: training.prepare(batches, make_progress(0)),
        run,
        lambda: model._executors.latency(is_training=True),
    )


def _as_chosen(choice: Choice | None, plan: BatchPlan) -> Choice | None:
    """The updates that were chosen, whatever the plan."""
    return choice


def _inference(
    model: Model, source: Source, batch_size: int | None, data: str
) -> _Subject:
    """Have a model predict."""
    settle(model, source)
    size, _ = rows_to_evaluate(model.config, source, batch_size, None)
    plan, options = inference_plan(model.module, model.config, size)
    if data == SYNTHETIC:
        options.enableSyntheticData(True)
    if data != REAL:
        source = generated_like(source, plan.samples_per_call * plan.processes)
    batches = inference_batches(model, source, plan, options, None)

    def build() -> None:
        model._executors.prepare_inference(
            batches,
            plan,
            options,
            make_progress(0),
            predicted(model),
        )

    return _Subject(
        plan,
        batches,
        build,
        lambda call: model._executors.infer(call.batch),
        lambda: model._executors.latency(is_training=False),
    )


@dataclass
class _Times:
    """Times that one process has measured, in seconds.

    Attributes:
        build: Until the program was on the device.
        loader: Samples and seconds of the loader alone; None if there is none.
        repeats: Samples and seconds of each repeat.
        calls: Time of each call on the host, once its batch was there.
        latencies: Least, largest and mean latency of each call.
    """

    build: float
    loader: tuple[int, float] | None = None
    repeats: list[tuple[int, float]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    latencies: list[tuple[float, float, float]] = field(default_factory=list)

    def add(self, subject: _Subject, given: Iterator[Call], calls: int) -> None:
        """Measure calls: the clock stands while PopTorch is asked for latencies."""
        samples, seconds = 0, 0.0
        for _ in range(calls):
            began = perf_counter()
            call = next(given)
            ready = perf_counter()
            subject.run(call)
            done = perf_counter()
            samples += call.num_real
            seconds += done - began
            self.calls.append(done - ready)
            self.latencies.append(subject.latency())
        self.repeats.append((samples, seconds))


def _measure(
    model: Model,
    subject: _Subject,
    mode: str,
    data: str,
    counts: tuple[int, int, int],
) -> BenchmarkResult:
    """Build the program and measure it; the IPUs are free afterwards."""
    warmup, calls, repeats = counts
    with contextlib.ExitStack() as stack:
        stack.enter_context(under_way(model, RunState(), None, 0))
        stack.callback(subject.batches.close)
        began = perf_counter()
        subject.build()
        times = _Times(perf_counter() - began)
        given = _endless(subject)
        if data == SYNTHETIC:
            rows = subject.plan.samples_per_call
            batch = [leaf.contiguous() for leaf in subject.batches.example()]
            given = itertools.repeat(Call(batch, rows, rows))
        elif data == REAL and not subject.batches.source.is_one_shot:
            times.loader = _loader_alone(given, warmup, calls)
        for call in itertools.islice(given, warmup):
            subject.run(call)
        for _ in range(repeats):
            times.add(subject, given, calls)
    model._executors.detach()
    every = model.processes.gathered(times)
    return _result(every, mode, data, subject.plan, calls)


def _endless(subject: _Subject) -> Iterator[Call]:
    """The calls of one pass after the other.

    Raises:
        DataError: The data is a generator, and has ended.
    """
    count = 0
    while True:
        before = count
        for call in subject.batches:
            if call.num_real_of_all:
                count += 1
                yield call
        if count == before:
            raise DataError(
                f"`x` has ended after {count} calls of {subject.plan.describe()}, "
                "and can't begin anew. Ask for fewer calls, repeats or warmup, or pass "
                "a dataset or a loader."
            )


def _loader_alone(given: Iterator[Call], warmup: int, calls: int) -> tuple[int, float]:
    """The samples of calls that are loaded and not run, and the seconds they took."""
    for _ in itertools.islice(given, warmup):
        pass
    began = perf_counter()
    samples = sum(call.num_real for call in itertools.islice(given, calls))
    return samples, perf_counter() - began


def _result(
    every: Sequence[_Times], mode: str, data: str, plan: BatchPlan, calls: int
) -> BenchmarkResult:
    """The figures of all processes: their samples together, in the slowest's time."""
    repeats = [
        (sum(samples), max(seconds))
        for samples, seconds in (zip(*of_all) for of_all in zip(*_repeats(every)))
    ]
    samples, seconds = map(sum, zip(*repeats))
    call_ms = Spread.of([1e3 * one for times in every for one in times.calls])
    latencies = [
        Spread(1e3 * low, 1e3 * mean, 1e3 * high)
        for times in every
        for low, high, mean in times.latencies
    ]
    loaders = [times.loader for times in every if times.loader is not None]
    return BenchmarkResult(
        mode=mode,
        data=data,
        samples_per_second=samples / seconds,
        repeats=tuple(count / time for count, time in repeats),
        call_ms=call_ms,
        latency_ms=None if data == SYNTHETIC else Spread.joined(latencies),
        loader_samples_per_second=(
            sum(count for count, _ in loaders) / max(time for _, time in loaders)
            if loaders
            else None
        ),
        build_seconds=max(times.build for times in every),
        calls=calls,
        samples_per_call=plan.samples_per_call * plan.processes,
    )


def _repeats(every: Sequence[_Times]) -> Iterator[list[tuple[int, float]]]:
    return (times.repeats for times in every)


def _check(mode: str, data: str, **counts: object) -> None:
    for name, value, known in (("mode", mode, MODES), ("data", data, DATA_KINDS)):
        if value not in known:
            raise UnknownNameError(f"{name} of benchmark()", str(value), known)
    for name, count in counts.items():
        check_positive(name, count)


def _source_of(model: Model, x: Any, y: Any, *, is_training: bool) -> Source:
    """The data; without targets in inference."""
    columns = column_names(y)
    settings: dict[str, Any] = {
        "num_workers": model.config.num_workers,
        "processes": model.processes,
    }
    if is_training:
        return as_source(x, y, **settings)
    left_out = (*model._data.target_columns, *(columns or ()))
    return as_source(x, inputs_only=True, left_out=left_out, **settings)
