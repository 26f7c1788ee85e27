# SPDX-License-Identifier: Apache-2.0
"""A compiled model that holds IPUs: its weights, its optimizer, and its calls."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor

from ipufit.emulator._device.loop import Call, DeviceWeights, Gradients, Runner, Watch
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.layout import (
    Inputs,
    Layout,
    Outputs,
    synthetic_inputs,
    unwritten_outputs,
)
from ipufit.emulator._layout.pod import Target
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._optimizers.optimizer_sync import OptimizerSync
from ipufit.emulator._options.options import Options
from ipufit.emulator._options.settings import Settings
from ipufit.emulator._processes import CommonRandom, GradientSums, Processes
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.args import CallArguments
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import rounding
from ipufit.emulator.enums import OutputMode

PerfCounters = Dict[str, List[List[float]]]
Latency = Tuple[float, float, float]

COUNTERS = ("input", "input_complete", "output", "output_complete")
CLOCK_HZ = 1.33e9
"""The clock rate of a Mk2 IPU (Graphcore, IPU-M2000 data sheet)."""


@dataclass(frozen=True)
class Executable:
    """A compiled model: its program, and everything it was compiled with.

    Attributes:
        target: The kind and number of IPUs that the program needs.
        arguments: The arguments of a call, as tensors with shapes but no data.
        first_micro_batch: The arguments of the first micro-batch it was compiled with.
        host_weights: The module's parameters and buffers by name. Integers are
            copies: they are constants of the program.
        replica_groups: For each parameter that differs between replicas its groups.
        tensor_names: Names that `Options.anchorTensor` accepts.
        anchors: The tensors of the program that are anchored.
        runner: Runs the program: looped or folded.
    """

    program: Program
    target: Target
    arguments: CallArguments
    first_micro_batch: CallArguments
    host_weights: dict[str, Tensor]
    replica_groups: dict[str, ReplicaGroups]
    tensor_names: list[str]
    anchors: Anchors
    runner: Runner

    def given_arguments(self) -> tuple[Any, Any]:
        """Give the first micro-batch in the types in which the caller gave it."""
        rows = self.first_micro_batch
        pairs = zip(rows.tensors(), self.arguments.tensors())
        given = rows.with_tensors(row.to(like.dtype) for row, like in pairs)
        return given.args, given.kwargs

    def facts(self, options: Options) -> dict[str, object]:
        """List what must be the same in all processes that train the model."""
        training = options.Training
        weights = [
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in self.host_weights.items()
        ]
        reduction = (
            training.accumulation_and_replication_reduction_type,
            training.meanAccumulationAndReplicationReductionStrategy,
        )
        return {
            "the number of device iterations": options.device_iterations,
            "the gradient accumulation": training.gradient_accumulation,
            "the number of replicas": options.replication_factor,
            "the reduction of gradients": reduction,
            "the weights": weights,
        }


class CallResults(NamedTuple):
    """The results of one call on the host, and when its parts happened.

    Times are seconds of this machine's clock. One stamp is taken for each micro-batch;
    users' counters are derived from these.

    Attributes:
        anchored: Anchored tensors, by the user's names.
        started: When the caller handed over the inputs.
        taken: When each micro-batch was taken by its replica, in order; the results of
            the one before had been collected then.
        ran: When the results of the last one had been collected.
        returned: When the outputs were complete.
        sent: Indices of the micro-batches whose results came back.
        num_inputs: Number of tensors that the program takes besides the weights.
        num_outputs: Number of tensors that it returns.
        is_synthetic: Whether nothing was sent.
    """

    outputs: list[Tensor]
    anchored: dict[str, Tensor]
    started: float
    taken: list[float]
    ran: float
    returned: float
    sent: list[int]
    num_inputs: int
    num_outputs: int
    is_synthetic: bool

    def counters(self) -> PerfCounters:
        """List the times of the micro-batches of each input, and of each output.

        The first micro-batch is handed over with the call. The others are taken in
        the moment they are handed over, as host and device share their memory; their
        results are complete when they are collected, the last ones when the outputs
        are.
        """
        times: PerfCounters = {name: [] for name in COUNTERS}
        if not self.is_synthetic:
            later = self.taken[1:]
            collected, complete = [*later, self.ran], [*later, self.returned]
            times["input"] = [[self.started, *later]]
            times["input_complete"] = [self.taken]
            times["output"] = [[collected[index] for index in self.sent]]
            times["output_complete"] = [[complete[index] for index in self.sent]]
        return {
            name: [
                list(*times[name])
                for _ in range(
                    self.num_inputs if name.startswith("input") else self.num_outputs
                )
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


class Device:
    """IPUs with a compiled model on them, from attach to detach.

    Args:
        executable: The model. Its host weights are uploaded from, and downloaded to.
        options: The executor's options.
        lease: Gives the IPUs back.
        rng: The device's random state.
        optimizer: Updates the weights; None for inference.
        processes: The processes that train the model; None if it is this one alone.
    """

    def __init__(
        self,
        executable: Executable,
        options: Options,
        lease: Callable[[], Any],
        rng: DeviceRng,
        optimizer: OptimizerSync | None,
        processes: Processes | None = None,
    ) -> None:
        self._executable = executable
        self._settings = settings = Settings.of(options)
        self._lease = lease
        self._rng = rng
        self._optimizer = optimizer
        self._layout = layout = Layout.from_options(options)
        self._mode = OutputMode(options.output_mode)
        self._returned = layout.returned_steps(self._mode, options.output_return_period)
        self._sent = [
            step * layout.replicas + replica
            for step in self._returned
            for replica in range(layout.replicas)
        ]
        program, self._num_watched = executable.program, executable.anchors.num_watched
        self._num_inputs = program.num_inputs
        self._num_outputs = program.num_results + self._num_watched
        self._draws = program.is_random or settings.rounds_at_random
        logger.debug("Writing weights from host to IPU memory")
        try:
            with torch.inference_mode(False):
                self._weights = DeviceWeights(
                    program,
                    executable.host_weights,
                    layout.replicas,
                    executable.replica_groups,
                )
                if optimizer is not None:
                    self._device_optimizer = optimizer.attach(
                        self._weights.trained, executable.replica_groups
                    )
                    if processes is not None and settings.rounds_at_random:
                        self._device_optimizer.random = CommonRandom(processes)
        except Exception:
            lease()
            raise
        sums = None if processes is None else GradientSums(processes)
        self._gradients = Gradients(options, layout, self._weights, sums)

    def release(self) -> None:
        """Keep the optimizer's state on the host, and give the IPUs back."""
        if self._optimizer is not None:
            self._optimizer.detach()
        self._lease()

    def download(self) -> None:
        """Copy the device's weights to the host; with synthetic data none comes back.

        PopART doesn't stream weights then (`Devicex::weightsToHost`).
        """
        if not self._settings.is_synthetic:
            logger.debug("Writing weights from IPU to host")
            self._weights.download(self._executable.host_weights)

    def upload(self) -> None:
        """Copy the host's weights to the device."""
        logger.debug("Writing weights from host to IPU memory")
        self._weights.upload(self._executable.host_weights)
        if self._optimizer is not None:
            self._optimizer.weights_were_uploaded()

    def upload_named(self, names: list[str]) -> None:
        """Copy some of the host's weights to the device, and nothing else."""
        host = self._executable.host_weights
        self._weights.upload({name: host[name] for name in names})

    def run(self, tensors: list[Tensor]) -> CallResults:
        """Run one call of the executor on the tensors that it was given."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # updates need tensors with versions
                return self.run(tensors)
        started = perf_counter()
        is_synthetic = self._settings.is_synthetic
        if is_synthetic:
            tensors = synthetic_inputs(tensors)
        call = self._begin(tensors)
        with self._drawing() if self._draws else contextlib.nullcontext():
            if call.watch is None:
                self._executable.runner.run(call)
            else:
                with call.watch:
                    self._executable.runner.run(call)
        ran = perf_counter()
        results = call.outputs.tensors()
        num_outputs = len(results) - len(self._executable.anchors.results)
        names = self._executable.anchors.results
        anchored = dict(zip(names, results[num_outputs:]))
        if call.watch is not None:
            anchored.update(call.watch.tensors())
        outputs = results[:num_outputs]
        if is_synthetic:
            outputs = unwritten_outputs(outputs)
            anchored = dict(zip(anchored, unwritten_outputs(list(anchored.values()))))
        elif self._executable.program.written_inputs:
            call.inputs.write_back()
        done = CallResults(
            outputs,
            anchored,
            started,
            call.inputs.taken,
            ran,
            perf_counter(),
            self._sent,
            self._num_inputs,
            self._num_outputs,
            is_synthetic,
        )
        if self._settings.counts_cycles:
            logger.debug("Total number of IPU cycles: %d", done.cycles())
        return done

    def _begin(self, tensors: list[Tensor]) -> Call:
        program, layout = self._executable.program, self._layout
        inputs = Inputs(layout, tensors, program.written_inputs)
        outputs = Outputs(self._mode, self._returned)
        if self._optimizer is None:
            return Call(program, self._weights, layout, inputs, outputs)
        self._gradients.begin(self._optimizer.settings)
        watch, anchors = None, self._executable.anchors
        if self._num_watched:
            watch = Watch(
                anchors,
                self._weights,
                self._executable.replica_groups,
                layout.replicas,
                Outputs(self._mode, self._returned),
                Outputs(self._mode, self._returned),
                self._gradients.share,
            )
        return Call(
            program,
            self._weights,
            layout,
            inputs,
            outputs,
            self._device_optimizer,
            self._gradients,
            watch,
        )

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Make the device's random state torch's."""
        with self._rng, rounding(is_stochastic=self._settings.rounds_at_random):
            yield
