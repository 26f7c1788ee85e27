# SPDX-License-Identifier: Apache-2.0
"""Train a GAN: two networks against each other, in a training step of your own.

Shows `training_step` and `predict_step`, which say what happens to a batch where one
network and one loss aren't enough. A program on IPUs has one optimizer, so there can't
be one for each network. One is enough: the discriminator makes the loss smaller, and
the generator makes it larger, because the gradient that it gets is reversed.

    python examples/gan.py

Without IPUs it runs on ipufit's emulator, in ten seconds or so. The data are points on
a ring. The last line is the share of generated points near it (within 0.15 of a radius
of 1): about 98%, where the untrained generator has less than 1%.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import ipufit

NOISE = 8  # numbers that a point is generated from


def layers(inputs: int, outputs: int, activation: nn.Module) -> nn.Sequential:
    """Make a network of three linear layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, 64), activation, nn.Linear(64, 64), activation),
        nn.Linear(64, outputs),
    )


class Pair(nn.Module):
    """Both networks, as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = layers(NOISE, 2, nn.ReLU())
        self.discriminator = layers(2, 1, nn.LeakyReLU(0.2))


class GAN(ipufit.IPUModel):
    """A pair that is trained on points, and generates points from noise."""

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the loss for points [N, 2], and values to report."""
        noise = torch.randn(batch.shape[0], NOISE, device=batch.device)
        points = self.module.generator(noise)
        reversed_ = 2 * points.detach() - points  # the same points, the gradient * -1
        real = self.module.discriminator(batch)
        fake = self.module.discriminator(reversed_)
        return {
            "loss": softplus(-real).mean() + softplus(fake).mean(),
            "real_score": real.sigmoid().mean(),
            "fake_score": fake.sigmoid().mean(),
        }

    def predict_step(self, inputs: Tensor) -> Tensor:
        """Generate points [N, 2] from noise [N, 8]."""
        return self.module.generator(inputs)


def ring(count: int) -> Tensor:
    """Draw points [N, 2] on a ring of radius 1, with a little noise."""
    angle, radius = 2 * math.pi * torch.rand(count), 1 + 0.05 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def plot(real: Tensor, fake: Tensor, history: dict[str, Any], path: str) -> None:
    """Draw both kinds of points, and what the discriminator thinks of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*real[:500].T.numpy(), ".", markersize=3, label="real")
    left.plot(*fake[:500].T.numpy(), ".", markersize=3, label="generated")
    left.set(aspect="equal", title="points")
    left.legend(loc="center")
    epochs = range(1, 1 + len(history["loss"]))
    right.plot(epochs, history["real_score"], label="of real points")
    right.plot(epochs, history["fake_score"], label="of generated points")
    right.set(xlabel="epoch", ylim=(0, 1), title="mean score of the discriminator")
    right.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, generate; returns the share of generated points near the ring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20, help="times through the data")
    parser.add_argument("--plot", metavar="FILE", help="draw the points into this file")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    points = ring(12_800)
    model = GAN(Pair(), ipufit.IPUConfig(device_iterations=10, seed=0))
    model.compile(ipufit.Optimizer("adam", 2e-3, betas=(0.0, 0.9)))
    history = model.fit(points, batch_size=128, epochs=args.epochs, verbose=2).history
    generated = model.predict(torch.randn(2000, NOISE), batch_size=100)
    if args.plot:
        plot(points, generated, history, args.plot)
    near = ((generated.norm(dim=1) - 1).abs() < 0.15).float().mean().item()
    print(f"generated points near the ring: {near:.2%}")
    return near


if __name__ == "__main__":
    main()
