# SPDX-License-Identifier: Apache-2.0
"""What is trained: network, data and batch sizes of each workload.

All are classifiers with cross-entropy and AdamW, float32, without random numbers in
`forward`: contestants that begin with the same weights and take the samples in the same
order must report the same losses.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
from torch import nn

from . import networks
from .datasets import Samples, clusters, mnist, tokens

MakeSamples = Callable[[int, int], Samples]  # count, seed


@dataclass(frozen=True)
class Workload:
    """One thing to train, evaluate and predict.

    Attributes:
        name: Its key; `"-g8"` at the end for eight micro-batches per update.
        title: What it is, for readers.
        network: Makes the module.
        samples: Makes the data from how many and a seed.
        micro_batch: Samples of one pass.
        device_iterations: Updates per call that an IPU user would choose; it changes
            no numbers, and only ipufit has it.
        train_samples: In an epoch, at most; rounded down to whole calls.
        test_samples: To evaluate and predict.
        epochs: Of a measured training.
        passes: Over the test samples, in a measured evaluation or prediction.
        accumulation: Micro-batches per update.
        learning_rate: Of AdamW.
        is_mnist: Whether MNIST takes the place of `samples` where it is there.
    """

    name: str
    title: str
    network: Callable[[], nn.Module]
    samples: MakeSamples
    micro_batch: int
    device_iterations: int
    train_samples: int
    test_samples: int
    epochs: int
    passes: int
    accumulation: int = 1
    learning_rate: float = 1e-3
    is_mnist: bool = False

    @property
    def batch_size(self) -> int:
        """Samples of one update."""
        return self.micro_batch * self.accumulation

    @property
    def num_train(self) -> int:
        """Samples of an epoch: whole calls, so that nobody drops or pads any."""
        per_call = self.batch_size * self.device_iterations
        return max(1, self.train_samples // per_call) * per_call

    def make_network(self) -> nn.Module:
        """The module, with the same weights every time."""
        torch.manual_seed(0)
        return self.network()

    def train_data(self, data_dir: Path | None = None) -> Samples:
        """What to train on."""
        return self._data(data_dir, self.num_train, train=True)

    def test_data(self, data_dir: Path | None = None) -> Samples:
        """What to evaluate and predict."""
        return self._data(data_dir, self.test_samples, train=False)

    def _data(self, data_dir: Path | None, count: int, *, train: bool) -> Samples:
        found = None
        if self.is_mnist and data_dir is not None:
            found = mnist(data_dir, count, train=train)
        return found or self.samples(count, 0 if train else 1)


def _images(shape: tuple[int, ...], classes: int) -> MakeSamples:
    return lambda count, seed: clusters(count, shape, classes, seed)


W1 = Workload(
    "W1",
    "MNIST tutorial's network, batch 40",
    networks.TutorialNetwork,
    _images((1, 28, 28), 10),
    micro_batch=40,
    device_iterations=10,
    train_samples=8000,
    test_samples=4000,
    epochs=2,
    passes=3,
    is_mnist=True,
)
W2 = Workload(
    "W2",
    "MLP 16-32-4, batch 32",
    networks.mlp,
    _images((16,), 4),
    micro_batch=32,
    device_iterations=10,
    train_samples=16_000,
    test_samples=16_000,
    epochs=4,
    passes=6,
)
W3 = dataclasses.replace(
    W1,
    name="W3",
    title="W1 with 10 micro-batches of 40 per update",
    accumulation=10,
)
RESNET = Workload(
    "resnet18",
    "ResNet-18 with batch norm, 32x32 images, batch 8",
    networks.resnet18,
    _images((3, 32, 32), 10),
    micro_batch=8,
    device_iterations=2,
    train_samples=128,
    test_samples=128,
    epochs=1,
    passes=2,
    learning_rate=1e-4,  # with more, rounding decides where so few samples lead
)
LSTM = Workload(
    "lstm",
    "LSTM 16-64, 32 steps, batch 32",
    networks.LSTMClassifier,
    lambda count, seed: clusters(count, (32, 16), 8, seed),
    micro_batch=32,
    device_iterations=10,
    train_samples=5120,
    test_samples=5120,
    epochs=2,
    passes=4,
)
TRANSFORMER = Workload(
    "transformer",
    "Transformer encoder, 2 layers of width 64, 32 tokens, batch 32",
    networks.TransformerClassifier,
    lambda count, seed: tokens(count, 32, 256, 8, seed),
    micro_batch=32,
    device_iterations=10,
    train_samples=2560,
    test_samples=2560,
    epochs=2,
    passes=4,
)

RESNET50 = Workload(
    "resnet50",
    "ResNet-50 with batch norm, 64x64 images, batch 8",
    networks.resnet50,
    _images((3, 64, 64), 10),
    micro_batch=8,
    device_iterations=1,
    train_samples=8,
    test_samples=8,
    epochs=1,
    passes=1,
    learning_rate=1e-4,
)
ENCODER = Workload(
    "encoder12",
    "Transformer encoder, 12 layers of width 256, 32 tokens, batch 8",
    networks.encoder12,
    lambda count, seed: tokens(count, 32, 256, 8, seed),
    micro_batch=8,
    device_iterations=1,
    train_samples=8,
    test_samples=8,
    epochs=1,
    passes=1,
    learning_rate=1e-4,
)
_ALL = (W1, W2, W3, RESNET, LSTM, TRANSFORMER, RESNET50, ENCODER)
WORKLOADS = {one.name: one for one in _ALL}
DEFAULT = ("W1", "W2", "W3", "lstm", "transformer", "resnet18")


def find(name: str) -> Workload:
    """The workload of a name.

    Args:
        name: A key of `WORKLOADS`, with `"-g8"` after it for eight micro-batches per
            update (any number will do).

    Raises:
        ValueError: There is none.

    Example:
        >>> find("W1-g8").batch_size
        320
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    matched = re.fullmatch(r"(.+)-g([1-9]\d*)", name)
    if matched is None or matched[1] not in WORKLOADS:
        raise ValueError(
            f"There is no workload {name!r}: choose from {', '.join(WORKLOADS)}, or "
            "one of these with '-g8' after it for 8 micro-batches per update."
        )
    base, count = WORKLOADS[matched[1]], int(matched[2])
    return dataclasses.replace(
        base,
        name=name,
        title=f"{base.title}, {count} micro-batches per update",
        accumulation=count,
    )
