# SPDX-License-Identifier: Apache-2.0
"""Times that the last compilation and the last call of an executor took.

All times are this machine's, not an IPU's: they show where a script spends its time,
and that it reads them correctly.
"""

from __future__ import annotations

import datetime

from ipufit.emulator._device.timings import (
    COUNTERS,
    CallTimes,
    Latency,
    PerfCounters,
)
from ipufit.emulator._executor.model_state import ModelState
from ipufit.emulator.errors import createPoptorchError


class Measurements:
    """Times of the last compilation and the last call."""

    def __init__(self, state: ModelState) -> None:
        self._state = state

    @property
    def _times(self) -> CallTimes | None:
        """Times of the last call; None if the executable is gone or hasn't run."""
        last_call = self._state.last_call
        if last_call is None or not self._state.isCompiled():
            return None
        return last_call.times

    def compilationTime(self) -> datetime.timedelta:
        """Time that the last compilation took, tracing included.

        Raises:
            Error: Not compiled, or `showCompilationProgressBar(False)`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.Linear(2, 1))
            >>> inference.compile(torch.ones(1, 2))
            >>> inference.compilationTime().total_seconds() > 0
            True
        """
        if not self._state.isCompiled():
            raise createPoptorchError(
                "Please compile the model before obtaining compilation time."
            )
        if not self._state.options._show_compilation_progress_bar:
            raise createPoptorchError(
                "Please set showCompilationProgressBar option to obtain compilation "
                "time. The progress bar measures it, and it is disabled."
            )
        return self._state.compilation_time

    def cycleCount(self) -> int:
        """The cycles of the last call, as `Options.logCycleCount(True)` counts them.

        Returns:
            Seconds that the emulated device ran on this machine, times the clock rate
            of a Mk2 IPU, 1.33 GHz (Graphcore, IPU-M2000 data sheet). The number says
            nothing about the speed of an IPU.

        Raises:
            Error: Cycles aren't counted, or the model hasn't run.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().logCycleCount(True)
            >>> inference = inferenceModel(torch.nn.Linear(2, 1), options)
            >>> _ = inference(torch.ones(1, 2))
            >>> inference.cycleCount() > 0
            True
        """
        if not self._state.options._Popart.options[
            "instrumentWithHardwareCycleCounter"
        ]:
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to "
                "True to enable."
            )
        times = self._times
        if times is None:
            raise createPoptorchError(
                "Please run the model at least once before obtaining cycle count."
            )
        return times.cycles()

    def getPerfCounters(self) -> PerfCounters:
        """The time stamps of the last call, in seconds from some moment in the past.

        Returns:
            A dictionary of four counters. `input` and `input_complete` have a list for
            each tensor that goes to the device, with a time for each micro-batch of
            each replica: when it was handed over, and when the replica had it.
            `output` and `output_complete` have a list for each tensor that comes back:
            when it was computed, and when the host had it. They have fewer times if
            the output mode drops results. With synthetic data all lists are empty.
            Before the first call each counter has one empty list.

        Example:
            >>> import torch
            >>> from ipufit.emulator import Options, inferenceModel
            >>> options = Options().deviceIterations(4)
            >>> inference = inferenceModel(torch.nn.ReLU(), options)
            >>> _ = inference(torch.ones(4))
            >>> {name: len(of[0]) for name, of in inference.getPerfCounters().items()}
            {'input': 4, 'input_complete': 4, 'output': 4, 'output_complete': 4}
        """
        times = self._times
        return {name: [[]] for name in COUNTERS} if times is None else times.counters()

    def getHostIpuLatency(self) -> Latency:
        """Time that inputs took to the device in the last call.

        Returns:
            Minimum, maximum and average in seconds; zeros if nothing was sent.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> inference.getHostIpuLatency()
            (0.0, 0.0, 0.0)
            >>> _ = inference(torch.ones(1))
            >>> inference.getHostIpuLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Time that micro-batches were on the device in the last call.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> inference.getComputeLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Time that outputs took to the host in the last call.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> inference.getIpuHostLatency() > (0.0, 0.0, 0.0)
            True
        """
        return self._latency("output", "output_complete")

    def getLatency(self) -> Latency:
        """Time that micro-batches of the last call took from the host and back to it.

        Returns:
            Minimum, maximum and average in seconds, as from `getHostIpuLatency`.

        Example:
            >>> import torch
            >>> from ipufit.emulator import inferenceModel
            >>> inference = inferenceModel(torch.nn.ReLU())
            >>> _ = inference(torch.ones(1))
            >>> minimum, maximum, average = inference.getLatency()
            >>> 0.0 < minimum <= average <= maximum
            True
        """
        return self._latency("input", "output_complete")

    def _latency(self, start: str, end: str) -> Latency:
        times = self._times
        return (0.0, 0.0, 0.0) if times is None else times.latency(start, end)
