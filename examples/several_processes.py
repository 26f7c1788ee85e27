# SPDX-License-Identifier: Apache-2.0
"""Train one model in two processes, which share the samples of each update.

Shows that a script needs nothing for it, except to write its own files in one process
only. `python` starts the processes by `ipufit launch`, and reads what they have done.

    ipufit launch --processes 2 examples/several_processes.py
    python examples/several_processes.py

`ipufit launch` starts PopRun where PopTorch is installed, torchrun on other machines;
there both processes run on ipufit's emulator, in some seconds. `batch_size` counts the
samples of both. Each process reads its half of an update, losses and metrics are those
of all samples, and both end with the same weights. The last line is the share of the
training samples that exactly one of the two processes has read: 100.00%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ipufit
from ipufit.distributed import get_process_info


class Digits(torch.utils.data.Dataset):
    """scikit-learn's digits; it writes down which of them it was asked for."""

    def __init__(self, count: int) -> None:
        data = load_digits()
        self.images = torch.from_numpy(data.data[:count]).float() / 16
        self.labels = torch.from_numpy(data.target[:count])
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return self.images[index], self.labels[index]


def train(epochs: int, folder: str | None) -> None:
    """What each process does: it is what a single one would do, but for the files."""
    info = get_process_info()
    torch.manual_seed(0)  # processes on a pod must begin with equal weights
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    digits = Digits(1792)
    history = model.fit(digits, batch_size=64, epochs=epochs, verbose=0).history
    # No `if` around it: all processes call the model's methods together.
    results = model.evaluate(Digits(1792), verbose=0)
    if info.is_first:
        print(f"accuracy in {info.count} processes: {results['accuracy']:.2%}")
    if folder is not None:
        weights = torch.cat([torch.as_tensor(w).flatten() for w in model.get_weights()])
        report = {
            "read": digits.read[-len(digits) // info.count :],  # in the last epoch
            "losses": history["loss"],
            "weights": weights.tolist(),
        }
        path = Path(folder, f"process-{info.index}.json")
        path.write_text(json.dumps(report), encoding="utf-8")


def launch(epochs: int) -> list[dict[str, Any]]:
    """Start this script in two processes; returns what each of them reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ipufit", "launch", "--processes", "2"]
        command += [__file__, "--epochs", str(epochs), "--report-into", folder]
        subprocess.run(command, check=True)
        reports = sorted(Path(folder).glob("process-*.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in reports]


def plot(reports: list[dict[str, Any]], path: str) -> None:
    """Draw which sample was read when, and by which process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for number, report in enumerate(reports):
        read = report["read"]
        updates = [place // 32 + 1 for place in range(len(read))]
        axes.plot(updates, read, ".", markersize=3, label=f"process {number}")
    axes.set(xlabel="update", ylabel="sample", title="who read what in the last epoch")
    figure.legend(loc="outside right upper")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train in two processes; returns the share of samples that one has read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="times through the data")
    parser.add_argument("--plot", metavar="FILE", help="draw who read what")
    parser.add_argument("--report-into", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if get_process_info().count > 1:
        train(args.epochs, args.report_into)
        return 1.0
    first, second = reports = launch(args.epochs)
    for name in ("losses", "weights"):
        print(f"equal {name}: {first[name] == second[name]}")
    if args.plot:
        plot(reports, args.plot)
    share = len(set(first["read"]) ^ set(second["read"])) / 1792
    print(f"samples that one process has read: {share:.2%}")
    return share


if __name__ == "__main__":
    main()
