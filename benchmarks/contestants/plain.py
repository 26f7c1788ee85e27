# SPDX-License-Identifier: Apache-2.0
"""The loop that everybody writes, and that all others are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .base import Contestant, Figures, Task


class PlainLoop(Contestant):
    """DataLoader, zero_grad, backward, step; `.item()` of loss and hits each batch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        size = task.workload.micro_batch
        train, test = TensorDataset(*task.train), TensorDataset(*task.test)
        self.loader = DataLoader(train, batch_size=size, shuffle=task.shuffle)
        self.test_loader = DataLoader(test, batch_size=size)
        self.inputs = DataLoader(TensorDataset(task.test.x), batch_size=size)
        self.optimizer = task.adamw()

    def train(self, epochs: int) -> list[Figures]:
        """Accumulates gradients over the micro-batches of an update."""
        return [self._train_epoch() for _ in range(epochs)]

    def _train_epoch(self) -> Figures:
        network, optimizer = self.task.network.train(), self.optimizer
        accumulation = self.task.workload.accumulation
        total, hits, count = 0.0, 0, 0
        for number, (x, y) in enumerate(self.loader, start=1):
            scores = network(x)
            loss = F.cross_entropy(scores, y)
            if accumulation == 1:
                loss.backward()
            else:
                (loss / accumulation).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() * len(x)
            hits += (scores.argmax(dim=1) == y).sum().item()
            count += len(x)
        return Figures(total / count, hits / count)

    @torch.no_grad()
    def evaluate(self) -> Figures:
        """Batch by batch, as in training."""
        network = self.task.network.eval()
        total, hits, count = 0.0, 0, 0
        for x, y in self.test_loader:
            scores = network(x)
            total += F.cross_entropy(scores, y).item() * len(x)
            hits += (scores.argmax(dim=1) == y).sum().item()
            count += len(x)
        return Figures(total / count, hits / count)

    @torch.no_grad()
    def predict(self) -> Tensor:
        """Batch by batch, joined at the end."""
        network = self.task.network.eval()
        return torch.cat([network(x) for (x,) in self.inputs])
