# SPDX-License-Identifier: Apache-2.0
"""See why a deep network doesn't learn: watch the gradients of its layers.

Shows `GradientMonitor`, which logs the norm of each layer's gradient, and a callback
that takes the gradients themselves, to count them in a histogram. They leave the device
through PopTorch's anchored tensors. Six layers with sigmoids hardly learn, because the
first layer gets almost no gradient; with ReLU it gets as much as the last one.

    python examples/observing.py

Without IPUs it runs on ipufit's emulator, in some seconds. The last line says by how
many orders of magnitude the gradient of the first layer is smaller than that of the
last one, with sigmoids: about 4.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit

LAYERS = 6


class LastGradients(ipufit.Callback):
    """Keeps the gradients of the last call of an epoch, as tensors."""

    reads_batch_logs = False

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Take them; by name of the parameter, as means over the call."""
        self.gradients = self.model.gradients()


def network_of(activation: type[nn.Module]) -> nn.Sequential:
    """Make a network whose linear layers are named "0", "2", "4" and so on."""
    torch.manual_seed(0)
    widths = [64] + [32] * (LAYERS - 1) + [10]
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def watch(activation: type[nn.Module], epochs: int) -> tuple[list[float], Tensor]:
    """Train; returns the gradient norm of each layer, and the first gradient itself."""
    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    model = ipufit.IPUModel(network_of(activation), ipufit.IPUConfig(seed=0))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    monitor = ipufit.GradientMonitor("*.weight", is_detailed=True)
    last = LastGradients()
    history = model.fit(
        *(x[:1760], y[:1760]),
        batch_size=32,
        epochs=epochs,
        callbacks=[monitor, last],
        verbose=0,
    ).history
    norms = [history[f"grad_norm/{2 * n}.weight"][0] for n in range(LAYERS)]
    print(f"{activation.__name__}: accuracy {history['accuracy'][-1]:.1%}")
    for number, norm in enumerate(norms, start=1):
        print(f"  layer {number}: gradient norm {norm:.1e} in the first epoch")
    return norms, last.gradients["0.weight"]


def plot(seen: dict[str, tuple[list[float], Tensor]], path: str) -> None:
    """Draw the norms by layer, and histograms of the first layer's gradient."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, (norms, gradient) in seen.items():
        left.semilogy(range(1, 1 + LAYERS), norms, "o-", label=name)
        sizes = gradient[gradient != 0].abs().log10().numpy()  # some pixels are empty
        right.hist(sizes, bins=40, range=(-10, 0), alpha=0.7, label=name)
    left.set(xlabel="layer", title="gradient norm, first epoch")
    right.set(xlabel="log10 of its size", title="elements of layer 1's gradient")
    left.legend()
    right.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Watch both; returns the orders of magnitude that the gradient loses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="times through the data")
    parser.add_argument("--plot", metavar="FILE", help="draw them into this file")
    args = parser.parse_args(arguments)
    seen = {kind.__name__: watch(kind, args.epochs) for kind in (nn.ReLU, nn.Sigmoid)}
    if args.plot:
        plot(seen, args.plot)
    norms, _ = seen["Sigmoid"]
    lost = math.log10(norms[-1] / norms[0])
    print(f"orders of magnitude lost: {lost:.2f}")
    return lost


if __name__ == "__main__":
    main()
