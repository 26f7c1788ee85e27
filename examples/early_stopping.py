# SPDX-License-Identifier: Apache-2.0
"""Stop a run that overfits, keep its best weights in a file, and go on from one.

Shows two callbacks at work on a network that is too large for its 200 images.
`EarlyStopping` ends the run when the validation loss hasn't improved for five epochs,
and puts the weights of the best epoch back. `ModelCheckpoint` has written the whole
state of that epoch, from which another model goes on: `fit(resume=...)`.

    python examples/early_stopping.py

Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the
accuracy of a new model with the saved weights, on images that no run has seen: about
72%, the same as that of the model that was stopped.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit


def make_model() -> ipufit.IPUModel:
    """Make a model with random weights."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(256, 10))
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    return model


def make_callbacks(path: str, patience: int) -> list[ipufit.Callback]:
    """Stop when the validation loss gets worse, and save whenever it is the best."""
    return [
        ipufit.EarlyStopping("val_loss", patience=patience, restore_best_weights=True),
        ipufit.ModelCheckpoint(path, "val_loss", save_best_only=True),
    ]


def digits(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Return parts of scikit-learn's digits, with noise to make overfitting easy."""
    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    x = x + 0.25 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [(x[a:b], y[a:b]) for a, b in zip(bounds, bounds[1:])]


def plot(history: ipufit.History, best_epoch: int, path: str) -> None:
    """Draw both losses and the epoch whose weights were kept."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    epochs = range(1, 1 + len(history.epoch))
    axes.plot(epochs, history.history["loss"], label="training")
    axes.plot(epochs, history.history["val_loss"], label="validation")
    axes.axvline(best_epoch + 1, color="gray", linestyle=":", label="weights put back")
    axes.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Stop, save, load; returns the accuracy on unseen images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100, help="at most so many")
    parser.add_argument("--patience", type=int, default=5, help="epochs to wait")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into this file")
    args = parser.parse_args(arguments)
    (x, y), validation, unseen = digits(200, 500, 1000)
    run = {"batch_size": 20, "validation_data": validation, "verbose": 0}

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        best, weights = str(Path(folder, "best")), str(Path(folder, "w.safetensors"))
        model, callbacks = make_model(), make_callbacks(best, args.patience)
        history = model.fit(x, y, epochs=args.epochs, callbacks=callbacks, **run)
        model.save_weights(weights)
        best_epoch = callbacks[0].best_epoch
        print(f"{len(history.epoch)} epochs; weights of epoch {best_epoch + 1} kept")
        accuracy = model.evaluate(*unseen, batch_size=20, verbose=0)["accuracy"]
        print(f"accuracy of the stopped model: {accuracy:.2%}")

        other, callbacks = make_model(), make_callbacks(best, args.patience)
        again = other.fit(
            x, y, epochs=args.epochs, callbacks=callbacks, resume=best, **run
        )
        is_equal = again.history == history.history
        print(f"going on from epoch {best_epoch + 1} gives the same losses: {is_equal}")

        third = make_model()
        third.load_weights(weights)
        accuracy = third.evaluate(*unseen, batch_size=20, verbose=0)["accuracy"]
    if args.plot:
        plot(history, best_epoch, args.plot)
    print(f"accuracy of the reloaded model: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
