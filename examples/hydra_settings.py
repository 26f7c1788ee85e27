# SPDX-License-Identifier: Apache-2.0
"""Take the layout, the optimizer and the run from Hydra's settings.

Shows settings in YAML that become arguments by `**`: `IPUConfig(**settings.ipu)` takes
Hydra's lists as they are. The command line overrides single values, as in any program
with Hydra. In a script under `@hydra.main` the function gets the same `settings`.

    pip install hydra-core
    python examples/hydra_settings.py
    python examples/hydra_settings.py fit.epochs=8 optimizer.name=adamw

Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the test
accuracy on images of digits: about 89%.
"""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

try:
    import hydra
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf
except ModuleNotFoundError:
    sys.exit("This example needs Hydra: pip install hydra-core")

SETTINGS = """
ipu:
  pipeline: ["0", "2"]  # the layers that begin a stage
  gradient_accumulation: 4
  seed: 0
optimizer:
  name: adam
  learning_rate: 0.01
schedule:
  name: cosine
  warmup_updates: 10
fit:
  batch_size: 60
  epochs: 5
"""


def plot(history: ipufit.History, path: str) -> None:
    """Draw the loss of each epoch, in training and validation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for name in ("loss", "val_loss"):
        values = history.history[name]
        axes.plot(range(1, 1 + len(values)), values, "o-", label=name)
    axes.set(xlabel="epoch", ylabel="loss")
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train by the settings; returns the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="such as fit.epochs=3")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses")
    args = parser.parse_args(arguments)

    ConfigStore.instance().store(name="settings", node=OmegaConf.create(SETTINGS))
    with hydra.initialize(version_base=None):
        settings = hydra.compose("settings", overrides=args.overrides)
    config = ipufit.IPUConfig(**settings.ipu)
    optimizer = ipufit.Optimizer(**settings.optimizer)
    schedule = ipufit.Schedule(**settings.schedule)
    print(config, optimizer, schedule, sep="\n")

    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ipufit.IPUModel(network, config)
    model.compile(
        optimizer, "cross_entropy", metrics=["accuracy"], lr_schedule=schedule
    )
    test = x[1500:], y[1500:]
    history = model.fit(
        x[:1500], y[:1500], validation_data=test, verbose=0, **settings.fit
    )
    if args.plot:
        plot(history, args.plot)
    accuracy = model.evaluate(*test, verbose=0)["accuracy"]
    print(f"test accuracy: {accuracy:.2%}")
    return accuracy


if __name__ == "__main__":
    main()
