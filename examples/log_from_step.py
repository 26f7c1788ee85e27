# SPDX-License-Identifier: Apache-2.0
"""Report values from inside `forward` with `ipufit.log`.

Shows an autoencoder of digits whose loss has two parts. `forward` runs once, when it is
compiled, so a `print` in it would show nothing of the training. `ipufit.log` names a
value of the program instead: it is averaged over all samples of the epoch, is there
for validation too, and costs one number per call.

    python examples/log_from_step.py
    python examples/log_from_step.py --sparsity 1

Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the share
of the hidden units that a validation image switches on: about 18%; without the
second part of the loss (`--sparsity 0`) it is 79%.
"""

from __future__ import annotations

import argparse
from typing import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit


class SparseAutoencoder(nn.Module):
    """Encodes images in hidden units of which few should be active."""

    def __init__(self, pixels: int, hidden: int, sparsity: float) -> None:
        super().__init__()
        self.encoder = nn.Linear(pixels, hidden)
        self.decoder = nn.Linear(hidden, pixels)
        self.sparsity = sparsity

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the loss of images [N, 64], and the decoded images [N, 64]."""
        code = self.encoder(x).relu()
        decoded = self.decoder(code)
        error = nn.functional.mse_loss(decoded, x)
        penalty = self.sparsity * code.mean()
        ipufit.log("error", error)
        ipufit.log("penalty", penalty)
        ipufit.log("active", (code > 0).float().mean())
        return {"loss": error + penalty, "decoded": decoded}


def plot(history: ipufit.History, path: str) -> None:
    """Draw the parts of the loss, and the share of active units."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, 1 + len(history.epoch))
    for name in ("loss", "error", "penalty"):
        left.plot(epochs, history.history[name], label=name)
    left.set(xlabel="epoch", title="loss and its logged parts")
    left.legend()
    right.plot(epochs, history.history["active"], label="training")
    right.plot(epochs, history.history["val_active"], "--", label="validation")
    right.set(xlabel="epoch", title="share of active hidden units", ylim=(0, None))
    right.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the share of hidden units that are active in validation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="times through the data")
    parser.add_argument(
        "--sparsity", type=float, default=0.3, help="weight of the part"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the values into this file")
    args = parser.parse_args(arguments)

    images = torch.from_numpy(load_digits().data).float() / 16
    torch.manual_seed(0)
    network = SparseAutoencoder(64, 64, args.sparsity)
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile("adam")  # the module computes its own loss
    history = model.fit(
        images[:1500],
        validation_data=images[1500:],
        batch_size=50,
        epochs=args.epochs,
        verbose=0,
    )
    for name in ("loss", "error", "penalty", "active"):
        print(f"{name:8}", *(f"{value:.4f}" for value in history.history[name][::5]))
    if args.plot:
        plot(history, args.plot)
    active = history.history["val_active"][-1]
    print(f"active hidden units: {active:.2%}")
    return active


if __name__ == "__main__":
    main()
