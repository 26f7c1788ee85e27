# SPDX-License-Identifier: Apache-2.0
"""A compiled model that holds IPUs: from attach to detach."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Iterator, NamedTuple

import torch
from torch import Tensor

from ipufit.emulator._device.loop import run_inference, run_training
from ipufit.emulator._device.micro_batch_runs import Device
from ipufit.emulator._device.timings import CallTimes, Transfers
from ipufit.emulator._device.watch import Watch
from ipufit.emulator._device.weights import DeviceWeights, GradientReduction
from ipufit.emulator._folding.folding import Folding
from ipufit.emulator._ground.logging import logger
from ipufit.emulator._layout.device_rng import DeviceRng
from ipufit.emulator._layout.layout import Inputs, Layout, Outputs
from ipufit.emulator._layout.pod import Lease
from ipufit.emulator._layout.replica_groups import ReplicaGroups
from ipufit.emulator._layout.synthetic_data import (
    is_synthetic,
    synthetic_inputs,
    unwritten_outputs,
)
from ipufit.emulator._optimizers.values import OptimizerSettings
from ipufit.emulator._options.options import Options
from ipufit.emulator._program.anchors import Anchors
from ipufit.emulator._program.program import Program
from ipufit.emulator._tracing.half import rounding
from ipufit.emulator._update.optimizer_link import OptimizerLink
from ipufit.emulator.enums import OutputMode

if TYPE_CHECKING:
    from ipufit.emulator._machine_code.runner import (
        CompiledInference,
        CompiledTraining,
    )


class CallResults(NamedTuple):
    """What one call leaves on the host.

    Attributes:
        outputs: Those that the program computes.
        anchored: Anchored tensors, by the user's names.
        times: When it happened.
    """

    outputs: list[Tensor]
    anchored: dict[str, Tensor]
    times: CallTimes


class Attachment:
    """IPUs, with a model's weights and optimiser state on them.

    Args:
        lease: Of the IPUs, for the executor; given back when the attachment ends.
        program: What it compiled.
        anchors: What is seen of it.
        options: Its options.
        host: Its weights on the host, by name: what is uploaded and downloaded.
        groups: Of those that differ between groups of replicas.
        folding: Says which micro-batches run in one pass.
        code: What runs the program, if it is compiled to machine code.
        rng: The device's random state.
        link: To the optimiser, for training.
    """

    def __init__(
        self,
        lease: Lease,
        program: Program,
        anchors: Anchors,
        options: Options,
        host: dict[str, Tensor],
        groups: dict[str, ReplicaGroups],
        folding: Folding,
        code: CompiledInference | CompiledTraining | None,
        rng: DeviceRng,
        link: OptimizerLink | None,
    ) -> None:
        self._program = program
        self._anchors = anchors
        self._options = options
        self._host = host
        self._groups = groups
        self._folding = folding
        self._code = code
        self._rng = rng
        self._link = link
        self._reduction: GradientReduction | None = None
        self._reduction_settings: OptimizerSettings | None = None
        self._layout = Layout.from_options(options)
        self._mode = OutputMode(options.output_mode)
        self._period = options.output_return_period
        popart = options._Popart.options
        self._logs_cycles = bool(popart["instrumentWithHardwareCycleCounter"])
        self._rounds_at_random = bool(popart.get("enableStochasticRounding"))
        self._is_random = program.is_random or self._rounds_at_random
        self._is_synthetic = is_synthetic(options)
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
        except Exception:
            self._lease.end()
            raise

    def end(self) -> None:
        """Keep the optimiser's state and give the IPUs back."""
        if self._link is not None:
            self._link.detach()
        self._lease.end()

    def download(self) -> None:
        """Copy the device's weights to the host."""
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
        """One call, from its inputs to what it leaves on the host."""
        if not torch.is_inference_mode_enabled():
            return self._run(tensors)
        with torch.inference_mode(False):  # updates need tensors with versions
            return self._run(tensors)

    def _run(self, tensors: list[Tensor]) -> CallResults:
        started = perf_counter()
        if self._is_synthetic:
            tensors = synthetic_inputs(tensors)
        inputs = Inputs(self._layout, tensors, self._program.written_inputs)
        outputs, watch = self._outputs(), None
        with self._random_state():
            if self._link is None:
                run_inference(self._device(inputs), outputs)
            else:
                watch = self._train(self._link, inputs, outputs)
        ran = perf_counter()
        if not self._is_synthetic:
            inputs.write_back()
        results = self._split(outputs.tensors(), watch)
        times = CallTimes(started, inputs.taken, ran, perf_counter(), self._transfers)
        if self._logs_cycles:
            logger.debug("Total number of IPU cycles: %d", times.cycles())
        return CallResults(*results, times)

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        with self._rng, rounding(is_stochastic=self._rounds_at_random):
            yield

    def _random_state(self) -> contextlib.AbstractContextManager[None]:
        """Lets the device draw its random numbers, if it does."""
        return self._drawing() if self._is_random else contextlib.nullcontext()

    def _reduction_by(self, settings: OptimizerSettings) -> GradientReduction:
        """How gradients are reduced; the same object while the settings are."""
        if self._reduction is None or settings is not self._reduction_settings:
            self._reduction_settings = settings
            self._reduction = GradientReduction.from_options(
                self._options,
                self._layout,
                settings.loss_scaling,
                self._weights.groups_of_elements,
                settings.accum_type,
            )
        self._reduction.forget()
        return self._reduction

    def _train(
        self, link: OptimizerLink, inputs: Inputs, outputs: Outputs
    ) -> Watch | None:
        reduction = self._reduction_by(link.settings)
        watch = self._watch(reduction)
        with watch or contextlib.nullcontext():
            run_training(
                self._device(inputs),
                outputs,
                link.device_optimizer,
                reduction,
                watch,
            )
        return watch

    def _device(self, inputs: Inputs) -> Device:
        return Device(
            self._program,
            self._weights,
            self._layout,
            inputs,
            self._folding,
            self._code,
        )

    def _outputs(self) -> Outputs:
        return Outputs(self._layout, self._mode, self._period)

    def _watch(self, reduction: GradientReduction) -> Watch | None:
        if not self._anchors.gradients and not self._anchors.updates:
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
