# SPDX-License-Identifier: Apache-2.0
"""Where the microseconds of a weight update go, layer by layer, on W2.

    python -m benchmarks.steps

Each line adds a layer: torch alone on one batch; the emulator's executor on one ready
call; `fit` without metrics, whose data is also gone through alone; with accuracy; with
a callback of the user's; with the bar. What a layer adds is what it takes more than
those under it: less than nothing where the emulator calls faster kernels than the plain
loop. The ways take turns in one process, one thread; medians of CPU time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import redirect_stdout as printing_to
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from . import page
from .results import Spread
from .runs import terminal
from .tables import rounded, spread, table
from .workloads import W2

_MICRO = 1e6

Way = Callable[[], None]  # trains on `UPDATES` updates
UPDATES = W2.num_train // W2.batch_size


class Layer(NamedTuple):
    """A line of the report.

    Attributes:
        name: What it adds.
        way: The way whose time it is.
        below: The ways whose times are taken off.
    """

    name: str
    way: str
    below: tuple[str, ...] = ()


LAYERS = (
    Layer("torch: forward, loss, backward, AdamW", "torch"),
    Layer("executor: the emulator around it", "executor", ("torch",)),
    Layer("data: orders and batches", "data"),
    Layer("engine: loop, sums of the loss, History", "fit", ("executor", "data")),
    Layer("metrics: accuracy", "metrics", ("fit",)),
    Layer("callbacks: one of the user's", "callbacks", ("metrics",)),
    Layer("bar", "bar", ("metrics",)),
)


class WithLoss(nn.Module):
    """What PopTorch trains: a module that returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a micro-batch."""
        return F.cross_entropy(self.network(x), y)


def torch_alone() -> Way:
    """One batch again and again."""
    network, (x, y) = W2.make_network(), W2.train_data().first(W2.batch_size)
    optimizer = torch.optim.AdamW(network.parameters(), lr=W2.learning_rate)

    def run() -> None:
        for _ in range(UPDATES):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

    return run


def executor_alone() -> Way:
    """One call again and again, in PopTorch's own words."""
    from ipufit import poptorch

    options = poptorch.Options()
    options.deviceIterations(W2.device_iterations)
    network = WithLoss(W2.make_network())
    optimizer = poptorch.optim.AdamW(network.parameters(), lr=W2.learning_rate)
    executor = poptorch.trainingModel(network, options, optimizer)
    x, y = W2.train_data().first(W2.batch_size * W2.device_iterations)

    def run() -> None:
        for _ in range(UPDATES // W2.device_iterations):
            executor(x, y)

    return run


def data_alone() -> Way:
    """The calls of an epoch, and nothing done with them."""
    from ipufit import IPUConfig
    from ipufit.data.calls import TrainingBatches
    from ipufit.data.sources import as_source

    config = IPUConfig(
        micro_batch_size=W2.micro_batch, device_iterations=W2.device_iterations
    )
    plan = config.training_plan()
    batches = TrainingBatches(
        as_source(*W2.train_data()),
        plan,
        config.build_training_options(plan),
        shuffle=True,
        seed=0,
    )

    def run() -> None:
        for _ in batches:
            pass

    return run


def fitting(
    metrics: list[str], callback: Callable[[], Any] | None = None, verbose: int = 0
) -> Way:
    """An epoch of `fit`."""
    from ipufit import IPUConfig, IPUModel

    network, data = W2.make_network(), W2.train_data()
    config = IPUConfig(
        micro_batch_size=W2.micro_batch, device_iterations=W2.device_iterations, seed=0
    )
    model = IPUModel(network, config)
    optimizer = torch.optim.AdamW(network.parameters(), lr=W2.learning_rate)
    model.compile(optimizer=optimizer, loss="cross_entropy", metrics=metrics)
    callbacks = [] if callback is None else [callback()]

    def run() -> None:
        model.fit(*data, verbose=verbose, callbacks=callbacks)

    return run


def at_a_terminal(way: Way) -> Way:
    """The same with a terminal for its output."""

    def run() -> None:
        with terminal() as (fd, _), open(fd, "w", closefd=False) as it, printing_to(it):
            way()

    return run


def listener() -> Any:
    """A callback that looks at the logs of every call, as most do."""
    from ipufit import Callback

    class Listener(Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
            self.loss = logs["loss"]

    return Listener()


def make_ways() -> dict[str, Way]:
    """All of them, by name."""
    return {
        "torch": torch_alone(),
        "executor": executor_alone(),
        "data": data_alone(),
        "fit": fitting([]),
        "metrics": fitting(["accuracy"]),
        "callbacks": fitting(["accuracy"], listener),
        "bar": at_a_terminal(fitting(["accuracy"], verbose=1)),
    }


def measure(repeats: int) -> dict[str, list[float]]:
    """CPU microseconds per update of each way, turn by turn."""
    os.environ.setdefault("IPUFIT_BACKEND", "emulator")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ways = make_ways()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(1 + repeats):
        for name, run in ways.items():
            start = time.process_time()
            run()
            spent = time.process_time() - start
            if repeat:  # the first compiles
                taken[name].append(_MICRO * spent / UPDATES)
    return taken


def added(taken: dict[str, list[float]]) -> dict[str, tuple[Spread, Spread]]:
    """What each layer takes, and what it adds, which is worked out turn by turn."""
    found = {}
    for layer in LAYERS:
        own = [
            value - sum(taken[name][turn] for name in layer.below)
            for turn, value in enumerate(taken[layer.way])
        ]
        found[layer.name] = Spread.of(taken[layer.way]), Spread.of(own)
    return found


def report(taken: dict[str, list[float]]) -> str:
    """A table with a line per layer."""
    lines = [
        [name, spread(takes, 1), spread(adds, 1)]
        for name, (takes, adds) in added(taken).items()
    ]
    return table(["layer", "takes, CPU us per update", "adds"], lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--repeats", type=int, default=15, help="turns of each way")
    add("--write", action="store_true", help="put the results into docs/")
    args = parser.parse_args(arguments)
    taken = measure(args.repeats)
    text = report(taken)
    print(text)
    if args.write:
        rows = [
            {"layer": name, "takes_us": rounded(takes, 1), "adds_us": rounded(adds, 1)}
            for name, (takes, adds) in added(taken).items()
        ]
        page.write("steps", page.machine(), [text], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
