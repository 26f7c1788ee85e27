# SPDX-License-Identifier: Apache-2.0
"""Predict a number from a table of pandas, and compare it with linear regression.

Shows frames as data. `fit` and `evaluate` take a frame with the name of its target's
column, and `predict` ignores that column. The table is scikit-learn's: ten
measurements of each of 442 patients, and how far their diabetes has gone a year later.
Frames are scaled to mean 0 and deviation 1 by pandas, and predictions are scaled back.

    python examples/tabular.py

It takes some seconds. The last line says by how much the mean absolute error, on
patients that the network hasn't seen, is less than that of always predicting the mean:
about 25%. Linear regression has about the same: so few rows hold no more.
"""

from __future__ import annotations

import argparse
import sys

import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch import nn

import ipufit

try:
    import pandas
except ModuleNotFoundError:
    sys.exit("This example needs pandas: pip install pandas")

TARGET = "progression"  # the name of the column that is predicted


def make_network(columns: int, hidden: int = 32) -> nn.Sequential:
    """Make a network from rows [N, columns] to one number each [N, 1]."""
    return nn.Sequential(
        *(nn.Linear(columns, hidden), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.3)),
        nn.Linear(hidden, 1),
    )


def plot(truth: pandas.Series, predictions: dict, path: str) -> None:
    """Draw predictions over what they predict."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    grid = figure.subplots(1, len(predictions), sharey=True)
    for axes, (name, values) in zip(grid, predictions.items()):
        axes.axline((150, 150), slope=1, color="C7", linestyle=":")
        axes.plot(truth, values, ".")
        axes.set(title=name, xlabel="progression")
    grid[0].set(ylabel="prediction")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train and predict; returns the share of the mean's error that is saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="of training")
    parser.add_argument("--plot", metavar="PATH", help="draw predictions into this")
    args = parser.parse_args(arguments)

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame = frame.rename(columns={"target": TARGET})
    test = frame.sample(frac=0.25, random_state=0)
    train = frame.drop(test.index)
    mean, deviation = train.mean(), train.std()
    scaled, scaled_test = ((part - mean) / deviation for part in (train, test))

    torch.manual_seed(0)
    network = make_network(columns=len(frame.columns) - 1)
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    optimizer = ipufit.Optimizer("adamw", 3e-3)
    model.compile(optimizer, "mse", metrics=["mae", "r2"], lr_schedule="cosine")
    options = {"batch_size": 16, "epochs": args.epochs, "verbose": 2}
    model.fit(scaled, y=TARGET, drop_last="pad", **options)

    inputs = scaled.drop(columns=TARGET)
    line = LinearRegression().fit(inputs, scaled[TARGET])
    predictions = {
        "mean": 0 * scaled_test[TARGET],
        "linear regression": line.predict(scaled_test.drop(columns=TARGET)),
        "network": model.predict(scaled_test, verbose=0)[:, 0].numpy(),
    }
    errors = {}
    for name, values in predictions.items():
        predictions[name] = values * deviation[TARGET] + mean[TARGET]
        errors[name] = (predictions[name] - test[TARGET]).abs().mean()
        print(f"mean absolute error of the {name}: {errors[name]:.1f}")
    if args.plot:
        plot(test[TARGET], predictions, args.plot)
    saved = 1 - errors["network"] / errors["mean"]
    print(f"less error than by always predicting the mean: {saved:.1%}")
    return saved


if __name__ == "__main__":
    main()
