# SPDX-License-Identifier: Apache-2.0
"""What a contestant gets, and what it must do."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.datasets import Samples
from benchmarks.workloads import Workload


class Figures(NamedTuple):
    """Means over all samples."""

    loss: float
    accuracy: float


class UnavailableError(Exception):
    """A contestant can't run here, and why."""


@dataclass(frozen=True)
class Task:
    """What is to be done, the same for all.

    Attributes:
        workload: Batch sizes and the like.
        network: The module; its weights are the same for all.
        train: Samples to train on.
        test: Samples to evaluate and predict.
        shuffle: Draw a new order every epoch; otherwise in the order given.
    """

    workload: Workload
    network: nn.Module
    train: Samples
    test: Samples
    shuffle: bool

    def adamw(self, **more: Any) -> torch.optim.AdamW:
        """The optimiser, torch's own."""
        rate = self.workload.learning_rate
        return torch.optim.AdamW(self.network.parameters(), lr=rate, **more)


class Contestant(abc.ABC):
    """A way to train, evaluate and predict.

    Args:
        task: What is to be done.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    @abc.abstractmethod
    def train(self, epochs: int) -> list[Figures]:
        """Train on, and say what came of each epoch: over all its samples."""

    @abc.abstractmethod
    def evaluate(self) -> Figures:
        """Loss and accuracy over all test samples."""

    def predict(self) -> Tensor:
        """The scores of all test samples, in order."""
        raise UnavailableError("it has no predict")
