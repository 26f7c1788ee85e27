# SPDX-License-Identifier: Apache-2.0
"""How fast a loop can be that somebody tunes for one network."""

from __future__ import annotations

from typing import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from benchmarks.datasets import Samples

from .base import Contestant, Figures, Task, UnavailableError

LARGER = 10  # batches to look at, where nobody says how large they must be


class TunedLoop(Contestant):
    """One permutation an epoch, slices of it, one read of the sums at its end.

    Images are channels_last, the optimiser is fused, the micro-batches of an update are
    one pass, and batches that are only looked at are ten times as large. Batch norm
    mixes the samples of a pass: with it, passes that train stay as they are.
    """

    def __init__(self, task: Task) -> None:
        if task.train.x.dim() == 4:
            task.network.to(memory_format=torch.channels_last)
            task = Task(
                task.workload,
                task.network,
                _channels_last(task.train),
                _channels_last(task.test),
                task.shuffle,
            )
        super().__init__(task)
        try:
            self.optimizer = task.adamw(fused=True)
        except RuntimeError as error:  # torch before 2.4
            raise UnavailableError(str(error)) from error
        norms = nn.modules.batchnorm._BatchNorm
        mixes = any(isinstance(one, norms) for one in task.network.modules())
        self.accumulation = task.workload.accumulation if mixes else 1
        self.train_size = task.workload.batch_size // self.accumulation
        self.test_size = LARGER * task.workload.micro_batch

    def epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, shuffled if asked for."""
        x, y = self.task.train
        if self.task.shuffle:
            order = torch.randperm(len(x))
            x, y = x[order], y[order]
        return zip(x.split(self.train_size), y.split(self.train_size))

    def train(self, epochs: int) -> list[Figures]:
        """Eager."""
        return [self._train_epoch() for _ in range(epochs)]

    def _train_epoch(self) -> Figures:
        network, optimizer = self.task.network.train(), self.optimizer
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for number, (x, y) in enumerate(self.epoch(), start=1):
            scores = network(x)
            loss = F.cross_entropy(scores, y)
            (loss / self.accumulation).backward()
            if number % self.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
            hits += (scores.argmax(dim=1) == y).sum()
        return Figures(total.item() / number, hits.item() / len(self.task.train.x))

    @torch.inference_mode()
    def evaluate(self) -> Figures:
        """Eager."""
        network, (inputs, targets) = self.task.network.eval(), self.task.test
        total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        size = self.test_size
        for x, y in zip(inputs.split(size), targets.split(size)):
            scores = network(x)
            total += F.cross_entropy(scores, y, reduction="sum")
            hits += (scores.argmax(dim=1) == y).sum()
        return Figures(total.item() / len(inputs), hits.item() / len(inputs))

    @torch.inference_mode()
    def predict(self) -> Tensor:
        """Eager."""
        network = self.task.network.eval()
        return torch.cat([network(x) for x in self.task.test.x.split(self.test_size)])


def _channels_last(samples: Samples) -> Samples:
    return Samples(samples.x.to(memory_format=torch.channels_last), samples.y)
