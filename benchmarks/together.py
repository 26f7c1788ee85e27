# SPDX-License-Identifier: Apache-2.0
"""What one of several processes trains, and what it measures meanwhile.

All contestants take the same samples in each update: those of one order of all samples,
of which each process has an equal share. Processes share the batch, so that an update
is the same work however many they are.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from .contestants.base import Figures
from .datasets import Samples, clusters
from .worker import Times
from .workloads import W1, W2, Workload


def wide_mlp() -> nn.Sequential:
    """784 features to 10 classes, 2.9 million parameters in few layers."""
    sizes = (784, 1024, 1024, 1024)
    layers: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


MLP = dataclasses.replace(W2, name="mlp", train_samples=6400, epochs=1)
CNN = dataclasses.replace(
    W1,
    name="cnn",
    title="MNIST tutorial's network, batch 160",
    micro_batch=160,
    train_samples=4800,
    epochs=1,
)
WIDE = Workload(
    "wide",
    "MLP 784-1024-1024-1024-10, batch 128",
    wide_mlp,
    lambda count, seed: clusters(count, (784,), 10, seed),
    micro_batch=128,
    device_iterations=10,
    train_samples=2560,
    test_samples=128,
    epochs=2,
    passes=1,
)
WORKLOADS = {one.name: one for one in (MLP, CNN, WIDE)}


def find(name: str, *, quick: bool = False) -> Workload:
    """The workload of a name.

    Args:
        name: A key of `WORKLOADS`.
        quick: With the samples of one call only.
    """
    found = WORKLOADS[name]
    return dataclasses.replace(found, train_samples=1) if quick else found


@dataclass(frozen=True)
class Share:
    """A process, and the part of a workload that it computes.

    Attributes:
        workload: What is trained by all.
        index: Number of the process, from 0.
        count: Number of processes.
    """

    workload: Workload
    index: int
    count: int

    @property
    def rows(self) -> int:
        """Samples of one update in each process."""
        rows, rest = divmod(self.workload.batch_size, self.count)
        if rest:
            raise ValueError(f"{self.count} processes can't share the batch equally.")
        return rows


class Together(abc.ABC):
    """A way in which processes train together.

    Args:
        share: Of this process.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.network = share.workload.make_network()
        self.data = share.workload.train_data()

    @abc.abstractmethod
    def train(self, epochs: int, *, shuffle: bool) -> list[Figures]:
        """Train on, and say what came of each epoch: over the samples of all."""


class WithIpufit(Together):
    """`fit`, as a user would write it, without a bar."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self.model = _compiled(self.network, share, self.device_iterations)
        self.epochs = 0

    @property
    def device_iterations(self) -> int:
        """Weight updates per call."""
        return self.share.workload.device_iterations

    def train(self, epochs: int, *, shuffle: bool) -> list[Figures]:
        """`fit`."""
        history = self.model.fit(
            *self.data,
            shuffle=shuffle,
            initial_epoch=self.epochs,
            epochs=self.epochs + epochs,
            verbose=0,
        ).history
        self.epochs += epochs
        return [Figures(*pair) for pair in zip(history["loss"], history["accuracy"])]


class WithIpufitOneUpdate(WithIpufit):
    """The same with one weight update per call."""

    device_iterations = 1


class Loop(Together):
    """A loop over slices, with all that DistributedDataParallel and torch offer.

    Images are channels_last, the optimiser is fused, gradients lie in the buckets that
    are exchanged, the graph is said to be static. A single process has a plain loop.
    """

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        if self.data.x.dim() == 4:
            self.network.to(memory_format=torch.channels_last)
            images = self.data.x.to(memory_format=torch.channels_last)
            self.data = Samples(images, self.data.y)
        self.module = self.network
        if share.count > 1:
            self.module = DistributedDataParallel(
                self.network, gradient_as_bucket_view=True, static_graph=True
            )
        rate = share.workload.learning_rate
        self.optimizer = _fused_adamw(self.network, rate)
        self.passes = 0

    def train(self, epochs: int, *, shuffle: bool) -> list[Figures]:
        """Epoch after epoch; what is reported is read once, at the end of each."""
        return [self._epoch(shuffle=shuffle) for _ in range(epochs)]

    def _batches(self, *, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
        share, (x, y) = self.share, self.data
        order = torch.arange(len(x))
        if shuffle:
            seeded = torch.Generator().manual_seed(self.passes)
            order = torch.randperm(len(x), generator=seeded)
            self.passes += 1
        own = order.view(-1, share.count, share.rows)[:, share.index].flatten()
        return zip(x[own].split(share.rows), y[own].split(share.rows))

    def _epoch(self, *, shuffle: bool) -> Figures:
        total, hits = torch.zeros(()), torch.zeros(())
        for x, y in self._batches(shuffle=shuffle):
            scores = self.module(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach() * len(x)
            hits += (scores.argmax(dim=1) == y).sum()
        return self._of_all(total, hits)

    def _of_all(self, total: Tensor, hits: Tensor) -> Figures:
        sums = torch.stack([total, hits])
        if self.share.count > 1:
            distributed.all_reduce(sums)
        return Figures(*(sums / len(self.data.x)).tolist())


class Usual(Loop):
    """DistributedDataParallel as its tutorial has it: loaders, AdamW, and `item()`."""

    def __init__(self, share: Share) -> None:
        Together.__init__(self, share)
        self.module = self.network
        if share.count > 1:
            self.module = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=share.workload.learning_rate
        )
        self.passes = 0

    def _batches(self, *, shuffle: bool) -> Iterator[tuple[Tensor, Tensor]]:
        share, dataset = self.share, TensorDataset(*self.data)
        sampler = DistributedSampler(dataset, share.count, share.index, shuffle)
        sampler.set_epoch(self.passes)
        self.passes += 1
        return iter(DataLoader(dataset, share.rows, sampler=sampler))

    def _epoch(self, *, shuffle: bool) -> Figures:
        total, hits = 0.0, 0
        for x, y in self._batches(shuffle=shuffle):
            self.optimizer.zero_grad()
            scores = self.module(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(x)
            hits += int((scores.argmax(dim=1) == y).sum().item())
        return self._of_all(torch.tensor(total), torch.tensor(float(hits)))


CONTESTANTS: dict[str, type[Together]] = {
    "ipufit": WithIpufit,
    "ipufit-d1": WithIpufitOneUpdate,
    "loop": Loop,
    "usual": Usual,
}


def _fused_adamw(network: nn.Module, rate: float) -> torch.optim.Optimizer:
    parameters = list(network.parameters())
    try:
        return torch.optim.AdamW(parameters, lr=rate, fused=True)
    except RuntimeError:  # torch before 2.4 has none for processors
        return torch.optim.AdamW(parameters, lr=rate)


def _compiled(network: nn.Module, share: Share, iterations: int) -> Any:
    from ipufit import IPUConfig, IPUModel

    config = IPUConfig(
        micro_batch_size=share.rows, device_iterations=iterations, seed=0
    )
    model = IPUModel(network, config)
    rate = share.workload.learning_rate
    model.compile(
        optimizer=torch.optim.AdamW(network.parameters(), lr=rate),
        loss="cross_entropy",
        metrics=["accuracy"],
    )
    return model


# Measuring ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Spent:
    """What a process has spent on something.

    Attributes:
        cpu: Seconds of the processors, of all threads.
        wall: Seconds of the clock.
        sent: Bytes that were written to sockets; None where nobody counts them.
        figures: Of each epoch.
    """

    cpu: float
    wall: float
    sent: int | None = None
    figures: Sequence[Figures] = ()


def bytes_written() -> int | None:
    """Bytes that this process has written so far, to files and sockets of gloo.

    Linux counts those of `write` and `writev`, and gloo sends by these. None elsewhere.
    """
    counters = Path("/proc/self/io")
    if not counters.is_file():
        return None
    for line in counters.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "wchar":
            return int(value)
    return None


class Worker:
    """Answers the questions of `benchmarks.distributed` in one process of a crew.

    Args:
        index: Number of the process, from 0.
        count: Number of processes.
        quick: Whether to train on few samples.
    """

    def __init__(self, index: int, count: int, *, quick: bool = False) -> None:
        self.index, self.count = index, count
        self._quick = quick
        self._made: dict[tuple[str, str], Together] = {}

    def __call__(self, question: str, *arguments: Any) -> Any:
        """Answer a question: the name of a method, and its arguments."""
        return getattr(self, question)(*arguments)

    def train(self, workload: str, name: str, epochs: int, shuffle: bool) -> Spent:
        """Have a contestant train on."""
        key = workload, name
        if key not in self._made:
            found = find(workload, quick=self._quick)
            share = Share(found, self.index, self.count)
            self._made[key] = CONTESTANTS[name](share)
        contestant = self._made[key]
        return self._timed(lambda: contestant.train(epochs, shuffle=shuffle))

    def calls(self, kind: str, calls: int, epochs: int) -> Spent:
        """Have calls made, and no gradients exchanged.

        A call has as many samples in each process as the MLP's batch, however many
        processes there are.

        Args:
            kind: `"silent"` trains; `"heard"` does so with a callback that hears each
                call; `"evaluate"` evaluates.
            calls: In an epoch, of each process.
            epochs: Their number.
        """
        rows = MLP.batch_size
        data = MLP.samples(rows * calls * self.count, 0)
        share = Share(MLP, 0, 1)
        model = _compiled(MLP.make_network(), share, 1)
        callbacks = [_listener()] if kind == "heard" else []

        def fit(number: int) -> list[Figures]:
            model.fit(*data, epochs=number, callbacks=callbacks, verbose=0)
            return []

        def evaluate(number: int) -> list[Figures]:
            for _ in range(number):
                model.evaluate(*data, batch_size=rows * self.count, verbose=0)
            return []

        run = evaluate if kind == "evaluate" else fit
        with _without_gradients():
            run(1)  # compiles
            return self._timed(lambda: run(epochs))

    def _timed(self, action: Callable[[], list[Figures]]) -> Spent:
        if self.count > 1:
            distributed.barrier()
        written, start = bytes_written(), Times.now()
        figures = action()
        spent, after = Times.now() - start, bytes_written()
        sent = None if written is None or after is None else after - written
        return Spent(spent.cpu, spent.wall, sent, figures)


def _listener() -> Any:
    from ipufit import Callback

    class Listener(Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
            self.loss = logs["loss"]

    return Listener()


def _without_gradients() -> Any:
    """Leave out the exchange of gradients, and nothing else."""
    from ipufit.emulator._processes import GradientSums

    def nothing(self: Any, gradients: Any, divisor: float = 1) -> None:
        """Leave gradients as they are."""

    return mock.patch.object(GradientSums, "add_up", nothing)
