# SPDX-License-Identifier: Apache-2.0
"""Lightning with all that can be switched off switched off."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .base import Contestant, Figures, Task


class Classifier(lightning.LightningModule):
    """Logs loss and accuracy as means over the epoch."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network = task.network
        self.figures: list[Figures] = []
        self.adamw = task.adamw()

    def training_step(self, batch: Any, index: int) -> Tensor:
        """A micro-batch."""
        return self._loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        """A batch of the test samples."""
        self._loss(batch)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        """The scores."""
        return self.network(batch[0])

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        scores = self.network(x)
        loss = F.cross_entropy(scores, y)
        hits = (scores.argmax(dim=1) == y).float().mean()
        values = {"loss": loss, "accuracy": hits}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=len(x))
        return loss

    def on_train_epoch_end(self) -> None:
        """Keep the figures."""
        logged = self.trainer.callback_metrics
        figures = Figures(logged["loss"].item(), logged["accuracy"].item())
        self.figures.append(figures)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same for every `fit`, so that the next goes on with its state."""
        return self.adamw


class Lightning(Contestant):
    """Nothing but the loop; `barebones` would forbid logging the figures."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        warnings.filterwarnings("ignore")  # advice about workers and devices
        size = task.workload.micro_batch
        train, test = TensorDataset(*task.train), TensorDataset(*task.test)
        self.loader = DataLoader(train, batch_size=size, shuffle=task.shuffle)
        self.test_loader = DataLoader(test, batch_size=size)
        self.inputs = DataLoader(TensorDataset(task.test.x), batch_size=size)
        self.module = Classifier(task)
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=0,
            accumulate_grad_batches=task.workload.accumulation,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def train(self, epochs: int) -> list[Figures]:
        """`fit`, on from where it was."""
        self.module.figures.clear()
        self.trainer.fit_loop.max_epochs += epochs
        self.trainer.fit(self.module, self.loader)
        return list(self.module.figures)

    def evaluate(self) -> Figures:
        """`validate`."""
        (logged,) = self.trainer.validate(self.module, self.test_loader, verbose=False)
        return Figures(logged["loss"], logged["accuracy"])

    def predict(self) -> Tensor:
        """`predict`, which gives a list."""
        return torch.cat(self.trainer.predict(self.module, self.inputs))
