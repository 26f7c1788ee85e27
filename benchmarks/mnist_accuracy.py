# SPDX-License-Identifier: Apache-2.0
"""Does the pipelining example learn as well as a plain PyTorch loop?

Trains the same network on the same MNIST, with 400 images per weight update, once by
`examples/mnist_pipeline.py` and once by a loop without ipufit, for several seeds:

    python -m benchmarks.mnist_accuracy --data-dir data --seeds 0 1 2 3 4

Prints a row per seed, then means and standard deviations in percent of test images.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import handwriting
import mnist_pipeline


def train_plainly(digits: handwriting.Digits, seed: int, epochs: int) -> float:
    """A PyTorch loop with AdamW; returns the accuracy on the test images."""
    torch.manual_seed(seed)
    network = mnist_pipeline.Network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for images, labels in DataLoader(digits.train, batch_size=400, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
    return accuracy(network, digits.test)


@torch.no_grad()
def accuracy(network: torch.nn.Module, test: TensorDataset) -> float:
    """Share of images whose highest score is the label's."""
    images, labels = test.tensors
    predicted = torch.cat([network(part).argmax(1) for part in images.split(1000)])
    return (predicted == labels).float().mean().item()


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    digits = handwriting.load_digits("mnist", args.data_dir)
    rows = []
    for seed in args.seeds:
        plain = train_plainly(digits, seed, args.epochs)
        switches = ["--data", "mnist", "--data-dir", args.data_dir]
        switches += ["--seed", str(seed), "--epochs", str(args.epochs)]
        rows.append((plain, mnist_pipeline.main(switches)))
        print(f"seed {seed}: plain {rows[-1][0]:.2%}, ipufit {rows[-1][1]:.2%}")
    for name, values in zip(("plain", "ipufit"), zip(*rows)):
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{name}: mean {statistics.mean(values):.2%}, deviation {spread:.2%}")


if __name__ == "__main__":
    main()
