# SPDX-License-Identifier: Apache-2.0
"""LightningModules of the tests, with Lightning's base class or without."""

from importlib.util import find_spec

import torch
from torch.nn import functional as F  # noqa: N812 - as everyone calls it

X = torch.rand(64, 6, generator=torch.Generator().manual_seed(5))
Y = (X.sum(dim=1) * 2).long() % 3


def has(name):
    """Whether a package is installed."""
    return find_spec(name) is not None


class Steps:
    """What a LightningModule is made of; the base class follows in each test."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )

    def forward(self, x):
        return self.layers(x)

    def _measured(self, batch):
        x, y = batch
        logits = self(x)
        hits = (logits.argmax(dim=1) == y).float().mean()
        return F.cross_entropy(logits, y), hits

    def training_step(self, batch, batch_idx):
        loss, hits = self._measured(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        self.log("train_acc", hits, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, hits = self._measured(batch)
        self.log_dict({"val_loss": loss, "val_acc": hits}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, hits = self._measured(batch)
        self.log_dict({"test_loss": loss, "test_acc": hits})

    def predict_step(self, batch, batch_idx):
        return self(batch).softmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Net(Steps, torch.nn.Module):
    """The steps, as a plain module."""
