# SPDX-License-Identifier: Apache-2.0
"""skorch."""

from __future__ import annotations

from typing import Any

import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring
from torch import Tensor

from .base import Contestant, Figures, Task


class AccumulatingNet(NeuralNetClassifier):
    """Steps after several micro-batches; skorch's documentation has the idea."""

    accumulation = 1

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """A micro-batch; its gradients count as their share of the update's."""
        x, y = batch
        self._set_training(True)
        scores = self.infer(x, **fit_params)
        loss = self.get_loss(scores, y, X=x, training=True)
        (loss / self.accumulation).backward()
        return {"loss": loss, "y_pred": scores}

    def train_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """A micro-batch, and an update if it is the last of one."""
        step = self.train_step_single(batch, **fit_params)
        if len(self.history[-1, "batches"]) % self.accumulation == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class Skorch(Contestant):
    """`NeuralNetClassifier` without a validation split, `verbose=0`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        accumulation = task.workload.accumulation
        kind = NeuralNetClassifier if accumulation == 1 else AccumulatingNet
        accuracy = EpochScoring(
            "accuracy",
            name="train_acc",
            lower_is_better=False,
            on_train=True,
            use_caching=True,
        )
        self.net = kind(
            task.network,
            criterion=torch.nn.CrossEntropyLoss,
            optimizer=torch.optim.AdamW,
            lr=task.workload.learning_rate,
            batch_size=task.workload.micro_batch,
            iterator_train__shuffle=task.shuffle,
            train_split=None,
            callbacks=[("accuracy", accuracy)],
            verbose=0,
        )
        if accumulation > 1:
            self.net.accumulation = accumulation
        self.net.initialize()

    def train(self, epochs: int) -> list[Figures]:
        """`partial_fit`."""
        self.net.partial_fit(*self.task.train, epochs=epochs)
        history = self.net.history[-epochs:]
        return [Figures(epoch["train_loss"], epoch["train_acc"]) for epoch in history]

    def evaluate(self) -> Figures:
        """Its validation steps over the samples; it has no `evaluate`."""
        total, hits, count = 0.0, 0, 0
        samples = self.net.get_dataset(*self.task.test)
        for batch in self.net.get_iterator(samples, training=False):
            step = self.net.validation_step(batch)
            y = batch[1]
            total += step["loss"].item() * len(y)
            hits += (step["y_pred"].argmax(dim=1) == y).sum().item()
            count += len(y)
        return Figures(total / count, hits / count)

    def predict(self) -> Tensor:
        """`forward`, which gives the scores."""
        return self.net.forward(self.task.test.x)
