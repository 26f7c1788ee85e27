# SPDX-License-Identifier: Apache-2.0
"""The first twenty lines: a network, and its `compile`, `fit`, `evaluate`, `predict`.

Shows all that a model of your own needs. The network learns which of three rings a
point of the plane lies in. It needs nothing but torch and ipufit.

    python examples/first_steps.py

It takes a few seconds. The last line is the accuracy on new points: about 97%.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ipufit


def sample(count: int) -> tuple[Tensor, Tensor]:
    """Draw points `[N, 2]`, and their rings `[N]`: 0 within 0.8, 2 beyond 1.5."""
    points = torch.randn(count, 2)
    return points, torch.bucketize(points.norm(dim=1), torch.tensor([0.8, 1.5]))


def main(arguments: list[str] | None = None) -> float:
    """Train, evaluate, predict; returns the accuracy on new points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH", help="draw the rings into this file")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    x, y = sample(4000)
    test_x, test_y = sample(1000)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))

    config = ipufit.IPUConfig(device_iterations=5, seed=0)
    model = ipufit.IPUModel(network, config)
    model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=40, epochs=10)
    results = model.evaluate(test_x, test_y)
    scores = model.predict(test_x)  # [1000, 3]: a row for each point, in order

    print(f"the first points are in rings {scores[:5].argmax(dim=1).tolist()}")
    if args.plot:
        plot(history, test_x, scores.argmax(dim=1), args.plot)
    print(f"test accuracy: {results['accuracy']:.2%}")
    return results["accuracy"]


def plot(history: ipufit.History, points: Tensor, rings: Tensor, path: str) -> None:
    """Draw the accuracies, and points in the colours of their predicted rings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, 1 + len(history.epoch)), history.history["accuracy"])
    left.set(xlabel="epoch", ylabel="accuracy")
    right.scatter(*points.T.numpy(), c=rings.numpy(), s=4)
    right.set(title="rings that were found", aspect="equal")
    figure.savefig(path)


if __name__ == "__main__":
    main()
