# SPDX-License-Identifier: Apache-2.0
"""Outputs, loss and gradients of a module on the host, in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from ipufit.data import SampleStructure
from ipufit.engine.objective.objective import Objective
from ipufit.engine.objective.outputs import split_own_loss
from ipufit.engine.objective.steps import Inferred, result_of_step
from ipufit.engine.observers.losses import LossObserver
from ipufit.engine.observers.observing import Observing
from ipufit.engine.weights.modes import mode
from ipufit.errors import ConfigError
from ipufit.losses import LossTerms
from ipufit.metrics import rows_of

from .calling import call_module, call_step
from .heads import total_loss


class HostUpdate(NamedTuple):
    """The first half of a weight update: loss and gradients.

    Attributes:
        loss: Mean over the samples.
        gradients: float32, by the names of parameters that are trained; None for one
            that the loss doesn't depend on.
        draws: Whether the forward pass has drawn random numbers.
    """

    loss: float
    gradients: dict[str, Tensor | None]
    draws: bool


def host_outputs(module: torch.nn.Module, inputs: Any, predicted: Inferred) -> Any:
    """The outputs in eval mode, without the loss that the module returns itself.

    Args:
        module: A float32 module.
        inputs: As a sample's, with samples in dim 0.
        predicted: The computation of `predict`.
    """
    losses = LossObserver()
    with mode(module, training=False), torch.no_grad(), Observing(losses):
        if predicted.step is not None:
            return call_step(predicted.step, module, inputs)
        outputs = call_module(module, inputs)
    return split_own_loss(outputs, losses.marked)[1] if predicted.owns_loss else outputs


def host_update(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    batch: Sequence[Tensor],
    micro_batch_size: int,
) -> HostUpdate:
    """The loss and the gradients of an update, micro-batch by micro-batch.

    They are the mean over micro-batches, or their sum if the loss is a sum over
    samples, as on the device. The module's buffers change as in training.

    Args:
        module: A float32 module.
        objective: Its losses.
        structure: Nesting of the batch.
        batch: All samples of the update.
        micro_batch_size: Samples of a forward pass.

    Raises:
        ConfigError: The module returns no loss, and there is no other.
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    sums: dict[str, list[float]] = {}
    micro_batches = list(zip(*(torch.split(leaf, micro_batch_size) for leaf in batch)))
    factor = 1 if objective.is_sum else len(micro_batches)
    before = torch.get_rng_state()
    module.zero_grad(set_to_none=True)
    with mode(module, training=True), torch.enable_grad():
        for micro_batch in micro_batches:
            terms = _terms(module, objective, structure, micro_batch)
            loss = torch.div(total_loss(terms), factor)
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            for name, (term, weight) in terms.items():
                total, divisor, _ = sums.setdefault(name, [0.0, 0.0, weight])
                sums[name][:2] = (
                    total + float(term.total),
                    divisor + float(term.divisor),
                )
    return HostUpdate(
        sum(
            weight * total / (divisor or 1) for total, divisor, weight in sums.values()
        ),
        {name: parameter.grad for name, parameter in parameters.items()},
        not torch.equal(before, torch.get_rng_state()),
    )


def _terms(
    module: torch.nn.Module,
    objective: Objective,
    structure: SampleStructure,
    tensors: Sequence[Tensor],
) -> dict[str, tuple[LossTerms, float]]:
    inputs, labels = structure.split(tensors)
    rows = rows_of(tensors[0])
    losses = LossObserver()
    with Observing(losses):
        if objective.steps is None:
            outputs = call_module(module, inputs)
        else:
            batch = structure.batch(inputs, tensors)
            outputs = call_step(objective.steps.training, module, batch)
    if not objective.owns_loss:
        return objective.loss_terms(outputs, labels, rows)
    if objective.steps is None:
        own, _ = split_own_loss(outputs, losses.marked)
    else:
        own, _ = result_of_step(outputs, losses.marked)
    if own is None:
        raise ConfigError(
            "There is no loss to compare: compile() got none, and the module returns "
            "none in train mode."
        )
    value = own.reshape(())
    count = torch.tensor(float(rows))
    return {"": (LossTerms(value, value.detach() * rows, count), 1.0)}
