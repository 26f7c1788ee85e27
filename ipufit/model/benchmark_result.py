# SPDX-License-Identifier: Apache-2.0
"""`BenchmarkResult`: the times that a benchmark has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Sequence

from ipufit.callbacks.throughput import throughput_line

REAL, GENERATED, SYNTHETIC = DATA_KINDS = ("real", "generated", "synthetic")
TRAINING, INFERENCE = MODES = ("training", "inference")

_DATA_IN_WORDS = {
    REAL: "real data",
    GENERATED: "data generated on the host",
    SYNTHETIC: "synthetic data, made on the device",
}


class Spread(NamedTuple):
    """The least, mean and largest of several times, in milliseconds.

    Example:
        >>> Spread.of([1.0, 3.0, 2.0])
        Spread(min=1.0, mean=2.0, max=3.0)
    """

    min: float
    mean: float
    max: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """The spread of times."""
        return cls(min(times), sum(times) / len(times), max(times))

    @classmethod
    def joined(cls, spreads: Sequence[Spread]) -> Spread:
        """The spread of as many times each, of which the spreads are known."""
        lows, means, highs = zip(*spreads)
        return cls(min(lows), sum(means) / len(means), max(highs))


@dataclass(frozen=True)
class BenchmarkResult:
    """The figures of `IPUModel.benchmark`, of all processes together.

    Attributes:
        mode: `"training"` or `"inference"`.
        data: `"real"`, `"generated"` or `"synthetic"`.
        samples_per_second: Samples of all repeats divided by their seconds, from asking
            for the data of a call to having its results. Each process takes its own
            samples, and the slowest one's time counts.
        repeats: Samples per second of each repeat.
        call_ms: Times of the calls on the host: results minus batch ready.
        latency_ms: Times of micro-batches, from the host to the device and back, as
            PopTorch's `getLatency` gives them; None for synthetic data, which goes
            nowhere.
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
        """The lines that `benchmark` prints."""
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
        """The lines, one below the other."""
        return "\n".join(self.lines)
