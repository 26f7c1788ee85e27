# SPDX-License-Identifier: Apache-2.0
"""Options of PopTorch that ipufit has no argument for, set in two ways.

Shows `customize`, a function that changes the options which ipufit makes, for training
and for inference. And it shows `training_options` and `inference_options`: whole
options, such as a PopTorch script has already, that are taken as they are. Both train
what the fields of `IPUConfig` alone would train.

    python examples/own_options.py

It takes a few seconds. The last line says how many of the three ways end with the
same loss: 3 of 3.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit
from ipufit import poptorch


def customize(options: poptorch.Options, is_training: bool) -> None:
    """Set options that have no field, on top of those that ipufit has set."""
    options.enableStableNorm(True)
    options._Popart.set("outlineThreshold", 10.0)
    if is_training:
        options._Popart.setEngineOptions({"opt.useAutoloader": "true"})


def options_of_a_script(is_training: bool) -> poptorch.Options:
    """Make options as a script without ipufit does."""
    options = poptorch.Options().deviceIterations(4).enableStableNorm(True)
    options.outputMode(poptorch.OutputMode.All)
    if is_training:
        options.Training.gradientAccumulation(2)
    return options


FIELDS = {"device_iterations": 4, "gradient_accumulation": 2, "seed": 0}
WAYS = {
    "fields alone": ipufit.IPUConfig(**FIELDS),
    "customize": ipufit.IPUConfig(**FIELDS, customize=customize),
    "own options": ipufit.IPUConfig(
        seed=0,  # which also shuffles the samples
        training_options=options_of_a_script(is_training=True),
        inference_options=options_of_a_script(is_training=False),
    ),
}


def show_changes(made: poptorch.Options, changed: poptorch.Options) -> None:
    """Print the settings that differ, as PopTorch names them."""
    before, after = made.toDict(), changed.toDict()
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            print(f"  {key}: {before.get(key)!r} became {after.get(key)!r}")


def train(config: ipufit.IPUConfig, epochs: int) -> list[float]:
    """Train, and evaluate; returns the loss of each epoch, then that of evaluate."""
    torch.manual_seed(0)
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    network = nn.Sequential(
        nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)
    )
    model = ipufit.IPUModel(network, config)
    model.compile("adam", "cross_entropy")
    data = (x[:1792] / 16).float(), y[:1792]  # 14 calls of 4 * 32
    history = model.fit(*data, batch_size=32, epochs=epochs, verbose=0)
    return [*history.history["loss"], model.evaluate(*data, verbose=0)["loss"]]


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Draw the losses of the three ways, later ones inside of earlier ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for (way, losses), width in zip(curves.items(), (7, 4, 1.5)):
        axes.plot(range(1, len(losses)), losses[:-1], linewidth=width, label=way)
    axes.set(xlabel="epoch", ylabel="loss")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train in three ways; returns the number of those with the same losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="for each of the ways")
    parser.add_argument("--plot", metavar="PATH", help="draw the losses into this file")
    args = parser.parse_args(arguments)

    plan = WAYS["customize"].training_plan(batch_size=32)
    made, changed = (
        WAYS[way].build_training_options(plan) for way in ("fields alone", "customize")
    )
    print("customize changes these settings of training:")
    show_changes(made, changed)

    curves = {way: train(config, args.epochs) for way, config in WAYS.items()}
    for way, losses in curves.items():
        print(f"{way:12}  loss after training: {losses[-1]:.6f}")
    if args.plot:
        plot(curves, args.plot)
    expected = curves["fields alone"]
    equal = sum(
        max(abs(a - b) for a, b in zip(losses, expected)) < 1e-5
        for losses in curves.values()
    )
    print(f"ways with equal losses: {equal} of {len(curves)}")
    return float(equal)


if __name__ == "__main__":
    main()
