# SPDX-License-Identifier: Apache-2.0
"""One setting of ipufit on the MLP, measured in this process alone.

    python -m benchmarks.point ASKED ANSWER

reads a `Point` as JSON and writes what it took. `benchmarks.scaling` starts it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import networks
from .datasets import Samples, clusters
from .worker import Times, peak_bytes

MICRO_BATCH = 32


@dataclass(frozen=True)
class Point:
    """A setting.

    Attributes:
        samples: In the dataset.
        epochs: That are measured, after one that isn't.
        device_iterations: D, weight updates per call.
        accumulation: G, micro-batches per replica and update.
        replicas: R.
        width: Of the hidden layer.
        workers: That load; None for tensors in memory.
    """

    samples: int = 16_384
    epochs: int = 2
    device_iterations: int = 8
    accumulation: int = 1
    replicas: int = 1
    width: int = 32
    workers: int | None = None

    @property
    def samples_per_call(self) -> int:
        """All factors."""
        factors = self.device_iterations * self.accumulation * self.replicas
        return MICRO_BATCH * factors


class Rows(Dataset):
    """Samples of a map-style dataset, one at a time, as a user's own would be."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples.x[index], self.samples.y[index]


def measure(point: Point) -> dict[str, float]:
    """Train.

    Returns:
        `cpu` and `wall`: seconds of all epochs measured. `peak_bytes`: of memory;
        `start_bytes`: of what it was when data and model were there.
    """
    from ipufit import IPUConfig, IPUModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = clusters(point.samples, (16,), 4, 0)
    config = IPUConfig(
        micro_batch_size=MICRO_BATCH,
        gradient_accumulation=point.accumulation,
        replicas=point.replicas,
        device_iterations=point.device_iterations,
        num_workers=point.workers or 0,
        seed=0,
    )
    model = IPUModel(networks.mlp(point.width), config)
    model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
    start_bytes = peak_bytes()
    given = tuple(data) if point.workers is None else (Rows(data),)
    model.fit(*given, epochs=1, verbose=0)
    start = Times.now()
    model.fit(*given, initial_epoch=1, epochs=1 + point.epochs, verbose=0)
    spent = Times.now() - start
    return {
        **dataclasses.asdict(spent),
        "peak_bytes": peak_bytes(),
        "start_bytes": start_bytes,
    }


def main(arguments: list[str]) -> None:
    """Read the point, write what it took."""
    asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = measure(Point(**asked))
    Path(arguments[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # workers that are still there
