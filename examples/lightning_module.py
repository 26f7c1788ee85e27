# SPDX-License-Identifier: Apache-2.0
"""Train a LightningModule on IPUs, with or without Lightning.

Shows `from_lightning`. The module stays as its Trainer had it: `training_step`,
`validation_step`, `configure_optimizers` with a scheduler, and `self.log`. `fit` takes
its loaders' datasets, and ipufit's callbacks monitor what the steps log. Where
Lightning isn't installed the class is a torch module with the same methods.

    python examples/lightning_module.py

Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the
accuracy that `validation_step` has logged in the last epoch: about 91%.
"""

from __future__ import annotations

import argparse
from typing import Any, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.integrations.lightning import from_lightning

try:
    from lightning.pytorch import LightningModule
except ImportError:
    LightningModule = nn.Module


class Classifier(LightningModule):
    """Classifies digits, as it would be written for Lightning."""

    def __init__(self, width: int = 128, rate: float = 3e-3) -> None:
        super().__init__()
        self.rate = rate
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [N, 10] of images [N, 64]."""
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy of a batch, which Lightning averages over an epoch."""
        x, y = batch
        scores = self(x)
        self.log("val_loss", nn.functional.cross_entropy(scores, y))
        accuracy = (scores.argmax(dim=1) == y).float().mean()
        self.log("val_acc", accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW, with a rate that is halved every five epochs."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)]


def plot(history: dict[str, list[float]], path: str) -> None:
    """Draw what the steps have logged."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, 1 + len(history["loss"]))
    left.plot(epochs, history["train_loss"], label="train_loss")
    left.plot(epochs, history["val_loss"], label="val_loss")
    left.set(xlabel="epoch", ylim=(0, None), title="losses that the steps have logged")
    left.legend()
    right.plot(epochs, history["val_acc"], label="val_acc")
    right.set(xlabel="epoch", ylim=(0, 1), title="accuracy")
    right.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the accuracy that was logged in the last validation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="times through the data")
    parser.add_argument("--plot", metavar="FILE", help="draw what the steps logged")
    args = parser.parse_args(arguments)
    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    train, test = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])

    torch.manual_seed(0)
    model = from_lightning(Classifier(), ipufit.IPUConfig(seed=0))
    history = model.fit(
        DataLoader(train, batch_size=50, shuffle=True),
        validation_data=DataLoader(test, batch_size=50),
        epochs=args.epochs,
        callbacks=ipufit.EarlyStopping("val_loss", patience=5),
        verbose=2,
    ).history
    if args.plot:
        plot(history, args.plot)
    accuracy = history["val_acc"][-1]
    print(f"validation accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
