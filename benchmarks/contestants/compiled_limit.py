# SPDX-License-Identifier: Apache-2.0
"""How fast it could be when whole updates are one graph of `torch.compile`'s."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from .base import Contestant, Figures, Task, UnavailableError
from .limits import LARGER

_BETA1, _BETA2, _EPSILON, _DECAY = 0.9, 0.999, 1e-8, 0.01  # torch's AdamW
_FEW_PARAMETERS = 10_000  # so small that calls cost more than what they compute

Weights = Dict[str, Tensor]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What can't be compiled has no figures."""
    try:
        yield
    except TorchDynamoException as error:
        reason = f"torch.compile can't: {type(error).__name__}"
        raise UnavailableError(reason) from error


class State(NamedTuple):
    """What an update changes."""

    weights: Weights
    first: Weights
    second: Weights


class CompiledLoop(Contestant):
    """Forward, backward and AdamW of an update in one graph; several if they are small.

    The micro-batches of an update are one pass. Networks with buffers, such as those of
    batch norm, are left out: what they change has no place in this.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if list(task.network.buffers()):
            raise UnavailableError("the network has buffers")
        weights = {
            name: parameter.detach().clone()
            for name, parameter in task.network.named_parameters()
        }
        self.state = State(
            weights,
            {name: torch.zeros_like(value) for name, value in weights.items()},
            {name: torch.zeros_like(value) for name, value in weights.items()},
        )
        is_small = sum(value.numel() for value in weights.values()) < _FEW_PARAMETERS
        self.updates = task.workload.device_iterations if is_small else 1
        self.steps = 0
        self._train = torch.compile(self._call, fullgraph=True, dynamic=False)
        self._look = torch.compile(self._totals, fullgraph=True, dynamic=False)
        self._scores = torch.compile(self._forward, fullgraph=True, dynamic=False)

    # In the graph ---------------------------------------------------------------------

    def _forward(self, weights: Weights, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.task.network, weights, (x,))

    def _loss(self, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self._forward(weights, x)
        return F.cross_entropy(scores, y), (scores.argmax(dim=1) == y).sum()

    def _totals(self, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, hits = self._loss(weights, x, y)
        return loss * len(x), hits

    def _call(
        self, state: State, x: Tensor, y: Tensor, corrections: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Several updates; the state changes in place."""
        losses, hits = [], []
        gradients_of = torch.func.grad_and_value(self._loss, has_aux=True)
        for part in range(self.updates):
            gradients, (loss, count) = gradients_of(state.weights, x[part], y[part])
            _update(state, gradients, corrections[part])
            losses.append(loss)
            hits.append(count)
        return torch.stack(losses).sum(), torch.stack(hits).sum()

    # On the host ----------------------------------------------------------------------

    def train(self, epochs: int) -> list[Figures]:
        """One permutation an epoch, and slices of it."""
        self.task.network.train()
        with _refusals():
            return [self._train_epoch() for _ in range(epochs)]

    def _train_epoch(self) -> Figures:
        x, y = self.task.train
        if self.task.shuffle:
            order = torch.randperm(len(x))
            x, y = x[order], y[order]
        size = self.task.workload.batch_size
        updates = len(x) // size
        x = x.reshape(-1, self.updates, size, *x.shape[1:])
        y = y.reshape(-1, self.updates, size)
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for inputs, targets in zip(x, y):
            loss, count = self._train(self.state, inputs, targets, self._corrections())
            total += loss
            hits += count
        return Figures(total.item() / updates, hits.item() / y.numel())

    def _corrections(self) -> Tensor:
        """Shrinkage, step size, and scale of the second moment, of the next updates."""
        rate = self.task.workload.learning_rate
        steps = range(self.steps + 1, self.steps + 1 + self.updates)
        self.steps += self.updates
        return torch.tensor(
            [
                [
                    1 - rate * _DECAY,
                    rate / (1 - _BETA1**step),
                    (1 - _BETA2**step) ** 0.5,
                ]
                for step in steps
            ]
        )

    @_refusals()
    @torch.inference_mode()
    def evaluate(self) -> Figures:
        """Batches ten times as large."""
        inputs, targets = self.task.test
        self.task.network.eval()
        size = LARGER * self.task.workload.micro_batch
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for x, y in zip(inputs.split(size), targets.split(size)):
            loss, count = self._look(self.state.weights, x, y)
            total += loss
            hits += count
        return Figures(total.item() / len(inputs), hits.item() / len(inputs))

    @_refusals()
    @torch.inference_mode()
    def predict(self) -> Tensor:
        """As `evaluate`."""
        self.task.network.eval()
        parts = self.task.test.x.split(LARGER * self.task.workload.micro_batch)
        return torch.cat([self._scores(self.state.weights, x) for x in parts])


def _update(state: State, gradients: Weights, corrections: Tensor) -> None:
    """AdamW (Loshchilov and Hutter, 2019), as torch's."""
    shrinkage, size, scale = corrections
    for name, weight in state.weights.items():
        gradient, first, second = gradients[name], state.first[name], state.second[name]
        first.lerp_(gradient, 1 - _BETA1)
        second.mul_(_BETA2).add_(gradient * gradient, alpha=1 - _BETA2)
        shrunk = weight * shrinkage
        weight.copy_(shrunk - size * first / (second.sqrt() / scale + _EPSILON))
