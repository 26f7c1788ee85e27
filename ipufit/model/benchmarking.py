# SPDX-License-Identifier: Apache-2.0
"""Measures of `IPUModel.benchmark`, and its result."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Iterator, List, NamedTuple, Tuple

import numpy as np

from ipufit._arguments import check_integer, shown
from ipufit.callbacks.measuring import throughput_line
from ipufit.data.arrays import column_names
from ipufit.data.calls import Call, InferenceBatches, TrainingBatches
from ipufit.data.datasets import Source
from ipufit.data.loaders import generators_of
from ipufit.data.random_state import HostRandomState
from ipufit.data.sources import as_source, generated_like, is_stream
from ipufit.engine.loop import Inference, Training
from ipufit.errors import DataError, UnknownNameError
from ipufit.state import RunState
from ipufit.types import ShownAsText

from .arguments import FitArguments, InferenceArguments
from .calls import CallPlanner
from .copying import independent_copy

_MODES = ("training", "inference")
_DATA = {
    "real": "real data",
    "generated": "data generated on the host",
    "synthetic": "synthetic data, made on the device",
}


class Spread(NamedTuple):
    """The minimum, mean and maximum of several times, in milliseconds."""

    min: float
    mean: float
    max: float


@dataclass(frozen=True, repr=False)
class BenchmarkResult(ShownAsText):
    """The results of `IPUModel.benchmark`, of all processes together.

    Attributes:
        mode: `"training"` or `"inference"`.
        data: `"real"`, `"generated"` or `"synthetic"`.
        samples_per_second: Samples of all repeats divided by their seconds, from asking
            for the data of a call to having its results. Each process has its own
            samples, and the slowest one's time is taken.
        repeats: Samples per second of each repeat.
        call_ms: Times of the calls on the host: results minus batch ready.
        latency_ms: Times of micro-batches, from the host to the device and back, by
            PopTorch's `getLatency`; None for synthetic data, which isn't transferred.
        loader_samples_per_second: Samples per second of the loader alone, without a
            device; None if there is no loader, or if its data can't be read again.
        build_seconds: Seconds until the program was compiled and on the device.
        calls: Calls of each repeat.
        samples_per_call: Samples that a call of all processes takes.
    """

    mode: str
    data: str
    samples_per_second: float
    repeats: tuple[float, ...]
    call_ms: Spread
    latency_ms: Spread | None
    loader_samples_per_second: float | None
    build_seconds: float
    calls: int
    samples_per_call: int

    def __str__(self) -> str:
        """Return the lines that `benchmark` prints."""
        calls = "call" if self.calls == 1 else "calls"
        low, mean, high = self.call_ms
        lines = [
            f"{self.mode}, {_DATA[self.data]}: {self.calls} {calls} of "
            f"{self.samples_per_call} samples, built in {self.build_seconds:.1f} s",
            *map(throughput_line, self.repeats),
            f"call: {mean:.3f} ms (min: {low:.3f}, max: {high:.3f})",
        ]
        if self.loader_samples_per_second is not None:
            rate = self.loader_samples_per_second
            lines.insert(-1, f"loader alone: {rate:.1f} samples per second")
        if self.latency_ms is None:
            lines.append(
                "NOTE: with synthetic data only times count. Losses and outputs mean "
                "nothing, and there is no latency."
            )
        else:
            low, mean, high = self.latency_ms
            lines.append(
                f"latency avg: {mean:.3f} ms, latency: {mean:.3f} ms (mean) "
                f"(min: {low:.3f}, max: {high:.3f})"
            )
        return "\n".join(lines)


def benchmark(
    model: Any,
    x: Any,
    y: Any,
    batch_size: int | None,
    mode: str,
    data: str,
    calls: int,
    repeats: int,
    warmup: int,
    verbose: int,
) -> BenchmarkResult:
    """Measure a copy of a model; takes the arguments of `IPUModel.benchmark`."""
    for name, value, known in (("mode", mode, _MODES), ("data", data, tuple(_DATA))):
        if not isinstance(value, str) or value not in known:
            raise UnknownNameError(f"{name} of benchmark()", shown(value), known)
    check_integer("calls", calls, least=1)
    check_integer("repeats", repeats, least=1)
    check_integer("warmup", warmup)
    is_training, loading = mode == _MODES[0], model._planner.loading
    if is_training:
        model._planner.require_compiled()
    with HostRandomState(generators_of(x) if is_stream(x) else ()):
        if is_training:
            source = as_source(x, y, **loading)
        else:
            source = model._inputs(x, column_names(y) or ())
        copied = independent_copy(model, "benchmark()")
        planner: CallPlanner = copied._planner

        def planned(source: Source, fitted: FitArguments) -> Training | Inference:
            if is_training:
                return planner.training(source, fitted)
            sizes = InferenceArguments(batch_size, is_open=False)
            return planner.inference(source, planner.predicted, "predict", sizes)

        program = planned(source, FitArguments(batch_size=batch_size))
        plan = program.plan
        if data != "real":  # as many samples as a call of the real ones takes
            source = generated_like(source, plan.samples_per_call * plan.processes)
            size, updates = plan.batch_size, plan.device_iterations
            program = planned(
                source, FitArguments(batch_size=size, updates_per_call=updates)
            )
        run = copied._runs.running(copied, RunState(), None, verbose)
        with run as (_, display), contextlib.closing(program.batches):
            if isinstance(program, Training):
                program.metrics.reset()
            if data == "synthetic":
                program.options.enableSyntheticData(True)
            began = perf_counter()
            program.prepare(display)
            times = (
                perf_counter() - began,
                *_times(program, data, calls, repeats, warmup),
            )
            of_processes = model.processes.gathered(times)
        copied.detach()
    builds, loaders, runs = zip(*of_processes)
    table = np.array(runs).reshape(len(runs), repeats, calls, 6)
    samples, seconds, call_ms, low, high, mean = np.moveaxis(table, -1, 0)
    slowest = seconds.sum(axis=2).max(axis=0)  # of the processes, in each repeat
    loader = None
    if loaders[0] is not None:
        loaded, loading_seconds, *_ = np.moveaxis(np.array(loaders), -1, 0)
        loader = float(loaded.sum() / loading_seconds.sum(axis=1).max())
    latency = low.min(), mean.mean(), high.max()
    return BenchmarkResult(
        mode,
        data,
        samples_per_second=float(samples.sum() / slowest.sum()),
        repeats=tuple((samples.sum(axis=(0, 2)) / slowest).tolist()),
        call_ms=Spread(*map(float, (call_ms.min(), call_ms.mean(), call_ms.max()))),
        latency_ms=None if data == "synthetic" else Spread(*map(float, latency)),
        loader_samples_per_second=loader,
        build_seconds=max(builds),
        calls=calls,
        samples_per_call=plan.samples_per_call * plan.processes,
    )


_Times = List[Tuple[float, ...]]


def _times(
    program: Training | Inference, data: str, calls: int, repeats: int, warmup: int
) -> tuple[_Times | None, _Times]:
    """Return the times of loading alone, None if nothing is loaded, and of calls."""
    batches, loading = program.batches, None
    stream, count = _endless(batches), warmup + calls * repeats
    if data == "synthetic":
        batch = [leaf.contiguous() for leaf in batches.example()]
        rows = program.plan.samples_per_call
        stream = itertools.repeat(Call(batch, rows, (rows,)))
    elif data == "real" and not batches.source.is_one_shot:
        loading = _timed(stream, warmup + calls)[warmup:]
    return loading, _timed(stream, count, program, data == "synthetic")[warmup:]


def _endless(batches: TrainingBatches | InferenceBatches) -> Iterator[Call]:
    """Yield the calls of pass after pass, until a pass has no calls."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for call in batches:
            is_empty = False
            yield call


def _timed(
    stream: Iterator[Call],
    count: int,
    program: Training | Inference | None = None,
    is_synthetic: bool = False,
) -> _Times:
    """Time calls of a program, or by default their loading alone.

    Returns:
        For each call: its samples; the seconds from the request of its batch to its
        end; the milliseconds from the arrival of its batch to its end; and the least,
        greatest and mean latency in milliseconds.
    """
    times, latency = [], (0.0, 0.0, 0.0)
    for index in range(count):
        began = perf_counter()
        call = next(stream, None)
        ready = perf_counter()
        if call is None:
            raise DataError(
                f"`x` has ended after {index} calls, and can't begin anew. Ask for "
                "fewer calls, repeats or warmup, or pass a dataset or a loader."
            )
        if isinstance(program, Inference):
            program.infer(call.batch)
        elif program is not None and is_synthetic:  # nothing is written to the results
            program.train(call.batch)
        elif program is not None:
            program.run(call, is_scheduled=False)
        done = perf_counter()
        if program is not None:  # PopTorch computes it outside of the time measured
            latency = program.program.executor.getLatency()
        milliseconds = (1e3 * seconds for seconds in (done - ready, *latency))
        times.append((call.num_real, done - began, *milliseconds))
    return times
