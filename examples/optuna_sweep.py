# SPDX-License-Identifier: Apache-2.0
"""Sweep learning rates: with Optuna where it is installed, else on a plain grid.

Shows one model that trains again and again: its first weights are put back, the rate
is another, and no program is compiled after the first. Optuna's `ask` and `tell` fit
around it, so a sweep needs no other form of the script.

    pip install optuna
    python examples/optuna_sweep.py --trials 12

Without Optuna the script says how to install it, and tries rates at equal distances.
Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the best
validation accuracy that a rate has reached after three epochs: about 90%.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any, Callable, Iterator, Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

LOWEST, HIGHEST = 1e-4, 1.0


def grid(trials: int) -> Iterator[tuple[float, Callable[[float], Any]]]:
    """Yield rates at equal distances of their logarithms, and a function for each."""
    for step in torch.linspace(0, 1, trials).tolist():
        yield LOWEST * (HIGHEST / LOWEST) ** step, lambda accuracy: None


def optunas(trials: int) -> Iterator[tuple[float, Callable[[float], Any]]]:
    """Yield rates that Optuna chooses, and a function that takes the accuracy."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=4)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(trials):
        trial = study.ask()
        rate = trial.suggest_float("rate", LOWEST, HIGHEST, log=True)
        yield rate, lambda accuracy, trial=trial: study.tell(trial, accuracy)


def plot(tried: list[tuple[float, float]], path: str) -> None:
    """Draw the accuracy of each rate; later ones are darker."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    rates, accuracies = zip(*tried)
    numbers = range(1, 1 + len(tried))
    points = axes.scatter(rates, accuracies, c=numbers, cmap="viridis_r")
    axes.set(xscale="log", xlabel="learning rate", ylabel="validation accuracy")
    figure.colorbar(points, label="trial")
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Sweep; returns the best validation accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs of a rate")
    parser.add_argument("--trials", type=int, default=9, help="number of rates")
    parser.add_argument("--plot", metavar="FILE", help="draw rates and accuracies")
    args = parser.parse_args(arguments)
    has_optuna = find_spec("optuna") is not None
    if not has_optuna:
        print("Optuna isn't installed (pip install optuna): a plain grid instead.")

    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    run = {"batch_size": 50, "epochs": args.epochs, "verbose": 0}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    first_weights = model.get_weights()

    tried = []
    for rate, tell in (optunas if has_optuna else grid)(args.trials):
        model.set_weights(first_weights)
        optimizer = ipufit.Optimizer("adam", rate)
        model.compile(optimizer, "cross_entropy", metrics=["accuracy"])
        model.fit(x[:1500], y[:1500], **run)
        results = model.evaluate(x[1500:], y[1500:], verbose=0)
        tell(results["accuracy"])
        tried.append((rate, results["accuracy"]))
        print(f"rate {rate:.5f}: validation accuracy {results['accuracy']:.2%}")
    if args.plot:
        plot(tried, args.plot)
    best = max(accuracy for _, accuracy in tried)
    print(f"best accuracy: {best:.2%}")
    return best


if __name__ == "__main__":
    main()
