# SPDX-License-Identifier: Apache-2.0
"""A model of what exchanging gradients costs on a pod, from public figures.

    python -m benchmarks.pod_cost
    python -m benchmarks.pod_cost --write

Nothing is measured. Bandwidths are Graphcore's nominal ones, and times of computing are
those that its published throughputs leave. `--write` puts the tables into
`docs/how-to/pods.md`, which says what the model leaves out.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from . import page
from .tables import table

PAGE = page.DOCS / "how-to" / "pods.md"
PART = "pod_cost"

_GIGABIT = 1e9 / 8  # bytes
_MILLI = 1e-3

# Bow-2000 datasheet, "Overview": IPU-Link 512 Gb/s inside of a pod, GW-Link 2x 100 Gb/s
# between pods, for a machine of 4 IPUs. The IPU-M2000 has the same ports.
# https://docs.graphcore.ai/projects/bow-2000-datasheet/en/latest/overview.html
LINK_BYTES_PER_SECOND = 512 * _GIGABIT
GATEWAY_BYTES_PER_SECOND = 2 * 100 * _GIGABIT
IPUS_PER_MACHINE = 4

# Bow Pod256 datasheet, "Product description": racks of 16 machines (64 IPUs), whose
# IPU-Links make a torus; GW-Links connect the racks.
# https://docs.graphcore.ai/projects/bow-pod256-datasheet/en/latest/product-description.html
IPUS_PER_RACK = 64

# No latency of a step is published. This one is what the published throughputs of
# ResNet-50 on 16 and on 64 IPUs leave if all else is as modelled, so that it stands for
# everything that doesn't get less with fewer samples (`implied_step_seconds`).
STEP_SECONDS = 11e-6

BYTES = {"float16": 2, "float32": 4}
REPLICAS = (16, 64, 256)
SHARE = 0.1
"""The share of an update's time from which on the exchange is said to count."""


class Published(NamedTuple):
    """A throughput that Graphcore has published.

    Attributes:
        ipus: Number of IPUs.
        batch_size: Samples of one update, on all of them.
        samples_per_second: Throughput of training.
    """

    ipus: int
    batch_size: int
    samples_per_second: int

    def update_seconds(self) -> float:
        """The time of one update."""
        return self.batch_size / self.samples_per_second


class Model(NamedTuple):
    """A network, and how it was trained in float16 on Bow Pods.

    Attributes:
        name: For tables.
        parameters: Number of them.
        ipus: Of one replica.
        published: The first result is what the time of computing is taken from.
    """

    name: str
    parameters: float
    ipus: int
    published: tuple[Published, ...]

    def gradient_bytes(self, dtype: str) -> float:
        """Bytes of all gradients."""
        return self.parameters * BYTES[dtype]

    def sample_seconds(self) -> float:
        """Time in which one replica computes one sample, without any exchange."""
        first = self.published[0]
        replicas = first.ipus // self.ipus
        exchange = exchange_seconds(self, replicas, "float16")
        return (first.update_seconds() - exchange) * replicas / first.batch_size


# Graphcore, "Performance results", Bow platform, training, 16.16 (ResNet-50 v1.5 on
# TensorFlow and BERT-Large phase 1 on PopART before SDK 2.5; BERT-Base phase 1 on
# PyTorch, SDK 3.3). https://www.graphcore.cn/performance-results/
# IPUs of a replica: nlp/bert/pytorch/configs_pretraining.yml of
# https://github.com/graphcore/examples (ipus_per_replica: 4).
MODELS = (
    Model(
        "ResNet-50, 25.6 M",
        25.6e6,
        1,
        (
            Published(16, 1_920, 42_029),
            Published(64, 2_560, 145_287),
            Published(256, 10_240, 425_514),
        ),
    ),
    Model("BERT-Base, 110 M", 110e6, 4, (Published(16, 65_536, 15_911),)),
    Model(
        "BERT-Large, 340 M",
        340e6,
        4,
        (Published(16, 65_536, 5_179), Published(64, 65_536, 19_353)),
    ),
)


def ring_seconds(
    size: float, members: int, bandwidth: float, step: float = STEP_SECONDS
) -> float:
    """Time in which a ring sums something that each member has.

    Each member sends 2 (R - 1) / R of it, in 2 (R - 1) steps.

    Args:
        size: Bytes of it.
        members: Number of members, R.
        bandwidth: Bytes per second from a member to the next.
        step: Seconds that a step takes besides.

    Example:
        >>> ring_seconds(1e9, 4, 1e9, step=0.0)
        1.5
        >>> ring_seconds(1e9, 1, 1e9)
        0.0
    """
    turns = 2 * (members - 1)
    return turns / members * size / bandwidth + turns * step


def exchange_seconds(
    model: Model, replicas: int, dtype: str, step: float = STEP_SECONDS
) -> float:
    """Time in which all replicas sum their gradients once.

    Inside of a rack a ring goes over IPU-Links. The IPUs of a machine share the links
    to the next machine, so that all gradients pass them, whether one IPU holds the
    model or four do. If there are several racks, each machine then has the sums of its
    share, and exchanges these with its peers in other racks over its gateway.

    Args:
        model: Its parameters, and the IPUs of a replica.
        replicas: Number of all replicas.
        dtype: Of the gradients.
        step: Seconds that a step takes besides.
    """
    in_rack = min(replicas, IPUS_PER_RACK // model.ipus)
    machines = -(-in_rack * model.ipus // IPUS_PER_MACHINE)
    size = model.gradient_bytes(dtype)
    inside = ring_seconds(size, in_rack, LINK_BYTES_PER_SECOND, step)
    racks = replicas // in_rack
    share = size / machines
    return inside + ring_seconds(share, racks, GATEWAY_BYTES_PER_SECOND, step)


def update_seconds(model: Model, replicas: int, batch_size: float) -> float:
    """Time of an update in float16: computing, then the exchange."""
    computing = model.sample_seconds() * batch_size / replicas
    return computing + exchange_seconds(model, replicas, "float16")


def counting_batch_size(model: Model, replicas: int) -> float:
    """The `batch_size` below which the exchange takes more than `SHARE` of an update.

    Example:
        >>> resnet, *_ = MODELS
        >>> size = counting_batch_size(resnet, 64)
        >>> share = exchange_seconds(resnet, 64, "float16") / update_seconds(
        ...     resnet, 64, size
        ... )
        >>> round(share, 6)
        0.1
    """
    exchange = exchange_seconds(model, replicas, "float16")
    return exchange * (1 / SHARE - 1) / model.sample_seconds() * replicas


def implied_step_seconds() -> float:
    """The time of a step that makes the model fit ResNet-50 on 16 and on 64 IPUs.

    Two equations, a published update each: samples of a replica times the time of one,
    plus the ring's bytes, plus its steps, is the time of the update. The time of a
    sample and that of a step are unknown.
    """
    resnet, *_ = MODELS
    equations = []
    for result in _fitted():
        replicas = result.ipus
        rest = result.update_seconds() - exchange_seconds(
            resnet, replicas, "float16", step=0.0
        )
        equations.append((result.batch_size / replicas, 2 * (replicas - 1), rest))
    (samples, steps, seconds), (fewer, more, left) = equations
    return (samples * left - fewer * seconds) / (samples * more - fewer * steps)


def exchange_table() -> str:
    """Milliseconds of an exchange, by model, dtype and replicas."""
    rows = []
    for model in MODELS:
        for dtype in BYTES:
            times = [exchange_seconds(model, number, dtype) for number in REPLICAS]
            cells = [f"{time / _MILLI:.1f}" for time in times]
            rows.append([f"{model.name}, {dtype}", *cells])
    return table(["gradients, ms", *_heads()], rows)


def batch_table() -> str:
    """Batch sizes from which on computing hides the exchange's share."""
    rows = []
    for model in MODELS:
        sizes = [counting_batch_size(model, number) for number in REPLICAS]
        cells = [f"{float(f'{size:.2g}'):,.0f}" for size in sizes]
        rows.append([f"{model.name}, {model.sample_seconds() / _MILLI:.2f} ms", *cells])
    return table(["model, computing one sample", *_heads()], rows)


def check_table() -> str:
    """Throughputs that the model foretells, beside those that were published."""
    rows = []
    for model in MODELS:
        for result in model.published[1:]:
            if result in _fitted():
                continue
            replicas = result.ipus // model.ipus
            seconds = update_seconds(model, replicas, result.batch_size)
            speed = result.batch_size / seconds
            less = 1 - result.samples_per_second / speed
            rows.append(
                [
                    model.name.partition(",")[0],
                    f"{result.ipus}",
                    f"{result.batch_size:,}",
                    f"{speed:,.0f}",
                    f"{result.samples_per_second:,}",
                    f"{less:.0%}",
                ]
            )
    heading = ["model", "IPUs", "batch_size", "model's samples/s", "published", "less"]
    return table(heading, rows)


def report() -> str:
    """The part of the page: three tables."""
    return "\n\n".join(
        [
            "Time of one exchange of all gradients, by the number of replicas:",
            exchange_table(),
            f"`batch_size` below which it takes more than {SHARE:.0%} of an update, in "
            "float16:",
            batch_table(),
            "The same arithmetic beside throughputs that Graphcore has published:",
            check_table(),
        ]
    )


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pod_cost")
    parser.add_argument("--write", action="store_true", help="into docs/how-to/pods.md")
    if parser.parse_args().write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replaced(text, PART, report()), encoding="utf-8")
    else:
        print(report())


def _fitted() -> tuple[Published, ...]:
    """The results that `STEP_SECONDS` comes from, which can't check the model."""
    resnet, *_ = MODELS
    return resnet.published[:2]


def _heads() -> list[str]:
    return [f"{number} replicas" for number in REPLICAS]


if __name__ == "__main__":
    main()
