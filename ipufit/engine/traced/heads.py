# SPDX-License-Identifier: Apache-2.0
"""Heads of a step: what a program computes from the outputs of the user's module."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Iterator, NamedTuple, Protocol, Sequence

import torch
from torch import Tensor

from ipufit._poptorch import poptorch
from ipufit.blocks import Blocks
from ipufit.data import SampleStructure
from ipufit.engine.objective.dtypes import widened_all
from ipufit.engine.objective.figures import Entry, vector_of
from ipufit.engine.objective.mixed import dominant_labels, mixed_loss_terms
from ipufit.engine.objective.objective import Objective
from ipufit.engine.objective.outputs import (
    OWN_LOSS,
    checked_scalar,
    shapes_of,
    split_own_loss,
)
from ipufit.engine.objective.steps import Inferred, StepFunction, StepResult
from ipufit.engine.observers.losses import LossObserver
from ipufit.engine.observers.observing import Observing
from ipufit.errors import ConfigError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of
from ipufit.scalars import Scalars

from .packing import Packing
from .refusals import require_gradient


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
        outputs: Everything that it returned; a `StepResult` of a user's step.
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


class Head(Protocol):
    """The part of a step that follows the user's module.

    Attributes:
        is_training: Whether the program updates weights.
        index_of_loss: Place of the marked loss in what the program returns; None if it
            has none.
        modules: Modules that are traced besides the user's.
        step: Function that is called in the place of the module; None for the module.
        takes_labels: Whether targets and weights are among the tensors of a batch.
    """

    is_training: bool
    index_of_loss: int | None
    modules: Sequence[torch.nn.Module]
    step: StepFunction | None
    takes_labels: bool

    def explained(self, module: torch.nn.Module) -> ContextManager[None]:
        """Explain errors of the module while it is called."""
        ...

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute the tensors that the program returns, and say what was found.

        Args:
            tensors: Tensors of the batch.
            called: The module's outputs.
            observing: Mode that shows operations to observers.
        """
        ...


class TrainingHead:
    """The loss, marked, and the sums of the figures.

    Args:
        objective: Losses and metrics.
        structure: Nesting of a batch.
    """

    is_training = True
    index_of_loss: int | None = 1
    takes_labels = True

    def __init__(self, objective: Objective, structure: SampleStructure) -> None:
        steps = objective.steps
        self.modules: Sequence[torch.nn.Module] = objective.modules
        self.step: StepFunction | None = None if steps is None else steps.training
        self._objective = objective
        self._structure = structure

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Compute sums of the figures, the loss, and the outputs if they are streamed.

        The loss is returned because PopTorch drops what no output depends on, before
        it looks for the loss.
        """
        own, outputs, packing = None, called.outputs, Packing()
        rows, labels = rows_of(tensors[0]), self._structure.labels(tensors)
        if self._objective.owns_loss:
            own, outputs = _split(called, rows)
        if self.step is not None and self._objective.measures:
            _require_outputs(outputs)
        wide, labels = widened_all(outputs, labels)
        if self._objective.owns_loss:
            terms = self._own_terms(own, wide, rows)
        else:
            self._objective.check_logits(wide, labels, called.probabilities)
            mixing = self._structure.mixing(tensors)
            if mixing is None:
                terms = self._objective.loss_terms(wide, labels, rows)
            else:
                terms = mixed_loss_terms(self._objective, wide, labels, rows, mixing)
                labels = dominant_labels(labels, mixing)
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
        if own is None and self.step is not None:
            raise ConfigError(
                "The training step returned no loss: it returned "
                f"{shapes_of(outputs)}. Return the mean over the samples, a tensor "
                "without dimensions: alone, first in a tuple, or as 'loss' in a dict."
            )
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
        owns_loss = self._objective.owns_loss and self.step is None
        if not (owns_loss and self._structure.has_targets):
            return ""
        return (
            " The module doesn't get the targets, which are for losses of compile() "
            "and for metrics: what it computes its loss from must be among the inputs, "
            "as in fit({'x': x, 'labels': y}) or samples of the form ((x, labels),)."
        )

    @contextlib.contextmanager
    def explained(self, module: torch.nn.Module) -> Iterator[None]:
        """Give the advice if `forward` fails, as with None in the place of targets."""
        try:
            yield
        except (TypeError, AttributeError) as error:
            if not self._targets_hint:
                raise
            raise ConfigError(
                f"compile() got no loss, and {type(module).__name__} failed: "
                f"{error}.{self._targets_hint}"
            ) from error


class InferenceHead:
    """The outputs, and the scalars that the module gives.

    Args:
        inferred: The computation of the program.
    """

    is_training = False
    index_of_loss: int | None = None
    modules: Sequence[torch.nn.Module] = ()

    def __init__(self, inferred: Inferred) -> None:
        self.step: StepFunction | None = inferred.step
        self.takes_labels = inferred.takes_labels
        self._inferred = inferred

    def explained(self, module: torch.nn.Module) -> ContextManager[None]:
        """Leave errors as they are."""
        return contextlib.nullcontext()

    def results(
        self, tensors: Sequence[Tensor], called: Called, observing: Observing
    ) -> tuple[tuple[Tensor, ...], Findings]:
        """Return the outputs, then the scalars: the own loss and what is logged."""
        outputs, scalars = called.outputs, called.scalars
        if self._inferred.owns_loss:
            own, outputs = _split(called, rows_of(tensors[0]))
            if own is not None:
                scalars = _with_own_loss(own, scalars)
        if not self._inferred.gives_outputs:
            outputs = ()
        elif self.step is not None and self.takes_labels:
            _require_outputs(outputs)
        returned, packing = Packing.of(outputs, scalars)
        return returned, Findings(packing, (), called.probabilities, {})


def _split(called: Called, rows: int) -> tuple[Tensor | None, Any]:
    """Split what was returned into the module's own loss, or a step's, and the rest.

    Raises:
        ConfigError: The loss has several elements; or it is a sum over samples, so
            that it means something else in a micro-batch of another size.
    """
    if isinstance(called.outputs, StepResult):
        own, rest = called.outputs
    else:
        own, rest = split_own_loss(called.outputs, called.losses.marked)
    if rows > 1 and any(own is added for added in called.losses.sums):
        raise ConfigError(
            f"The model's own loss is a sum over the {rows} samples of a micro-batch "
            "(reduction='sum'), and has to be their mean: gradients and figures would "
            "depend on how samples are split into micro-batches. Use reduction='mean'."
        )
    return None if own is None else checked_scalar(own), rest


def _require_outputs(outputs: Any) -> None:
    """Refuse a step without outputs, where metrics need them.

    Raises:
        ConfigError: There are none.
    """
    if isinstance(outputs, tuple) and not outputs:
        raise ConfigError(
            "compile() got metrics, and the step returned no outputs for them. Return "
            "{'loss': loss, 'outputs': outputs}, or report scalars in that dict and "
            "leave metrics out."
        )


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
