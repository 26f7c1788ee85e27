# SPDX-License-Identifier: Apache-2.0
"""A script for PopTorch, without a word of ipufit, runs where no IPU is.

Shows the emulator by itself. The script imports `poptorch`, and does by hand what such
scripts do: two options, a loss in the module, two loaders, a training and an inference
model, and labels cut to the outputs. On a pod `python` runs it; anywhere else

    python -m ipufit.emulator examples/poptorch_script.py
    python -m ipufit.emulator --ipus 1 examples/poptorch_script.py

The second line gives it a single IPU. It asks for two replicas, so it fails as it would
on a pod: a script that is wrong in its use of IPUs is found out before it gets there.
The last line is the accuracy on the test images, after some seconds: about 90%.
"""

from __future__ import annotations

import argparse
from typing import Sequence

import poptorch  # noqa: TID251 - as scripts without ipufit do
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class WithLoss(nn.Module):
    """A network that computes its loss, too, as PopTorch wants it for training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return scores [N, 10] of images [N, 64], and the loss if there are labels."""
        scores = self.layers(x)
        return (scores,) if y is None else (scores, self.loss(scores, y))


def plot(losses: list[float], path: str) -> None:
    """Draw the loss of each call."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, 1 + len(losses)), losses)
    axes.set(xlabel="call of trainingModel(...)", ylabel="loss", ylim=(0, None))
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train and test; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="times through the data")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses into this file")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    train, test = TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:], y[1536:])

    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(4)
    options.replicationFactor(2)
    options.randomSeed(0)
    options.outputMode(poptorch.OutputMode.All)
    loader = poptorch.DataLoader(options, train, batch_size=16, shuffle=True)

    network = WithLoss()
    optimizer = poptorch.optim.Adam(network.parameters(), lr=2e-3)
    network.train()
    training = poptorch.trainingModel(network, options, optimizer)
    losses = []
    for _ in range(args.epochs):
        for images, labels in loader:
            _, loss = training(images, labels)
            losses.append(loss.mean().item())
    print(f"{len(losses)} calls, {len(loader)} an epoch; last loss {losses[-1]:.4f}")
    training.detachFromDevice()

    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(9)
    loader = poptorch.DataLoader(options, test, batch_size=29)  # 261: one call
    network.eval()
    inference = poptorch.inferenceModel(network, options)
    right = 0
    for images, labels in loader:
        (scores,) = inference(images)
        right += (scores.argmax(dim=1) == labels).sum().item()
    inference.detachFromDevice()
    if args.plot:
        plot(losses, args.plot)
    accuracy = right / len(test)
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
