# SPDX-License-Identifier: Apache-2.0
"""One batch size and one curve, on 1 to 16 replicas in 1 to 4 processes.

Shows that `batch_size` counts all replicas of all processes: what changes between the
runs is the command line of `ipufit launch`, and nothing in `train`.

    ipufit launch --processes 4 --replicas 8 examples/scaling_curve.py --data mnist
    python examples/scaling_curve.py --plot scaling-curve.svg

The first command trains in 4 processes with 2 replicas each, and prints the accuracy on
the test images once. The second one launches the script for each layout, and compares
the losses of every epoch and the test accuracy. The plot needs matplotlib. On two cores
it takes a minute or two. The last line says how many of the curves are that of one
replica, to within 0.0001 in the losses and two images of 10,000 in the accuracy: sums
are rounded in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

import torch
from handwriting import load_digits
from torch import nn

import ipufit
from ipufit.distributed import get_process_info

LAYOUTS = ["1x1", "1x16", "2x8", "4x4", "4x1"]  # processes x replicas of each
SAME_LOSS, SAME_ACCURACY = 1e-4, 2e-4


def train(args: argparse.Namespace) -> None:
    """Train in as many processes and replicas as the launcher has made."""
    digits = load_digits(args.data, args.data_dir)
    torch.manual_seed(args.seed)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.MaxPool2d(4), nn.Flatten(), nn.ReLU(), nn.Linear(288, 10)
    )
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=args.seed))
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    history = model.fit(digits.train, batch_size=args.batch_size, epochs=args.epochs)
    accuracy = model.evaluate(digits.test, verbose=0)["accuracy"]
    if args.train_into is None:
        print(f"test accuracy: {accuracy:.2%}")
    elif get_process_info().is_first:
        with open(args.train_into, "w", encoding="utf-8") as file:
            json.dump({"losses": history.history["loss"], "accuracy": accuracy}, file)


def launch(layout: str, arguments: list[str]) -> dict:
    """Train in a layout such as "2x8", and return the losses and the accuracy."""
    processes, replicas = map(int, layout.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "curve.json")
        command = [
            *(sys.executable, "-m", "ipufit", "launch"),
            *("--processes", str(processes)),
            *("--replicas", str(processes * replicas)),
            *(__file__, "--train-into", result, *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        with open(result, encoding="utf-8") as file:
            return json.load(file)


def plot(curves: dict, path: str) -> None:
    """Draw the losses of all layouts."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "ipufit"  # the same file each time
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for number, (layout, curve) in enumerate(curves.items()):
        epochs = range(1, 1 + len(curve["losses"]))
        label = f"{layout.replace('x', ' x ')}: test accuracy {curve['accuracy']:.2%}"
        width = 2 * (len(curves) - number)  # later lines are drawn inside of earlier
        axes.plot(epochs, curve["losses"], linewidth=width, label=label)
    axes.set(xlabel="epoch", ylabel="loss", title="processes x replicas of each")
    axes.legend()
    metadata = {"Date": None} if path.endswith(".svg") else {}
    figure.savefig(path, bbox_inches="tight", metadata=metadata)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The switches; those that training needs are passed on to it."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layouts", nargs="+", default=LAYOUTS, help="processes x replicas of each")
    add("--batch-size", type=int, default=64, help="images of an update, over all")
    add("--epochs", type=int, default=5, help="times to go through the images")
    add("--data", choices=["mnist", "digits", "auto"], default="digits", help="images")
    add("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    add("--seed", type=int, default=0, help="of weights and order")
    add("--plot", metavar="FILE", help="draw the curves into this file")
    add("--train-into", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> float:
    """Launch a run for each layout; returns how many curves are that of the first."""
    args = parse_arguments(arguments)
    if args.train_into is not None or get_process_info().count > 1:
        train(args)
        return 0.0
    passed_on = [
        *("--batch-size", str(args.batch_size), "--epochs", str(args.epochs)),
        *("--data", args.data, "--data-dir", args.data_dir, "--seed", str(args.seed)),
    ]
    curves = {}
    for layout in args.layouts:
        curve = curves[layout] = launch(layout, passed_on)
        losses = ", ".join(f"{loss:.5f}" for loss in curve["losses"])
        print(f"{layout}: losses {losses}; test accuracy {curve['accuracy']:.2%}")
    if args.plot:
        plot(curves, args.plot)
    first = curves[args.layouts[0]]
    num_same = sum(
        abs(curve["accuracy"] - first["accuracy"]) < SAME_ACCURACY
        and all(
            abs(loss - other) < SAME_LOSS
            for loss, other in zip(curve["losses"], first["losses"])
        )
        for curve in curves.values()
    )
    print(f"equal curves: {num_same} of {len(curves)}")
    return float(num_same)


if __name__ == "__main__":
    main()
