# SPDX-License-Identifier: Apache-2.0
"""One way to train on a dataset that is read sample by sample, in this process alone.

    python -m benchmarks.reading ASKED ANSWER

reads a `Reading` as JSON and writes what it took. `benchmarks.inputs` starts it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from . import networks
from .datasets import MEAN, STD
from .worker import Times

EXAMPLES = str(Path(__file__).parent.parent / "examples")
"""Have the one function that imports torchvision beside any torch."""
MICRO_BATCH = 40
RATE = 1e-3

WAYS = {
    "plain": "loop over a `DataLoader`",
    "ipufit-default": "ipufit, nothing set",
    "ipufit": "ipufit, 10 updates per call",
    "plain-kept": "loop over a `DataLoader`, workers kept",
}
SOURCES = ("MNIST", "drawings")


@dataclass(frozen=True)
class Reading:
    """What a process is to do.

    Attributes:
        way: Of `WAYS`.
        workers: Processes that load; 0 for none.
        samples: Of an epoch.
        epochs: That are measured, after one that isn't.
        source: Of `SOURCES`; None for MNIST if torchvision and its files are there.
        data_dir: Where MNIST may be.
    """

    way: str
    workers: int
    samples: int = 8000
    epochs: int = 2
    source: str | None = None
    data_dir: str | None = None


class Drawings(Dataset):
    """Random images of MNIST's shape, with transforms that cost about what its do.

    As torchvision's, they are copies, conversions and checks, one after the other.
    """

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(
            0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator
        )
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index], int(self.labels[index])
        picture = bytearray(image.numpy().tobytes())
        pixels = torch.frombuffer(picture, dtype=torch.uint8).view(28, 28, 1)
        x = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        x = F.pad(x, (2, 2, 2, 2))[:, 2:30, 2:30]  # as a random crop does
        if x.min() < 0 or x.max() > 1:
            raise ValueError("images have values from 0 to 255")
        mean, std = torch.as_tensor([MEAN]), torch.as_tensor([STD])
        if (std == 0).any():
            raise ValueError("images of one colour can't be normalised")
        x = x.clone().sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))
        return x, label


def dataset(reading: Reading) -> tuple[Dataset, str]:
    """The samples, and where they are from.

    Raises:
        RuntimeError: MNIST was asked for, and can't be had.
    """
    if reading.source != "drawings":
        found = _mnist(Path(reading.data_dir or "data"))
        if found is not None:
            return Subset(found, range(reading.samples)), "torchvision's MNIST"
        if reading.source == "MNIST":
            raise RuntimeError("torchvision or MNIST's files aren't there")
    return Drawings(reading.samples), "drawings like MNIST's"


def _mnist(folder: Path) -> Dataset | None:
    if not (folder / "MNIST" / "raw").is_dir():
        return None
    if EXAMPLES not in sys.path:
        sys.path.append(EXAMPLES)
    try:
        torchvision = importlib.import_module("handwriting").import_torchvision()
    except ImportError:
        return None
    transforms = importlib.import_module("torchvision.transforms")
    steps = [transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))]
    chain = transforms.Compose(steps)
    return torchvision.datasets.MNIST(str(folder), transform=chain)


def plain(reading: Reading, samples: Dataset) -> Callable[[int], None]:
    """The loop that everybody writes; trains so many epochs more."""
    network = networks.TutorialNetwork().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    loader = DataLoader(
        samples,
        batch_size=MICRO_BATCH,
        shuffle=True,
        num_workers=reading.workers,
        persistent_workers=reading.way == "plain-kept",
    )

    def train(epochs: int) -> None:
        for _ in range(epochs):
            total, hits, count = 0.0, 0, 0
            for x, y in loader:
                optimizer.zero_grad()
                scores = network(x)
                loss = F.cross_entropy(scores, y)
                loss.backward()
                optimizer.step()
                total += loss.item() * len(x)
                hits += (scores.argmax(dim=1) == y).sum().item()
                count += len(x)

    return train


def with_ipufit(reading: Reading, samples: Dataset) -> Callable[[int], None]:
    """`fit` on the dataset; trains so many epochs more."""
    from ipufit import IPUConfig, IPUModel

    more: dict[str, Any] = {}
    if reading.workers:
        more["num_workers"] = reading.workers
    if reading.way == "ipufit":
        more["device_iterations"] = 10
    network = networks.TutorialNetwork()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    model = IPUModel(network, IPUConfig(**more))
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"])
    done = 0

    def train(epochs: int) -> None:
        nonlocal done
        model.fit(
            samples,
            batch_size=MICRO_BATCH,
            initial_epoch=done,
            epochs=done + epochs,
            verbose=0,
        )
        done += epochs

    return train


def family_seconds() -> float:
    """CPU seconds of this process, of children it has waited for, and of living ones.

    Workers that are kept are waited for when nobody measures any more. Linux says what
    each process has used, to a hundredth of a second.
    """
    seconds = Times.now().cpu
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        used[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = [os.getpid()]
    for parent in family:
        children = [process for process, of in parents.items() if of == parent]
        family += children
        seconds += sum(used[process] for process in children)
    return seconds


def measure(reading: Reading) -> dict[str, Any]:
    """Train.

    Returns:
        `cpu` and `wall`: seconds of all epochs measured; `source` of the samples.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples, source = dataset(reading)
    make = plain if reading.way.startswith("plain") else with_ipufit
    train = make(reading, samples)
    train(1)
    cpu, wall = family_seconds(), time.perf_counter()
    train(reading.epochs)
    wall = time.perf_counter() - wall
    return {"cpu": family_seconds() - cpu, "wall": wall, "source": source}


def main(arguments: list[str]) -> None:
    """Read what is asked, write what it took."""
    asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = measure(Reading(**asked))
    Path(arguments[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # workers that are still there
