# SPDX-License-Identifier: Apache-2.0
"""Search for a learning rate with Optuna, and give up trials that do badly.

Shows one model that trains again and again: its first weights are put back, the rate
is another, and no program is compiled after the first trial. `OptunaPruning` reports
each epoch to the trial, and ends the run when Optuna's pruner gives the trial up.

    pip install optuna
    python examples/optuna_sweep.py --trials 12

Without IPUs it runs on ipufit's emulator, in some seconds. The last line is the best
validation accuracy that a rate has reached after four epochs: about 90%.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

try:
    import optuna
except ModuleNotFoundError:
    sys.exit("This example needs Optuna: pip install optuna")


def is_pruned(trial: Any) -> bool:
    """Whether a trial was given up."""
    return trial.state == optuna.trial.TrialState.PRUNED


def plot(trials: list[Any], path: str) -> None:
    """Draw the accuracies of each trial; those that were given up are gray."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for trial in trials:
        epochs, accuracies = zip(*trial.intermediate_values.items())
        label = None if is_pruned(trial) else f"rate {trial.params['rate']:.4f}"
        color = "lightgray" if is_pruned(trial) else None
        axes.plot([1 + e for e in epochs], accuracies, "o-", label=label, color=color)
    axes.set(xlabel="epoch", ylabel="validation accuracy")
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> float:
    """Search; returns the best validation accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="epochs of a trial")
    parser.add_argument("--trials", type=int, default=12, help="number of trials")
    parser.add_argument("--plot", metavar="FILE", help="draw the trials")
    args = parser.parse_args(arguments)

    data = load_digits()
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = ipufit.IPUModel(network, ipufit.IPUConfig(seed=0))
    first_weights = model.get_weights()

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("rate", 1e-4, 1.0, log=True)
        model.set_weights(first_weights)
        model.compile(
            ipufit.Optimizer("adam", rate), "cross_entropy", metrics=["accuracy"]
        )
        history = model.fit(
            x[:1500],
            y[:1500],
            batch_size=50,
            epochs=args.epochs,
            validation_data=(x[1500:], y[1500:]),
            callbacks=[ipufit.OptunaPruning(trial, "val_accuracy")],
            verbose=0,
        )
        return history.history["val_accuracy"][-1]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(objective, n_trials=args.trials)

    for trial in study.trials:
        epochs = len(trial.intermediate_values)
        end = f"given up after {epochs} of" if is_pruned(trial) else "trained for"
        print(f"rate {trial.params['rate']:.5f}: {end} {args.epochs} epochs")
    if args.plot:
        plot(study.trials, args.plot)
    print(f"best accuracy: {study.best_value:.2%}")
    return study.best_value


if __name__ == "__main__":
    main()
