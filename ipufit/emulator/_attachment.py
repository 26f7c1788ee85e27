# SPDX-License-Identifier: Apache-2.0
"""A compiled model that holds IPUs: from attach to detach."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ._device import (
    DeviceRng,
    DeviceWeights,
    GradientReduction,
    run_inference,
    run_training,
)
from ._half import rounding
from ._layout import Inputs, Layout, Outputs
from ._optimizer_link import OptimizerLink
from ._pod import Lease
from ._program import Program
from .enums import OutputMode
from .options import Options


class Attachment:
    """IPUs, with a model's weights and optimiser state on them.

    Args:
        owner: The executor; when it is gone the IPUs are free.
        program: What it compiled.
        options: Its options.
        host: Its weights on the host, by name: what is uploaded and downloaded.
        rng: The device's random state, which outlives an attachment.
        link: To the optimiser, for training.

    Raises:
        Error: There are not enough free IPUs.
    """

    def __init__(
        self,
        owner: object,
        program: Program,
        options: Options,
        host: dict[str, Tensor],
        rng: DeviceRng,
        link: OptimizerLink | None,
    ) -> None:
        self._program = program
        self._options = options
        self._host = host
        self._rng = rng
        self._link = link
        self._layout = Layout.from_options(options)
        replicas = self._layout.replicas
        first = options.ipu_id if options.exists("ipu_id") else None
        self._lease = Lease(owner, program.num_ipus * replicas, first)
        try:
            with torch.inference_mode(False):
                self._weights = DeviceWeights(program, host, replicas)
                if link is not None:
                    link.attach(self._weights.trained, host)
        except Exception:
            self._lease.end()
            raise

    def end(self) -> None:
        """Save the optimiser's state and give the IPUs back."""
        if self._link is not None:
            self._link.detach()
        self._lease.end()

    def download(self) -> None:
        """Copy the device's weights to the host."""
        self._weights.download(self._host)

    def upload(self) -> None:
        """Copy the host's weights to the device."""
        self._weights.upload(self._host)
        if self._link is not None:
            self._link.weights_were_uploaded()

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """One call, from its inputs to the outputs that the program computes."""
        with torch.inference_mode(False):  # updates need tensors with versions
            return self._run(tensors)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        program, layout, options = self._program, self._layout, self._options
        inputs = Inputs(layout, tensors, program.written_inputs)
        mode = OutputMode(options.output_mode)
        outputs = Outputs(layout, mode, options.output_return_period)
        is_rounding_random = bool(
            options._Popart.options.get("enableStochasticRounding")
        )
        is_random = program.is_random or is_rounding_random
        with self._rng if is_random else contextlib.nullcontext(), rounding(
            is_stochastic=is_rounding_random
        ):
            if self._link is None:
                run_inference(program, self._weights, layout, inputs, outputs)
            else:
                self._link.upload_loaded_state()
                scaling = self._link.settings.loss_scaling
                run_training(
                    program,
                    self._weights,
                    layout,
                    inputs,
                    outputs,
                    self._link.device_optimizer,
                    GradientReduction.from_options(options, layout, scaling),
                )
                self._link.was_stepped()
        inputs.write_back()
        return outputs.tensors()
