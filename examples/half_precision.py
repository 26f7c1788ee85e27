# SPDX-License-Identifier: Apache-2.0
"""Train in float16, and keep small gradients from vanishing by loss scaling.

Shows `IPUConfig(precision="16.16")` with and without loss scaling, beside float32. An
autoencoder of digits is trained by a loss with a weight of 0.0001, as if it were a
small part of a large objective. Many of its gradients are below 6e-8, the smallest
number that float16 has, and become 0. Multiplied by 1024 until the update they are
large enough.

    python examples/half_precision.py

It takes some seconds. The last line says how much of the error that float16 adds is
gone with loss scaling: nearly 100%.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

RUNS = {  # precision, loss scaling
    "float32": ("32.32", 1.0),
    "float16": ("16.16", 1.0),
    "float16, loss scaling": ("16.16", 1024.0),
}


def train(precision: str, loss_scaling: float, epochs: int) -> list[float]:
    """Train an autoencoder; returns the mean squared error of each epoch."""
    torch.manual_seed(0)
    x = torch.from_numpy(load_digits().data[:1792] / 16).float()
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    config = ipufit.IPUConfig(precision=precision, device_iterations=7, seed=0)
    model = ipufit.IPUModel(network, config)
    model.compile(
        ipufit.Optimizer("adamw", 2e-3, loss_scaling=loss_scaling),
        loss="mse",
        loss_weights=1e-4,
        metrics=["mse"],  # without the weight
    )
    history = model.fit(x, x, batch_size=64, epochs=epochs, verbose=0)
    kinds = {str(weight.dtype) for weight in model.module.parameters()}
    print(f"weights are {', '.join(kinds)}, loss scaling {loss_scaling:g}: ", end="")
    print(f"error {history.history['mse'][-1]:.5f}")
    return history.history["mse"]


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draw the errors of all runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for (name, errors), style in zip(curves.items(), ("C0", "C3", "C1--")):
        axes.plot(range(1, 1 + len(errors)), errors, style, label=name)
    axes.set(xlabel="epoch", ylabel="mean squared error", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train three times; returns the share of float16's own error that is gone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="of each run")
    parser.add_argument("--plot", metavar="PATH", help="draw the errors into this file")
    args = parser.parse_args(arguments)

    curves = {name: train(*run, args.epochs) for name, run in RUNS.items()}
    if args.plot:
        plot(curves, args.plot)
    wide, half, scaled = (errors[-1] for errors in curves.values())
    share = (half - scaled) / (half - wide)
    print(f"error of float16 that loss scaling removes: {share:.1%}")
    return share


if __name__ == "__main__":
    main()
