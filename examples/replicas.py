# SPDX-License-Identifier: Apache-2.0
"""One batch size, however many IPUs: replicas and gradient accumulation.

Shows that `batch_size` is the number of samples of one weight update. ipufit divides it
by the replicas, which compute at the same time, and by the gradient accumulation, the
micro-batches that each of them computes one after the other. So a model that was tuned
on one IPU trains the same curve on eight.

    python examples/replicas.py

It takes a few seconds. The last line says how many of the layouts have the losses of a
single IPU, to within 0.0001, since sums are rounded in another order: 4 of 4.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

BATCH_SIZE = 64
LAYOUTS = [(1, 1), (1, 8), (8, 1), (4, 4)]  # replicas, gradient accumulation
SAME_LOSS = 1e-4


def train(replicas: int, gradient_accumulation: int, epochs: int) -> list[float]:
    """Train in a layout; returns the loss of each epoch."""
    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    config = ipufit.IPUConfig(
        replicas=replicas, gradient_accumulation=gradient_accumulation, seed=0
    )
    model = ipufit.IPUModel(network, config)
    model.compile(ipufit.Optimizer("sgd", 0.1, momentum=0.9), "cross_entropy")
    data = (x[:1792] / 16).float(), y[:1792]  # 28 batches
    history = model.fit(*data, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    return history.history["loss"]


def name(replicas: int, gradient_accumulation: int) -> str:
    """Return a layout as its arguments."""
    return f"replicas={replicas}, gradient_accumulation={gradient_accumulation}"


def plot(curves: dict[tuple[int, int], list[float]], path: str) -> None:
    """Draw the losses of all layouts, later ones inside of earlier ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for number, (layout, losses) in enumerate(curves.items()):
        width = 2 * (len(curves) - number)
        epochs = range(1, 1 + len(losses))
        axes.plot(epochs, losses, linewidth=width, label=name(*layout))
    axes.set(xlabel="epoch", ylabel="loss", title=f"batch_size={BATCH_SIZE}")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train in each layout; returns the number of those with the same losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="in each layout")
    parser.add_argument("--plot", metavar="PATH", help="draw the losses into this file")
    args = parser.parse_args(arguments)

    curves = {layout: train(*layout, args.epochs) for layout in LAYOUTS}
    single = curves[LAYOUTS[0]]
    equal = 0
    for layout, losses in curves.items():
        difference = max(abs(a - b) for a, b in zip(losses, single))
        equal += difference <= SAME_LOSS
        print(f"{name(*layout)}: loss {losses[-1]:.6f}, differs by {difference:.1e}")
    if args.plot:
        plot(curves, args.plot)
    print(f"equal curves: {equal} of {len(curves)}")
    return float(equal)


if __name__ == "__main__":
    main()
