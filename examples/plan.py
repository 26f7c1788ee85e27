# SPDX-License-Identifier: Apache-2.0
"""Plan BERT-large on four IPUs before its weights exist.

Shows `model.plan`. The network is made on the device "meta", so it has shapes and no
numbers, and its 334 million parameters take no memory. The plan says what each of
Graphcore's four stages (3, 7, 7 and 7 layers, micro-batches of one, 256 of them per
update) takes: nearly all of an IPU with Adam's state on the chip, little more than a
third without. Graphcore's tutorial keeps it off the chip.

    python examples/plan.py

It takes a few seconds. The last line says which share of an IPU's memory parameters,
accumulators and state of the largest stage take in the tutorial's layout: 37.5%.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import ipufit
from ipufit import IPUConfig, IPUModel

WIDTH, LENGTH, WORDS = 1024, 384, 30522
LAYERS_PER_IPU = [3, 7, 7, 7]


class Embeddings(nn.Module):
    """Words and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(512, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Embed numbers of words."""
        places = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)
        return self.norm(self.words(x) + self.places(places))


class Bert(nn.Module):
    """A transformer of BERT-large's size that finds the beginning of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 16, 4 * WIDTH, activation="gelu", batch_first=True
            )
            for _ in range(sum(LAYERS_PER_IPU))
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score each place as the beginning of the answer."""
        x = self.embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


def make(offload_optimizer: bool) -> IPUModel:
    """Make the tutorial's layout of a network without numbers."""
    config = IPUConfig(
        micro_batch_size=1,
        gradient_accumulation=256,
        layers_per_ipu=LAYERS_PER_IPU,
        precision="float16",
        offload_optimizer=offload_optimizer,
    )
    with torch.device("meta"):
        model = IPUModel(Bert(), config)
    types = ("accum_type", "first_order_momentum_accum_type")
    adam = ipufit.Optimizer("adamw", **dict.fromkeys(types, torch.float16))
    model.compile(adam, "cross_entropy")
    return model


def main(arguments: list[str] | None = None) -> float:
    """Plan both layouts; returns the share of the second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH", help="draw the plan into this file")
    args = parser.parse_args(arguments)

    x = torch.empty(88_641, LENGTH, dtype=torch.int64, device="meta")
    share = 0.0
    for offload_optimizer in (False, True):
        plan = make(offload_optimizer).plan(x, x[:, 0], device="mk2")
        largest = max(plan.memory, key=lambda memory: memory.exact)
        share = largest.exact / largest.capacity
        where = "off" if offload_optimizer else "on"
        print(f"state {where} the chip: {largest.exact / 1e6:.0f} MB, {share:.1%}")
    print(plan)
    if args.plot:
        plan.save(args.plot)
    print(f"memory that the largest stage is known to take: {share:.1%}")
    return share


if __name__ == "__main__":
    main()
