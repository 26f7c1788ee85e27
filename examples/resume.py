# SPDX-License-Identifier: Apache-2.0
"""A run that fails in the middle of an epoch goes on as if nothing had happened.

Shows `BackupAndRestore`. It saves every five updates, a callback fails at update 68,
and the same call, made again, goes on at 65.

    python examples/resume.py

It takes some seconds. The last line is the share of weights that are those of a run
without failure, bit for bit, with dropout, shuffling and a schedule: 100.00%.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit


class FailAt(ipufit.Callback):
    """Raises an error at an update, as if the run had been interrupted."""

    def __init__(self, update: int | None) -> None:
        self.update = update
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Keep the mean loss of the epoch so far, and fail once it is time."""
        self.losses[self.run.updates] = logs["loss"]
        if self.run.updates == self.update:
            raise RuntimeError(f"failed at update {self.update}")


def fit(backup_dir: str, failing: FailAt) -> torch.Tensor:
    """Train from the beginning or the backup; returns all weights in one tensor."""
    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)]
    model = ipufit.IPUModel(nn.Sequential(*layers), ipufit.IPUConfig(seed=1))
    model.compile("adamw", "cross_entropy", lr_schedule="cosine")
    backup = ipufit.BackupAndRestore(backup_dir, save_freq=5)
    callbacks = [failing, backup]
    data = (x[:1760] / 16).float(), y[:1760]
    model.fit(*data, batch_size=32, epochs=3, callbacks=callbacks, verbose=2)
    return torch.cat([torch.from_numpy(w).flatten() for w in model.get_weights()])


def plot(runs: dict[str, FailAt], path: str) -> None:
    """Draw the loss of each run after each update."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for width, (label, run) in zip((7, 4, 1.5), runs.items()):
        axes.plot(*zip(*run.losses.items()), linewidth=width, label=label)
    axes.set(xlabel="update", ylabel="mean loss of the epoch so far")
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Compare; returns the share of weights that are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into this file")
    args = parser.parse_args(arguments)
    whole, failing, resumed = FailAt(None), FailAt(68), FailAt(None)
    with tempfile.TemporaryDirectory() as folder:
        expected = fit(f"{folder}/never-needed", whole)
        try:
            fit(f"{folder}/backup", failing)
        except RuntimeError as error:
            print(f"The run {error}, and begins again.")
        share = (fit(f"{folder}/backup", resumed) == expected).float().mean().item()
    if args.plot:
        runs = {"without failure": whole, "fails": failing, "goes on": resumed}
        plot(runs, args.plot)
    print(f"equal weights: {share:.2%}")
    return share


if __name__ == "__main__":
    main()
