# SPDX-License-Identifier: Apache-2.0
"""poutyne."""

from __future__ import annotations

import poutyne
from torch import Tensor

from .base import Contestant, Figures, Task

_PERCENT = 100.0


class Poutyne(Contestant):
    """`Model.fit` with tensors, `verbose=False`."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model = poutyne.Model(
            task.network,
            task.adamw(),
            "cross_entropy",
            batch_metrics=["accuracy"],
        )
        self.epochs = 0

    def train(self, epochs: int) -> list[Figures]:
        """`fit`; epochs count from 1."""
        logs = self.model.fit(
            *self.task.train,
            batch_size=self.task.workload.micro_batch,
            batches_per_step=self.task.workload.accumulation,
            dataloader_kwargs={"shuffle": self.task.shuffle},
            initial_epoch=self.epochs + 1,
            epochs=self.epochs + epochs,
            verbose=False,
        )
        self.epochs += epochs
        return [Figures(epoch["loss"], epoch["acc"] / _PERCENT) for epoch in logs]

    def evaluate(self) -> Figures:
        """`evaluate`."""
        size = self.task.workload.micro_batch
        loss, accuracy = self.model.evaluate(
            *self.task.test, batch_size=size, verbose=False
        )
        return Figures(float(loss), float(accuracy) / _PERCENT)

    def predict(self) -> Tensor:
        """`predict`."""
        size = self.task.workload.micro_batch
        return self.model.predict(
            self.task.test.x, batch_size=size, verbose=False, convert_to_numpy=False
        )
