# SPDX-License-Identifier: Apache-2.0
"""Find everything at once that PopTorch would refuse, mend it, and train.

Shows `model.check`. The first network is how such code looks on a processor: it reads
values, picks rows with a mask, branches on a tensor, computes with a tensor that is no
buffer, and stacks two LSTMs in one. PopTorch stops at the first of these, after
minutes. The check names all of them with their lines, in a second and on any machine.
The second network computes the same in a way that compiles.

    python examples/check.py

It takes a few seconds. The last line says how many faults the check named: 5.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import nn

from ipufit import CheckReport, IPUConfig, IPUModel

FEATURES, STEPS, CLASSES = 8, 12, 3
SEVERITIES = ("refused", "other numbers", "slow", "good to know")


class AsOnAProcessor(nn.Module):
    """Classifies series; five lines of it don't compile."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(FEATURES, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.scale = torch.full((16,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score the classes."""
        states, _ = self.encoder(x)
        last = states[:, -1] * self.scale
        if last.abs().max() > 10:
            last = last.clamp(-10, 10)
        last = last / last[last > 0].sum()
        return self.head(last) / last.abs().sum().item()


class AsOnAnIPU(nn.Module):
    """The same, with fixed shapes and without values in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(FEATURES, 16, batch_first=True)
        self.further = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Score the classes."""
        states, _ = self.encoder(x)
        states, _ = self.further(states)
        last = (states[:, -1] * self.scale).clamp(-10, 10)
        last = last / (torch.relu(last).sum() + 1e-3)
        return self.head(last) / (last.abs().sum() + 1e-3)


def series(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make waves of three frequencies, with noise."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, CLASSES, (count,), generator=generator)
    times = torch.arange(STEPS).view(1, STEPS, 1) * (1 + classes.view(-1, 1, 1)) / 2
    noise = torch.randn(count, STEPS, FEATURES, generator=generator)
    return times.sin() + 0.3 * noise, classes


def checked(module: nn.Module, count: int = 320) -> tuple[IPUModel, CheckReport]:
    """Return a model, and the findings of its check."""
    model = IPUModel(module, IPUConfig(micro_batch_size=32, seed=0))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    report = model.check(*series(count), batch_size=32)
    report.print()
    return model, report


def plot(reports: dict[str, CheckReport], path: str) -> None:
    """Draw the findings of both networks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(reports)
    for number, (name, report) in enumerate(reports.items()):
        found = Counter(finding.severity for finding in report.findings)
        places = [place + number * width for place in range(len(SEVERITIES))]
        axes.bar(places, [found[one] for one in SEVERITIES], width, label=name)
    axes.set_xticks([place + width / 2 for place in range(len(SEVERITIES))])
    axes.set_xticklabels(SEVERITIES)
    axes.set(ylabel="findings of model.check")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Check both networks, train the second; returns the faults of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="PATH", help="draw the findings")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    _, before = checked(AsOnAProcessor())
    model, after = checked(AsOnAnIPU())
    if after.is_refused:
        raise SystemExit("The second network doesn't run either.")
    model.fit(*series(320), batch_size=32, epochs=2, verbose=0)
    if args.plot:
        plot({"as on a processor": before, "as on an IPU": after}, args.plot)
    faults = len(before.of("refused"))
    print(f"faults that would each have ended a compilation: {faults}")
    return faults


if __name__ == "__main__":
    main()
