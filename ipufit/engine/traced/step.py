# SPDX-License-Identifier: Apache-2.0
"""The modules that PopTorch traces: the user's, with what ipufit adds to it."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterator, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.blocks import Blocks, started_blocks
from ipufit.config import IPUConfig
from ipufit.data import SampleStructure
from ipufit.engine.baked_in.values import random_draws_warned
from ipufit.engine.objective.dtypes import widened_all
from ipufit.engine.objective.figures import Entry, vector_of
from ipufit.engine.objective.logits import probability_outputs
from ipufit.engine.objective.objective import Objective
from ipufit.engine.objective.outputs import (
    OWN_LOSS,
    checked_scalar,
    shapes_of,
    split_own_loss,
)
from ipufit.engine.observers.autograd import AutogradObserver
from ipufit.engine.observers.losses import LossObserver
from ipufit.engine.observers.observing import Observing
from ipufit.engine.observers.probabilities import ProbabilityObserver
from ipufit.engine.observers.whole_buffers import BufferObserver
from ipufit.engine.weights.host_values import HostValue, replaced_by_inputs
from ipufit.engine.weights.wrapping import weights_of
from ipufit.errors import ConfigError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of
from ipufit.scalars import Scalars, collected

from .calling import call_module
from .packing import Packing
from .refusals import require_gradient
from .stages import check_stages_begin, last_block

_DTYPES = {"float32": torch.float32, "float16": torch.float16}


class Findings(NamedTuple):
    """Everything that the trace of a step has found out.

    Attributes:
        packing: Nesting of the outputs that the program returns.
        entries: Figures in the vector that a training program returns.
        probabilities: Outputs that are probabilities (`probability_outputs`).
        increments: Number that a micro-batch adds to each buffer that is only counted
            up.
    """

    packing: Packing
    entries: tuple[Entry, ...]
    probabilities: dict[str, str]
    increments: dict[str, int]


class Called(NamedTuple):
    """The user's module, called once.

    Attributes:
        outputs: Everything that it returned.
        scalars: Means that it logged.
        blocks: Blocks that it has started.
        losses: Observer of the loss functions that it called.
        probabilities: Outputs that are probabilities (`probability_outputs`).
    """

    outputs: Any
    scalars: Scalars
    blocks: Blocks
    losses: LossObserver
    probabilities: dict[str, str]


class Step(torch.nn.Module):
    """One micro-batch of the user's module, as PopTorch traces it: base of two steps.

    Args:
        module: The user's module.
        config: Has its stages and precision.
        structure: Nesting of a batch. A dict of inputs becomes keyword arguments of the
            module, a tuple or list positional ones.
        host_values: Buffers whose values follow the tensors of a batch.
    """

    _is_training: bool

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
    ) -> None:
        super().__init__()
        self.module = module
        self.host_values = tuple(host_values)
        self._structure = structure
        self._stages = config.stages
        self._first_block = config.first_block
        self._last_block = config.last_block
        self._dtype = _DTYPES[config.precision]
        # PopTorch traces a shallow copy, which shares this list.
        self._found: list[Findings] = []

    @property
    def findings(self) -> Findings:
        """The findings of the newest trace."""
        return self._found[-1]

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
            autograd = AutogradObserver(is_training=self._is_training)
            observing = Observing(autograd, buffers)
            with observing, random_draws_warned():
                returned, findings = self._computed(tensors[:count], observing)
            buffers.refuse_returned(returned)
            buffers.warn(is_counted=self._is_training)
        self._found.append(findings._replace(increments=buffers.increments()))
        return returned

    def _computed(
        self, tensors: Sequence[Tensor], observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute what the program returns, and what was found meanwhile."""
        raise NotImplementedError

    def _called(self, tensors: Sequence[Tensor], observing: Observing) -> Called:
        if self._first_block is not None:  # the casts belong to it
            poptorch.Block.start(self._first_block)
        given = [self._cast(tensor) for tensor in tensors[: self._structure.num_inputs]]
        inputs = self._structure.inputs.rebuild(given)
        losses, probabilities = LossObserver(), ProbabilityObserver()
        with contextlib.ExitStack() as stack:
            scalars = stack.enter_context(collected())
            blocks = stack.enter_context(started_blocks(self._stages))
            stack.enter_context(observing.also(losses))
            stack.enter_context(observing.also(probabilities))
            outputs = call_module(self.module, inputs)
        check_stages_begin(
            self.module, self._stages, blocks, training=self._is_training
        )
        found = probability_outputs(outputs, probabilities)
        return Called(outputs, scalars, blocks, losses, found)

    def _in_last_block(self, called: Called) -> ContextManager[Any]:
        return last_block(self._last_block, called.blocks)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype == torch.float32 or not tensor.is_floating_point():
            return tensor
        narrowed: Tensor = tensor.to(self._dtype)
        return narrowed


class TrainingStep(Step):
    """One micro-batch of training: the loss, marked, and the sums of the figures.

    Args:
        module: The user's module.
        config: Has its stages and precision.
        structure: Nesting of a batch.
        host_values: Buffers whose values follow the tensors of a batch.
        objective: Losses and metrics.
    """

    _is_training = True

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
        objective: Objective,
    ) -> None:
        super().__init__(module, config, structure, host_values)
        self._objective = objective
        self.losses = torch.nn.ModuleList(objective.modules)  # for their buffers

    def _computed(
        self, tensors: Sequence[Tensor], observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute sums of the figures, the loss, and the outputs if they are streamed.

        The loss is returned because PopTorch drops what no output depends on, before
        it looks for the loss.
        """
        with self._targets_explained():
            called = self._called(tensors, observing)
        own, outputs, packing = None, called.outputs, Packing()
        with self._in_last_block(called):
            rows, labels = rows_of(tensors[0]), self._structure.labels(tensors)
            if self._objective.owns_loss:
                own, outputs = _split(outputs, called.losses, rows)
            wide, labels = widened_all(outputs, labels)
            if self._objective.owns_loss:
                terms = self._own_terms(own, wide, rows)
            else:
                self._objective.check_logits(wide, labels, called.probabilities)
                terms = self._objective.loss_terms(wide, labels, rows)
            with observing.also(called.losses):
                vector, entries = vector_of(
                    self._objective, wide, labels, rows, terms, called.scalars
                )
            streamed: tuple[Tensor, ...] = ()
            if self._objective.is_streamed:
                streamed, packing = Packing.of(outputs, {})
            loss = total_loss(terms)
            require_gradient(loss)
            if called.losses.has_losses:
                loss = _with_other_losses(loss, (vector, *streamed))
            marked = poptorch.identity_loss(loss, reduction="sum")
        findings = Findings(packing, entries, called.probabilities, {})
        return (vector, marked, *streamed), findings

    def _own_terms(
        self, own: Tensor | None, outputs: Any, rows: int
    ) -> dict[str, tuple[LossTerms, float]]:
        if own is None:
            raise ConfigError(
                "There is no loss: compile() got none, and the module returns none "
                f"that would be understood ({OWN_LOSS}); it returned "
                f"{shapes_of(outputs)}. Return one, or pass loss='cross_entropy' or "
                f"the like to compile().{self._targets_hint}"
            )
        value: Tensor = own.to(torch.float32)
        total = value.detach().mul(rows)
        count = torch.full_like(total, float(rows), device=total.device)
        return {"": (LossTerms(value, total, count), 1.0)}

    @property
    def _targets_hint(self) -> str:
        """Advice if there are targets, which a module with its own loss doesn't get."""
        if not (self._objective.owns_loss and self._structure.has_targets):
            return ""
        return (
            " The module doesn't get the targets, which are for losses of compile() "
            "and for metrics: what it computes its loss from must be among the inputs, "
            "as in fit({'x': x, 'labels': y}) or samples of the form ((x, labels),)."
        )

    @contextlib.contextmanager
    def _targets_explained(self) -> Iterator[None]:
        """Give the advice if `forward` fails, as with None in the place of targets."""
        try:
            yield
        except (TypeError, AttributeError) as error:
            if not self._targets_hint:
                raise
            raise ConfigError(
                f"compile() got no loss, and {type(self.module).__name__} failed: "
                f"{error}.{self._targets_hint}"
            ) from error


class InferenceStep(Step):
    """One micro-batch of inference: the outputs, and the scalars that the module gives.

    Args:
        module: The user's module.
        config: Has its stages and precision.
        structure: Nesting of a batch.
        host_values: Buffers whose values follow the tensors of a batch.
        owns_loss: Whether the module returns its own loss.
    """

    _is_training = False

    def __init__(
        self,
        module: torch.nn.Module,
        config: IPUConfig,
        structure: SampleStructure,
        host_values: Sequence[HostValue],
        *,
        owns_loss: bool,
    ) -> None:
        super().__init__(module, config, structure, host_values)
        self._owns_loss = owns_loss

    def _computed(
        self, tensors: Sequence[Tensor], observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute the outputs, then the scalars: the own loss and what is logged."""
        called = self._called(tensors, observing)
        outputs, scalars = called.outputs, called.scalars
        with self._in_last_block(called):
            if self._owns_loss:
                own, outputs = _split(outputs, called.losses, rows_of(tensors[0]))
                if own is not None:
                    scalars = _with_own_loss(own, scalars)
            returned, packing = Packing.of(outputs, scalars)
        return returned, Findings(packing, (), called.probabilities, {})


def _split(outputs: Any, losses: LossObserver, rows: int) -> tuple[Tensor | None, Any]:
    """Split outputs into the module's own loss and the others.

    Raises:
        ConfigError: The loss has several elements; or it is a sum over samples, so
            that it means something else in a micro-batch of another size.
    """
    own, rest = split_own_loss(outputs, losses.marked)
    if rows > 1 and any(own is added for added in losses.sums):
        raise ConfigError(
            f"The module's own loss is a sum over the {rows} samples of a micro-batch "
            "(reduction='sum'), and has to be their mean: gradients and figures would "
            "depend on how samples are split into micro-batches. Use reduction='mean'."
        )
    return None if own is None else checked_scalar(own), rest


def _with_own_loss(own: Tensor, scalars: Scalars) -> Scalars:
    if "loss" in scalars:
        raise ConfigError(
            "log('loss') was called, and the module returns its own loss, which is "
            "called so: log it under another name."
        )
    return {"loss": own.detach().to(torch.float32), **scalars}


def total_loss(terms: dict[str, tuple[LossTerms, float]]) -> Tensor:
    """Sum the losses up, with their weights; 0-d.

    Args:
        terms: Terms and weight of each loss, by output.
    """
    values = [t.value if w == 1 else t.value.mul(w) for t, w in terms.values()]
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _with_other_losses(value: Tensor, returned: Sequence[Tensor]) -> Tensor:
    """Add everything else that is returned to the loss, as a part of it that is 0.

    Built-in loss functions that a metric, `log` or the module uses are markers too.
    PopTorch takes those for a step on the way from which the final loss is reached.
    """
    nothing = [
        tensor.detach().reshape(-1)[:1].to(torch.float32).mul(0.0)
        for tensor in returned
    ]
    return torch.cat([value.reshape(1), *nothing])
