# SPDX-License-Identifier: Apache-2.0
"""The times at which the parts of a call happened, by the clock of this machine.

One time stamp is taken for each micro-batch; what users ask for is derived from these.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from ipufit.emulator._layout.layout import Layout
from ipufit.emulator.enums import OutputMode

PerfCounters = Dict[str, List[List[float]]]
Latency = Tuple[float, float, float]

COUNTERS = ("input", "input_complete", "output", "output_complete")
CLOCK_HZ = 1.33e9
"""The clock rate of a Mk2 IPU (Graphcore, IPU-M2000 data sheet)."""


class Transfers(NamedTuple):
    """The tensors that calls of one program send to the device and back.

    Attributes:
        period: N of `OutputMode.EveryN`.
        num_inputs: The number of tensors that the program takes besides the weights.
        num_outputs: The number of tensors that it returns.
        is_synthetic: Whether nothing is sent.
    """

    layout: Layout
    mode: OutputMode
    period: int
    num_inputs: int
    num_outputs: int
    is_synthetic: bool


class CallTimes(NamedTuple):
    """The times of one call, in seconds from some moment in the past.

    Attributes:
        started: When the caller handed over the inputs.
        taken: When each micro-batch was taken by its replica, in order; the results of
            the one before had been collected then.
        ran: When the results of the last one had been collected.
        returned: When the outputs were complete.
        transfers: The tensors that were sent.

    Example:
        >>> layout = Layout(2, 1, replicas=1, input_groups=1)
        >>> transfers = Transfers(
        ...     layout, OutputMode.All, 1, num_inputs=1, num_outputs=1,
        ...     is_synthetic=False,
        ... )
        >>> times = CallTimes(0.0, [1.0, 2.0], 3.0, 4.0, transfers)
        >>> times.counters()["output_complete"]
        [[2.0, 4.0]]
        >>> times.latency("input", "output_complete")
        (2.0, 2.0, 2.0)
    """

    started: float
    taken: list[float]
    ran: float
    returned: float
    transfers: Transfers

    def counters(self) -> PerfCounters:
        """List the times of the micro-batches of each input, and of each output.

        The first micro-batch is handed over with the call. The others are taken in
        the moment they are handed over, as host and device share their memory; their
        results are complete when they are collected, the last ones when the outputs
        are.
        """
        layout, mode, period, num_inputs, num_outputs, is_synthetic = self.transfers
        times: dict[str, list[float]] = {name: [] for name in COUNTERS}
        if not is_synthetic:
            replicas = range(layout.replicas)
            sent = [
                step * layout.replicas + replica
                for step in layout.returned_steps(mode, period)
                for replica in replicas
            ]
            collected = [*self.taken[1:], self.ran]
            complete = [*self.taken[1:], self.returned]
            times["input"] = [self.started, *self.taken[1:]]
            times["input_complete"] = self.taken
            times["output"] = [collected[index] for index in sent]
            times["output_complete"] = [complete[index] for index in sent]
        return {
            name: [
                list(times[name])
                for _ in range(num_inputs if name.startswith("input") else num_outputs)
            ]
            for name in COUNTERS
        }

    def latency(self, start: str, end: str) -> Latency:
        """Give the least, largest and mean time from one counter to another.

        From the first tensor of `start` to the last one of `end`. If fewer transfers
        end than start, each belongs to a block of starts and the earliest counts
        (PopTorch, `_poplar_executor.py`).
        """
        counters = self.counters()
        starts = counters[start][0] if counters[start] else []
        ends = counters[end][-1] if counters[end] else []
        if not starts or not ends:
            return (0.0, 0.0, 0.0)
        size = len(starts) // len(ends)
        first = [min(starts[i * size : (i + 1) * size]) for i in range(len(ends))]
        seconds = [late - early for early, late in zip(first, ends)]
        return (min(seconds), max(seconds), sum(seconds) / len(seconds))

    def cycles(self) -> int:
        """Count the cycles that an IPU's clock would have made while the device ran."""
        return round((self.ran - self.taken[0]) * CLOCK_HZ)
