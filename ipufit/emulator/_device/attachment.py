# SPDX-License-Identifier: Apache-2.0
"""A compiled model that holds IPUs: from attach to detach."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from ipufit.emulator._device.gradients import GradientReduction
from ipufit.emulator._device.runner import Call, Runner, Training
from ipufit.emulator._device.timings import CallTimes, Transfers
from ipufit.emulator._device.watch import Watch
from ipufit.emulator._device.weights import DeviceWeights
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.layout import (
    Inputs,
    Layout,
    Outputs,
    synthetic_inputs,
    unwritten_outputs,
)
from ipufit.emulator._layout.pod import Lease
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._optimizers.optimizer_sync import OptimizerSync
from ipufit.emulator._optimizers.settings import OptimizerSettings
from ipufit.emulator._options.options import Options
from ipufit.emulator._options.settings import Settings
from ipufit.emulator._processes import CommonRandom, GradientSums, Processes
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import rounding
from ipufit.emulator.enums import OutputMode


class CallResults(NamedTuple):
    """The results of one call, on the host.

    Attributes:
        anchored: Anchored tensors, by the user's names.
    """

    outputs: list[Tensor]
    anchored: dict[str, Tensor]
    times: CallTimes


class Attachment:
    """IPUs, with a model's weights and optimiser state on them.

    Args:
        lease: The IPUs; given back when the attachment ends.
        program: The program that the executor compiled.
        anchors: The tensors of the program that are anchored.
        options: The executor's options.
        host: The weights on the host by name; uploaded from, and downloaded to.
        groups: The weights, by name, that differ between groups of replicas.
        runner: Runs the program.
        rng: The device's random state.
        link: The host's optimiser and the device's; None for inference.
        processes: The processes that train the model; None if it is this one alone.
    """

    def __init__(
        self,
        lease: Lease,
        program: Program,
        anchors: Anchors,
        options: Options,
        host: dict[str, Tensor],
        groups: dict[str, ReplicaGroups],
        runner: Runner,
        rng: DeviceRng,
        link: OptimizerSync | None,
        processes: Processes | None = None,
    ) -> None:
        self._program = program
        self._anchors = anchors
        self._options = options
        self._host = host
        self._groups = groups
        self._runner = runner
        self._rng = rng
        self._link = link
        self._sums = None if processes is None else GradientSums(processes)
        self._reduction: GradientReduction | None = None
        self._reduction_settings: OptimizerSettings | None = None
        self._layout = Layout.from_options(options)
        self._mode = OutputMode(options.output_mode)
        self._period = options.output_return_period
        chosen = Settings.of(options)
        self._logs_cycles = chosen.counts_cycles
        self._rounds_at_random = chosen.rounds_at_random
        self._is_random = program.is_random or self._rounds_at_random
        self._is_synthetic = chosen.is_synthetic
        self._transfers = Transfers(
            self._layout,
            self._mode,
            self._period,
            num_inputs=program.num_inputs,
            num_outputs=program.num_results + anchors.num_watched,
            is_synthetic=self._is_synthetic,
        )
        self._lease = lease
        logger.debug("Writing weights from host to IPU memory")
        try:
            with torch.inference_mode(False):
                self._weights = DeviceWeights(
                    program, host, self._layout.replicas, groups
                )
                if link is not None:
                    link.attach(self._weights.trained, groups)
                    if processes is not None and self._rounds_at_random:
                        link.device_optimizer.random = CommonRandom(processes)
        except Exception:
            self._lease.end()
            raise

    def end(self) -> None:
        """Keep the optimiser's state on the host, and give the IPUs back."""
        if self._link is not None:
            self._link.detach()
        self._lease.end()

    def download(self) -> None:
        """Copy the device's weights to the host; with synthetic data none comes back.

        PopART doesn't stream weights then (`Devicex::weightsToHost`).
        """
        if self._is_synthetic:
            return
        logger.debug("Writing weights from IPU to host")
        self._weights.download(self._host)

    def upload(self) -> None:
        """Copy the host's weights to the device."""
        logger.debug("Writing weights from host to IPU memory")
        self._weights.upload(self._host)
        if self._link is not None:
            self._link.weights_were_uploaded()

    def upload_named(self, names: list[str]) -> None:
        """Copy some of the host's weights to the device, and nothing else."""
        self._weights.upload({name: self._host[name] for name in names})

    def run(self, tensors: list[Tensor]) -> CallResults:
        """Run one call of the executor on the tensors that it was given."""
        if not torch.is_inference_mode_enabled():
            return self._run(tensors)
        with torch.inference_mode(False):  # updates need tensors with versions
            return self._run(tensors)

    def _run(self, tensors: list[Tensor]) -> CallResults:
        started = perf_counter()
        inputs = self._taken_over(tensors)
        outputs, watch = self._outputs(), None
        call = Call(self._program, self._weights, self._layout, inputs, outputs)
        with self._random_state():
            if self._link is None:
                self._runner.infer(call)
            else:
                watch = self._train(call, self._link)
        ran = perf_counter()
        results = self._given_back(inputs, outputs, watch)
        times = CallTimes(started, inputs.taken, ran, perf_counter(), self._transfers)
        if self._logs_cycles:
            logger.debug("Total number of IPU cycles: %d", times.cycles())
        return CallResults(*results, times)

    def _taken_over(self, tensors: list[Tensor]) -> Inputs:
        """Take over what the caller gives, in types that the device holds."""
        if self._is_synthetic:
            tensors = synthetic_inputs(tensors)
        return Inputs(self._layout, tensors, self._program.written_inputs)

    def _given_back(
        self, inputs: Inputs, outputs: Outputs, watch: Watch | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Give back what was written into inputs; then outputs, anchored tensors."""
        if not self._is_synthetic:
            inputs.write_back()
        return self._split(outputs.tensors(), watch)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._rng, rounding(is_stochastic=self._rounds_at_random):
            yield

    def _random_state(self) -> contextlib.AbstractContextManager[None]:
        """Make the device's random state torch's, if the program draws from it."""
        return self._drawing() if self._is_random else contextlib.nullcontext()

    def _train(self, call: Call, link: OptimizerSync) -> Watch | None:
        reduction = self._reduction_by(link.settings)
        watch = self._watch(reduction)
        training = Training(link.device_optimizer, reduction, watch)
        with watch or contextlib.nullcontext():
            self._runner.train(call, training)
        return watch

    def _reduction_by(self, settings: OptimizerSettings) -> GradientReduction:
        """Give the same object as long as the settings are the same."""
        if self._reduction is None or settings is not self._reduction_settings:
            self._reduction_settings = settings
            self._reduction = GradientReduction.from_options(
                self._options, self._layout, settings, self._weights, self._sums
            )
        self._reduction.forget()
        return self._reduction

    def _outputs(self) -> Outputs:
        return Outputs(self._layout, self._mode, self._period)

    def _watch(self, reduction: GradientReduction) -> Watch | None:
        if not self._anchors.gradients and not self._anchors.after_updates:
            return None
        return Watch(
            self._anchors,
            self._weights,
            self._groups,
            self._layout.replicas,
            self._outputs(),
            self._outputs(),
            reduction.share,
        )

    def _split(
        self, results: list[Tensor], watch: Watch | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Part the program's results into outputs and anchored tensors."""
        if self._is_synthetic:
            results = unwritten_outputs(results)
        shorts = self._anchors.results
        if watch is None and not shorts:
            return results, {}
        num_outputs = len(results) - len(shorts)
        anchored = dict(zip(shorts, results[num_outputs:]))
        if watch is not None:
            seen = watch.tensors()
            values = list(seen.values())
            if self._is_synthetic:
                values = unwritten_outputs(values)
            anchored.update(zip(seen, values))
        return results[:num_outputs], anchored
