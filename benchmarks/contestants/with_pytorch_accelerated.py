# SPDX-License-Identifier: Apache-2.0
"""pytorch-accelerated."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from torch.utils.data import TensorDataset

from .base import Contestant, Figures, Task

_IN_THIS_PROCESS = {"num_workers": 0}


class Accuracy(TrainerCallback):
    """Adds up hits, as its documentation suggests for metrics."""

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin anew."""
        self.hits = self.count = torch.tensor(0)

    def on_train_step_end(
        self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any
    ) -> None:
        """A batch of training."""
        y = batch[1]
        self.hits = self.hits + (batch_output["model_outputs"].argmax(1) == y).sum()
        self.count = self.count + len(y)

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Keep it."""
        trainer.run_history.update_metric("accuracy", (self.hits / self.count).item())

    on_eval_epoch_start = on_train_epoch_start
    on_eval_step_end = on_train_step_end
    on_eval_epoch_end = on_train_epoch_end


class PytorchAccelerated(Contestant):
    """`Trainer` without bar and messages; it has no predict."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.train_set, self.test_set = (
            TensorDataset(*task.train),
            TensorDataset(*task.test),
        )
        self.trainer = Trainer(
            task.network,
            torch.nn.CrossEntropyLoss(),
            task.adamw(),
            callbacks=[Accuracy],
        )

    def train(self, epochs: int) -> list[Figures]:
        """`train`, on with the same optimiser."""
        accumulation = self.task.workload.accumulation
        self.trainer.train(
            self.train_set,
            num_epochs=epochs,
            per_device_batch_size=self.task.workload.micro_batch,
            gradient_accumulation_steps=accumulation,
            train_dataloader_kwargs={**_IN_THIS_PROCESS, "shuffle": self.task.shuffle},
        )
        # It reports losses divided by the number of micro-batches.
        values = self.trainer.run_history.get_metric_values
        pairs = zip(values("train_loss_epoch"), values("accuracy"))
        return [Figures(loss * accumulation, accuracy) for loss, accuracy in pairs]

    def evaluate(self) -> Figures:
        """`evaluate`."""
        self.trainer.evaluate(
            self.test_set,
            per_device_batch_size=self.task.workload.micro_batch,
            dataloader_kwargs=_IN_THIS_PROCESS,
        )
        latest = self.trainer.run_history.get_latest_metric
        return Figures(latest("evaluation_loss"), latest("accuracy"))
