# SPDX-License-Identifier: Apache-2.0
"""Compare which samples an accuracy covers under each of PopTorch's output modes.

Shows four trainings that differ only in the output mode of PopTorch's options. All of
them end with the same weights. Only `All`, ipufit's default, and `Sum` report an
accuracy over every sample. For `Final` and `EveryN` a `CoverageWarning` says which
samples are counted.

    python examples/output_modes.py

It takes a few seconds. The last line says how many modes report the accuracy over all
samples: 2 of 4.
"""

from __future__ import annotations

import argparse
import warnings
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit
from ipufit import poptorch

MODES = {
    "All": (poptorch.OutputMode.All,),
    "Sum": (poptorch.OutputMode.Sum,),
    "EveryN": (poptorch.OutputMode.EveryN, 5),  # every fifth micro-batch
    "Final": (poptorch.OutputMode.Final,),  # the last micro-batch of a call
}
BATCH_SIZE = 32  # of two micro-batches
UPDATES_PER_CALL = 10


class Run(NamedTuple):
    """The accuracies of all epochs, what they cover, and the weights in the end."""

    accuracies: list[float]
    coverage: str
    weights: Tensor


def train(mode: str, epochs: int) -> Run:
    """Train with the options that ipufit makes, but for the output mode."""

    def choose(options: poptorch.Options, is_training: bool) -> None:
        if is_training:  # evaluate() and predict() need all rows
            options.outputMode(*MODES[mode])

    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    config = ipufit.IPUConfig(
        micro_batch_size=BATCH_SIZE // 2,
        device_iterations=UPDATES_PER_CALL,
        customize=choose,
        seed=0,
    )
    model = ipufit.IPUModel(network, config)
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    data = (x[:1600] / 16).float(), y[:1600]  # five calls of 320
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ipufit.CoverageWarning)
        history = model.fit(*data, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    for warning in caught:
        print(f"{warning.category.__name__}: {warning.message}")
    weights = torch.cat([torch.from_numpy(w).flatten() for w in model.get_weights()])
    return Run(history.history["accuracy"], history.coverage, weights)


def plot(runs: dict[str, Run], path: str) -> None:
    """Draw the accuracies that each mode reports."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for (mode, run), width in zip(runs.items(), (6, 3, 1.5, 1.5)):
        label = f"{mode}: {run.coverage.split(': ')[-1] or 'every sample'}"
        epochs = range(1, 1 + len(run.accuracies))
        axes.plot(epochs, run.accuracies, linewidth=width, label=label)
    axes.set(xlabel="epoch", ylabel="accuracy that is reported")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train in each mode; returns the number of those that report all samples."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="in each mode")
    parser.add_argument("--plot", metavar="PATH", help="draw them into this file")
    args = parser.parse_args(arguments)

    runs = {mode: train(mode, args.epochs) for mode in MODES}
    exact = runs["All"]
    for mode, run in runs.items():
        same = "the same" if torch.equal(run.weights, exact.weights) else "other"
        print(f"{mode:6}  accuracy {run.accuracies[-1]:.4f}  {same} weights")
    if args.plot:
        plot(runs, args.plot)
    agree = [run.accuracies == exact.accuracies for run in runs.values()]
    print(f"modes that count every sample: {sum(agree)} of {len(agree)}")
    return float(sum(agree))


if __name__ == "__main__":
    main()
