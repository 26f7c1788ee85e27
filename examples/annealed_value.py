# SPDX-License-Identifier: Apache-2.0
"""Change a number while a model trains: a 0-d buffer, not an attribute.

Shows an autoencoder that squeezes each digit into 32 bits. Bits have no gradient, so
it trains with sigmoids whose `sharpness` rises from 1 to 100, epoch by epoch. `forward`
runs once, when it is compiled: a number of Python is baked into the program, and
changing it during a run is an error, which is shown first. A 0-d buffer is sent to the
device with every call.

    python examples/annealed_value.py

Without IPUs it runs on ipufit's emulator, in some seconds. The last line says how much
of the images' variance the decoder explains if it gets real bits, of 0 and 1: about
70%; with a constant sharpness of 1 (`--last 1`) it is less than 0.
"""

from __future__ import annotations

import argparse
from typing import Any, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit


class BinaryAutoencoder(nn.Module):
    """Encode images as nearly binary codes, and decode them."""

    def __init__(self, bits: int = 32, *, as_buffer: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, bits))
        self.decoder = nn.Sequential(nn.Linear(bits, 96), nn.ReLU(), nn.Linear(96, 64))
        if as_buffer:
            self.register_buffer("sharpness", torch.tensor(1.0))
        else:
            self.sharpness = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Encode and decode images [N, 64]; returns images [N, 64]."""
        code = torch.sigmoid(self.encoder(x) * self.sharpness)
        if not self.training:
            code = code.round()
        return self.decoder(code)


class Annealing(ipufit.Callback):
    """Raises the sharpness from 1 to `last`, by the same factor each epoch."""

    def __init__(self, last: float, epochs: int) -> None:
        self.factor = last ** (1 / max(1, epochs - 1))
        self.values: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Set the value of this epoch."""
        module = self.model.module
        self.values.append(self.factor**epoch)
        if isinstance(module.sharpness, Tensor):
            module.sharpness.fill_(self.values[-1])
        else:
            module.sharpness = self.values[-1]


def plot(history: dict[str, list[float]], annealing: Annealing, path: str) -> None:
    """Draw the errors with soft and with real bits, and the sharpness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, 1 + len(annealing.values))
    left.semilogy(epochs, history["loss"], label="training, soft bits")
    left.semilogy(epochs, history["val_loss"], label="validation, real bits")
    left.set(xlabel="epoch", title="squared error")
    left.legend()
    right.semilogy(epochs, annealing.values)
    right.set(xlabel="epoch", title="sharpness, set by the callback")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train; returns the share of the variance that real bits explain."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="times through the data")
    parser.add_argument("--last", type=float, default=100.0, help="the last sharpness")
    parser.add_argument("--plot", metavar="FILE", help="draw the errors into this file")
    args = parser.parse_args(arguments)
    x = torch.from_numpy(load_digits().data).float() / 16
    run = {"batch_size": 50, "epochs": args.epochs, "verbose": 0}

    baked_in = ipufit.IPUModel(BinaryAutoencoder(as_buffer=False))
    baked_in.compile("adam", "mse")
    try:
        baked_in.fit(x[:1500], x[:1500], callbacks=Annealing(args.last, 40), **run)
    except ipufit.IpufitError as error:
        print(f"A number of Python: {error}\n")

    torch.manual_seed(0)
    model = ipufit.IPUModel(BinaryAutoencoder(), ipufit.IPUConfig(seed=0))
    model.compile("adam", "mse")
    annealing, test = Annealing(args.last, args.epochs), x[1500:]
    history = model.fit(
        *(x[:1500], x[:1500]),
        validation_data=(test, test),
        callbacks=annealing,
        **run,
    ).history
    if args.plot:
        plot(history, annealing, args.plot)
    explained = 1 - history["val_loss"][-1] / test.var(0, unbiased=False).mean().item()
    print(f"explained by 32 bits: {explained:.2%}")
    return explained


if __name__ == "__main__":
    main()
