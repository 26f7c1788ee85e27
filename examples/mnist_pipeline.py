# SPDX-License-Identifier: Apache-2.0
"""PopTorch's pipelining tutorial in ipufit: MNIST on a pipeline of four IPUs.

Shows how a plain module becomes four pipeline stages by naming its layers, and how
batch, gradient accumulation and device iterations make up a call: 40 * 10 * 10 = 4000
images, ten weight updates. Switches and their defaults are the tutorial's.

    python examples/mnist_pipeline.py --data auto

Without IPUs it runs on ipufit's emulator, three epochs in half a minute or so. The last
line is the accuracy over all test images: about 98.4% on MNIST.
"""

from __future__ import annotations

import argparse

import torch
from handwriting import load_digits
from torch import Tensor, nn

import ipufit
from ipufit import poptorch


class ConvLayer(nn.Module):
    """Convolution, pooling, ReLU."""

    def __init__(self, channels: int, filters: int, kernel: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel)
        self.pool = nn.MaxPool2d(pool)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        return self.pool(self.conv(x)).relu()


class Network(nn.Module):
    """The tutorial's: 90,026 parameters in four layers, one for each IPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = ConvLayer(1, 10, 5, 2)
        self.layer2 = ConvLayer(10, 20, 5, 2)
        self.layer3 = nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU())
        self.layer4 = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [N, 10] of images [N, 1, 28, 28]."""
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the tutorial's switches, and the source of the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch-size", type=int, default=40, help="images of a micro-batch")
    add("--device-iterations", type=int, default=10, help="weight updates per call")
    add("--gradient-accumulation", type=int, default=10, help="micro-batches an update")
    add("--test-batch-size", type=int, default=8, help="images of a test micro-batch")
    add("--epochs", type=int, default=3, help="times to go through the images")
    add("--learning-rate", type=float, default=0.001, help="of AdamW")
    add("--profile", action="store_true", help="write a PopVision report")
    add("--profile-dir", default="./profile", help="where to write it")
    strategies = ["pipelined", "sharded"]
    add("--strategy", choices=strategies, default="pipelined", help="of the stages")
    add("--debug", action="store_true", help="log what PopTorch does")
    add("--offload-optimiser", action="store_true", help="keep its state off the chip")
    add("--data", choices=["mnist", "digits", "auto"], default="auto", help="images")
    add("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    add("--seed", type=int, default=0, help="of weights and order")
    add("--plot", metavar="FILE", help="draw images that were mistaken into this file")
    return parser.parse_args(arguments)


def plot(images: Tensor, labels: Tensor, found: Tensor, path: str) -> None:
    """Draw the first images that the network takes for another digit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.4), layout="constrained")
    wrong = (labels != found).nonzero()[:8, 0].tolist()
    for axes, number in zip(figure.subplots(1, 8).flat, wrong):
        axes.imshow(images[number, 0], cmap="gray_r")
        axes.set(title=f"{labels[number]}, not {found[number]}")
    for axes in figure.axes:
        axes.set_axis_off()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train and test; returns the accuracy on the test images."""
    args = parse_arguments(arguments)
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    digits = load_digits(args.data, args.data_dir)
    print(f"{len(digits.train)} images to train on, from {digits.origin}")

    torch.manual_seed(args.seed)
    network = Network()
    config = ipufit.IPUConfig(
        micro_batch_size=args.batch_size,
        gradient_accumulation=args.gradient_accumulation,
        device_iterations=args.device_iterations,
        pipeline=("layer1", "layer2", "layer3", "layer4"),
        execution=args.strategy,
        offload_optimizer=args.offload_optimiser,
        profile_dir=args.profile_dir if args.profile else None,
        seed=args.seed,
    )
    model = ipufit.IPUModel(network, config)
    model.compile(
        optimizer=torch.optim.AdamW(network.parameters(), lr=args.learning_rate),
        loss="cross_entropy",
        metrics=["accuracy"],
    )
    model.fit(digits.train, epochs=args.epochs)
    results = model.evaluate(digits.test, batch_size=args.test_batch_size)
    if args.plot:
        images, labels = digits.test.tensors
        scores = model.predict(images, batch_size=args.test_batch_size)
        plot(images, labels, scores.argmax(dim=1), args.plot)
    print(f"test accuracy: {results['accuracy']:.2%}")
    return results["accuracy"]


if __name__ == "__main__":
    main()
