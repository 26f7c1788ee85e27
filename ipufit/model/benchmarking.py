# SPDX-License-Identifier: Apache-2.0
"""Measures of `IPUModel.benchmark`, and its result."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Iterator, NamedTuple, Sequence

from ipufit._arguments import check_whole, shown
from ipufit.batching import BatchPlan
from ipufit.callbacks import ProgressDisplay
from ipufit.callbacks.measuring import throughput_line
from ipufit.data.calls import Call, InferenceBatches, TrainingBatches
from ipufit.engine.loop import Inference, Training
from ipufit.errors import DataError, UnknownNameError
from ipufit.types import ShownAsText

REAL, GENERATED, SYNTHETIC = DATA_KINDS = ("real", "generated", "synthetic")
TRAINING, INFERENCE = MODES = ("training", "inference")

_DATA_IN_WORDS = {
    REAL: "real data",
    GENERATED: "data generated on the host",
    SYNTHETIC: "synthetic data, made on the device",
}


class Spread(NamedTuple):
    """The minimum, mean and maximum of several times, in milliseconds.

    Example:
        >>> Spread.of([1.0, 3.0, 2.0])
        Spread(min=1.0, mean=2.0, max=3.0)
    """

    min: float
    mean: float
    max: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Return the spread of times."""
        return cls(min(times), sum(times) / len(times), max(times))


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
            device; None if there is no loader, or nothing to repeat it with.
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

    @property
    def lines(self) -> list[str]:
        """Return the lines that `benchmark` prints."""
        calls = "call" if self.calls == 1 else "calls"
        lines = [
            f"{self.mode}, {_DATA_IN_WORDS[self.data]}: {self.calls} {calls} of "
            f"{self.samples_per_call} samples, built in {self.build_seconds:.1f} s",
            *map(throughput_line, self.repeats),
        ]
        if self.loader_samples_per_second is not None:
            rate = self.loader_samples_per_second
            lines.append(f"loader alone: {rate:.1f} samples per second")
        low, mean, high = self.call_ms
        lines.append(f"call: {mean:.3f} ms (min: {low:.3f}, max: {high:.3f})")
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
        return lines

    def __str__(self) -> str:
        """Return the lines as one text."""
        return "\n".join(self.lines)


class _Times(NamedTuple):
    """Times measured by one process, in seconds.

    Attributes:
        build: Until the program was on the device.
        loader: Samples and seconds of the loader alone; None if there is none.
        repeats: Samples and seconds of each repeat.
        calls: Time of each call on the host, once its batch was there.
        latencies: Minimum, maximum and mean latency of each call.
    """

    build: float
    loader: tuple[int, float] | None
    repeats: list[tuple[int, float]]
    calls: list[float]
    latencies: list[tuple[float, float, float]]


def check_arguments(
    mode: str, data: str, calls: int, repeats: int, warmup: int
) -> None:
    """Refuse other words and numbers than `benchmark` knows.

    Raises:
        UnknownNameError: `mode` or `data` is another word.
        ConfigError: A number of calls is not a whole number.
    """
    for name, value, known in (("mode", mode, MODES), ("data", data, DATA_KINDS)):
        if not isinstance(value, str) or value not in known:
            raise UnknownNameError(f"{name} of benchmark()", shown(value), known)
    check_whole("calls", calls, least=1)
    check_whole("repeats", repeats, least=1)
    check_whole("warmup", warmup)


def measured(
    program: Training | Inference,
    data: str,
    warmup: int,
    calls: int,
    repeats: int,
    display: ProgressDisplay,
) -> _Times:
    """Build the program and measure it; its learning rates don't change."""

    def run(call: Call) -> Any:
        if not isinstance(program, Training):
            return program.infer(call.batch)
        if data == SYNTHETIC:  # nothing is written to what comes back
            return program.train(call.batch)
        return program.run(call, is_scheduled=False)

    if isinstance(program, Training):
        program.metrics.reset()
    if data == SYNTHETIC:
        program.options.enableSyntheticData(True)
    began = perf_counter()
    program.prepare(display)
    build, loader = perf_counter() - began, None
    given = _endless(program.batches, program.plan)
    if data == SYNTHETIC:
        rows = program.plan.samples_per_call
        batch = [leaf.contiguous() for leaf in program.batches.example()]
        given = itertools.repeat(Call(batch, rows, (rows,)))
    elif data == REAL and not program.batches.source.is_one_shot:
        loader = _loader_alone(given, warmup, calls)
    for call in itertools.islice(given, warmup):
        run(call)
    times = _Times(build, loader, [], [], [])
    for _ in range(repeats):
        samples, seconds = 0, 0.0
        for _ in range(calls):
            began = perf_counter()
            call = next(given)
            ready = perf_counter()
            run(call)
            done = perf_counter()
            samples += call.num_real
            seconds += done - began
            times.calls.append(done - ready)
            # PopTorch computes it outside of the time that is measured.
            times.latencies.append(program.program.executor.getLatency())
        times.repeats.append((samples, seconds))
    return times


def _endless(
    batches: TrainingBatches | InferenceBatches, plan: BatchPlan
) -> Iterator[Call]:
    """Yield the calls of one pass after the other.

    Raises:
        DataError: The data is a generator, and has ended.
    """
    count = 0
    while True:
        before = count
        for call in batches:
            count += 1
            yield call
        if count == before:
            raise DataError(
                f"`x` has ended after {count} calls of {plan.describe()}, "
                "and can't begin anew. Ask for fewer calls, repeats or warmup, or pass "
                "a dataset or a loader."
            )


def _loader_alone(given: Iterator[Call], warmup: int, calls: int) -> tuple[int, float]:
    """Load the samples of calls without running them; return samples and seconds."""
    for _ in itertools.islice(given, warmup):
        pass
    began = perf_counter()
    samples = sum(call.num_real for call in itertools.islice(given, calls))
    return samples, perf_counter() - began


def result_of(
    every: Sequence[_Times], mode: str, data: str, plan: BatchPlan, calls: int
) -> BenchmarkResult:
    """Return the results of all processes: all samples, in the slowest one's time."""
    repeats_of_each = (times.repeats for times in every)
    repeats = [
        (sum(samples), max(seconds))
        for samples, seconds in (zip(*of_all) for of_all in zip(*repeats_of_each))
    ]
    samples, seconds = map(sum, zip(*repeats))
    call_ms = Spread.of([1e3 * one for times in every for one in times.calls])
    lows, highs, means = zip(*(one for times in every for one in times.latencies))
    latency = Spread(min(lows), sum(means) / len(means), max(highs))
    loaders = [times.loader for times in every if times.loader is not None]
    return BenchmarkResult(
        mode=mode,
        data=data,
        samples_per_second=samples / seconds,
        repeats=tuple(count / time for count, time in repeats),
        call_ms=call_ms,
        latency_ms=None if data == SYNTHETIC else Spread(*(1e3 * t for t in latency)),
        loader_samples_per_second=(
            sum(count for count, _ in loaders) / max(time for _, time in loaders)
            if loaders
            else None
        ),
        build_seconds=max(times.build for times in every),
        calls=calls,
        samples_per_call=plan.samples_per_call * plan.processes,
    )
