# SPDX-License-Identifier: Apache-2.0
"""The stages that `pipeline="auto"` chooses, beside those of Graphcore's own programs.

    python -m benchmarks.splits
    python -m benchmarks.splits --ipus 2 4 8

Work is counted, not timed: floating-point operations of the forward pass. The imbalance
is the slowest stage's over the mean one's. Networks have shapes and no weights, so the
largest takes no more memory than the smallest. ResNet-50 needs torchvision.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Callable, NamedTuple, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ipufit import IPUConfig
from ipufit.model.costs import block_costs
from ipufit.planning.memory import MemorySettings
from ipufit.planning.split import BlockCost, Split, best_split


class Encoder(nn.Module):
    """A transformer for text or images: embeddings, equal layers, and a head.

    Args:
        embeddings: Makes vectors of what it gets.
        layers: Number of layers.
        width: Width of the vectors; the feed-forward part has four times that.
        heads: Heads of the attention.
        num_outputs: Outputs of each position.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        layers: int,
        width: int,
        heads: int,
        num_outputs: int,
    ) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layer = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs of each position."""
        x = self.embeddings(x)
        for layer in self.layer:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Patches(nn.Module):
    """Vectors of the 16 x 16 patches of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, 16, stride=16)

    def forward(self, images: Tensor) -> Tensor:
        """Compute vectors `[N, 196, width]` of images of 224 x 224."""
        vectors: Tensor = self.projection(images).flatten(2).transpose(1, 2)
        return vectors


def mnist_network() -> nn.Module:
    """The network of Graphcore's pipelining tutorial, with its names of the parts."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(320, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


def resnet50() -> nn.Module:
    """Torchvision's ResNet-50."""
    examples = str(Path(__file__).parents[1] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    torchvision = importlib.import_module("handwriting").import_torchvision()
    module: nn.Module = torchvision.models.resnet50()
    return module


class Subject(NamedTuple):
    """A network, and how Graphcore's programs cut it.

    Attributes:
        name: Name in the table.
        make: Makes it.
        example: A micro-batch of one sample.
        by_hand: Submodules that begin the stages.
        source: Where these stages were published.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Tensor
    by_hand: Sequence[str]
    source: str


def layers(*numbers: int) -> list[str]:
    """Names of the submodules that begin stages of so many layers.

    Example:
        >>> layers(0, 4, 4, 4)
        ['embeddings', 'layer.0', 'layer.4', 'layer.8']
    """
    ends = [sum(numbers[:place]) for place in range(1, len(numbers))]
    return ["embeddings", *(f"layer.{end}" for end in ends)]


TEXT = torch.zeros(1, 384, dtype=torch.int64)
IMAGE = torch.zeros(1, 3, 224, 224)
SUBJECTS = (
    Subject(
        "network of the MNIST tutorial",
        mnist_network,
        torch.zeros(1, 1, 28, 28),
        ["0", "1", "2", "3"],
        "tutorials: pytorch/pipelining, a layer for each IPU",
    ),
    Subject(
        "ResNet-50",
        resnet50,
        IMAGE,
        ["conv1", "layer3.2"],
        "examples: vision/cnns, inference on two IPUs (--pipeline-splits layer3/2)",
    ),
    Subject(
        "ViT-B/16, 12 layers",
        lambda: Encoder(Patches(768), 12, 768, 12, 1000),
        IMAGE,
        layers(3, 3, 3, 3),
        "examples: vision/vit, layers_per_ipu [3, 3, 3, 3]",
    ),
    Subject(
        "BERT-base, 12 layers",
        lambda: Encoder(nn.Embedding(30_522, 768), 12, 768, 12, 2),
        TEXT,
        layers(0, 4, 4, 4),
        "examples: nlp/bert, squad_base_384, layers_per_ipu [0, 4, 4, 4]",
    ),
    Subject(
        "BERT-large, 24 layers",
        lambda: Encoder(nn.Embedding(30_522, 1024), 24, 1024, 16, 2),
        TEXT,
        layers(3, 7, 7, 7),
        "tutorial on BERT-L and SQuAD, POD4, layers_per_ipu [3, 7, 7, 7]",
    ),
)


def costs_of(subject: Subject) -> tuple[BlockCost, ...]:
    """Costs of a network's blocks; its weights are never made."""
    with torch.device("meta"):
        module = subject.make()
    return block_costs(
        module, [subject.example], IPUConfig(), {}, call_with_all, MemorySettings()
    )


def call_with_all(module: nn.Module, tensors: Sequence[torch.Tensor]) -> object:
    """Call a network with one argument for each tensor."""
    return module(*tensors)


def split_by_hand(costs: Sequence[BlockCost], names: Sequence[str]) -> Split:
    """The stages that begin at submodules.

    Example:
        >>> costs = [BlockCost("a", 1), BlockCost("b", 2), BlockCost("c", 3)]
        >>> split_by_hand(costs, ["a", "c"]).flops
        (3, 3)
    """
    places = [cost.name for cost in costs]
    cuts = [places.index(name) for name in names]
    stages = [costs[i:j] for i, j in zip(cuts, [*cuts[1:], len(costs)])]
    return Split(
        tuple(names),
        tuple(sum(cost.flops for cost in stage) for stage in stages),
        tuple(sum(cost.held_bytes for cost in stage) for stage in stages),
        tuple(stage[-1].output_bytes for stage in stages[:-1]),
    )


def row(split: Split) -> tuple[str, str, str, str]:
    """Stages, the share of each, the imbalance, and where they begin."""
    total = sum(split.flops)
    shares = " ".join(f"{part / total:.1%}" for part in split.flops)
    begins = ", ".join(split.names)
    return str(len(split.flops)), shares, f"{split.imbalance:.2f}", begins


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ipus", type=int, nargs="+", default=[2, 4, 8])
    options = parser.parse_args(arguments)
    console = Console()
    for subject in SUBJECTS:
        try:
            costs = costs_of(subject)
        except ImportError as error:
            console.print(f"{subject.name} is left out: {error}")
            continue
        total = sum(cost.flops for cost in costs)
        table = Table(
            "", "stages", "share of each", "imbalance", "begin at",
            title=f"{subject.name}: {total / 1e9:.3g} GFLOP per sample, "
            f"{len(costs)} blocks",
            caption=f"by hand: {subject.source}",
        )  # fmt: skip
        table.add_row("by hand", *row(split_by_hand(costs, subject.by_hand)))
        for number in sorted({len(subject.by_hand), *options.ipus}):
            if number <= len(costs):
                table.add_row("auto", *row(best_split(costs, number)))
        console.print(table)


if __name__ == "__main__":
    main()
