# SPDX-License-Identifier: Apache-2.0
"""The module that PopTorch traces: the user's, with a head that ipufit adds."""

from __future__ import annotations

import contextlib
from typing import Any, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.blocks import started_blocks
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure
from ipufit.engine.baked_in.host_samples import host_samples_warned
from ipufit.engine.baked_in.values import random_draws_warned
from ipufit.engine.objective.logits import probability_outputs
from ipufit.engine.objective.steps import result_of_step
from ipufit.engine.observers.autograd import AutogradObserver
from ipufit.engine.observers.losses import LossObserver
from ipufit.engine.observers.observing import Observing
from ipufit.engine.observers.probabilities import ProbabilityObserver
from ipufit.engine.observers.whole_buffers import BufferObserver
from ipufit.engine.weights.host_values import HostValue, replaced_by_inputs
from ipufit.engine.weights.wrapping import weights_of
from ipufit.mixing import mixed_inputs
from ipufit.scalars import collected

from .calling import call_module, call_step
from .casting import computed_in
from .heads import Called, Findings, Head
from .recomputing import refuse_unseen_pipeline
from .stages import check_stages_begin, last_block

_OVERLAPS = {
    "accumulation": poptorch.OverlapMode.OverlapAccumulationLoop,
    "device_iterations": poptorch.OverlapMode.OverlapDeviceIterationLoop,
}


class Step(torch.nn.Module):
    """One micro-batch of the user's module, as PopTorch traces it.

    Args:
        config: Has its stages and precision.
        structure: Nesting of a batch. A dict of inputs becomes keyword arguments of the
            module, a tuple or list positional ones.
        host_values: Buffers whose values follow the tensors of a batch.
        head: Computes from the module's outputs what the program returns.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
        head: Head,
    ) -> None:
        super().__init__()
        self.module = module
        self.losses = torch.nn.ModuleList(head.modules)  # for their buffers
        self._head = head
        self.host_values = tuple(host_values)
        self._structure = structure
        self._first_block = config.first_block
        self._last_block = config.last_block
        self._config = config
        self._overlap = _OVERLAPS.get(config.overlap_io or "")
        # PopTorch traces a shallow copy, which shares this list.
        self._found: list[Findings] = []

    @property
    def findings(self) -> Findings:
        """The findings of the newest trace."""
        return self._found[-1]

    @property
    def num_given(self) -> int:
        """Number of the first tensors of a batch that the program takes."""
        structure = self._structure
        return structure.num_given if self._head.takes_labels else structure.num_inputs

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers of which the device has copies."""
        values = {id(value.tensor) for value in self.host_values}
        return [one for one in weights_of(self) if id(one) not in values]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Trace a micro-batch, and give all that the program returns.

        Args:
            *tensors: Tensors of the batch, then the host's values.

        Raises:
            UnsupportedError: PopTorch would pass over something.
        """
        count = len(tensors) - len(self.host_values)
        with replaced_by_inputs(self.host_values, tensors[count:]):
            buffers = BufferObserver(dict(self.named_buffers()))
            autograd = AutogradObserver(is_training=self._head.is_training)
            observing = Observing(autograd, buffers)
            with observing, random_draws_warned(), host_samples_warned(self.module):
                if self._first_block is not None:  # casts and transfers belong to it
                    poptorch.Block.start(self._first_block)
                batch = self._loaded(tensors[:count])
                called = self._called(batch, observing)
                with last_block(self._last_block, called.blocks):
                    returned, findings = self._head.results(batch, called, observing)
                    returned = self._stored(returned)
            buffers.refuse_returned(returned)
            buffers.warn(is_counted=self._head.is_training)
        self._found.append(findings._replace(increments=buffers.increments()))
        return returned

    def _called(self, tensors: Sequence[Tensor], observing: Observing) -> Called:
        given = [self._cast(tensor) for tensor in tensors[: self._structure.num_inputs]]
        mixing = self._structure.mixing(tensors)
        if mixing is not None:
            given = [mixed_inputs(self._as_floats(one), mixing) for one in given]
        inputs = self._structure.inputs.rebuild(given)
        losses, probabilities = LossObserver(), ProbabilityObserver()
        with contextlib.ExitStack() as stack:
            scalars = stack.enter_context(collected())
            blocks = stack.enter_context(started_blocks(self._config.stages))
            stack.enter_context(observing.also(losses))
            stack.enter_context(observing.also(probabilities))
            stack.enter_context(self._head.explained(self.module))
            stack.enter_context(computed_in(self.module, self._config))
            outputs = self._computed(inputs, tensors, losses)
        check_stages_begin(
            self.module, self._config, blocks, training=self._head.is_training
        )
        if self._head.is_training:
            refuse_unseen_pipeline(self.module, self._config, blocks)
        found = probability_outputs(outputs, probabilities)
        return Called(outputs, scalars, blocks, losses, found)

    def _computed(
        self, inputs: Any, tensors: Sequence[Tensor], losses: LossObserver
    ) -> Any:
        """Call the user's module, or the user's step, with a micro-batch."""
        step = self._head.step
        if step is None:
            return call_module(self.module, inputs)
        if not self._head.takes_labels:
            return call_step(step, self.module, inputs)
        batch = self._structure.batch(inputs, tensors)
        returned = call_step(step, self.module, batch)
        return result_of_step(returned, losses.marked)

    def _loaded(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors of the batch, loaded while the device computes if asked for."""
        if self._overlap is None:
            return tensors
        return [poptorch.set_overlap_for_input(t, self._overlap) for t in tensors]

    def _stored(self, returned: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """All that the program returns, stored likewise; the loss stays the marked."""
        if self._overlap is None:
            return returned
        mark = poptorch.set_overlap_for_output
        return tuple(
            one if place == self._head.index_of_loss else mark(one, self._overlap)
            for place, one in enumerate(returned)
        )

    def _as_floats(self, tensor: Tensor) -> Tensor:
        """Pixels of 8 bits in the dtype of the program, so that they can be mixed."""
        if tensor.is_floating_point():
            return tensor
        floats: Tensor = tensor.to(self._config.types.activations)
        return floats

    def _cast(self, tensor: Tensor) -> Tensor:
        is_cast = self._config.types.is_half and tensor.is_floating_point()
        return tensor.to(torch.float16) if is_cast else tensor
