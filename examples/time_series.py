# SPDX-License-Identifier: Apache-2.0
"""Forecast a time series with an LSTM, and compare it with a naive forecast.

Shows windows of a series as data, a recurrent network, gradients that are clipped, and
a metric beside the loss. The series has a load for each hour: a daily rhythm, another
one at weekends, and noise that changes slowly. The network sees two days and predicts
the next hour. Naive forecasts are the load an hour before, or a day before.

    python examples/time_series.py

It takes some seconds. The last line says by how much the mean absolute error, on weeks
that the network hasn't seen, is less than that of the better naive forecast: about 48%.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import ipufit

DAY, WEEK = 24, 7 * 24  # hours
WINDOW = 2 * DAY  # hours that the network sees


class Forecaster(nn.Module):
    """An LSTM of one layer (PopTorch has no others), and a layer on its last output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, window: Tensor) -> Tensor:
        """Predict the next hour's values [N, 1] from windows [N, 48, 1]."""
        outputs, _ = self.lstm(window)
        return window[:, -1] + self.head(outputs[:, -1])  # the change is foretold


def make_series(weeks: int) -> Tensor:
    """Make the load of each hour, of mean 0 and about 1 in size."""
    hours = torch.arange(weeks * WEEK)
    angle = 2 * math.pi * (hours % DAY) / DAY
    is_weekend = hours % WEEK >= 5 * DAY
    rhythm = angle.sin() + 0.5 * (2 * angle + 1).sin()
    rhythm = torch.where(is_weekend, 0.5 * (angle - 1).sin() - 0.5, rhythm)
    noise, previous = torch.zeros(len(hours)), 0.0
    for hour, shock in enumerate(0.1 * torch.randn(len(hours))):
        noise[hour] = previous = 0.8 * previous + shock
    return rhythm + noise


def windows(series: Tensor) -> tuple[Tensor, Tensor]:
    """Cut a series into all windows [N, 48, 1], and the hours after them [N, 1]."""
    cut = series.unfold(0, WINDOW + 1, 1)
    return cut[:, :-1, None].contiguous(), cut[:, -1:].contiguous()


def plot(series: dict[str, Tensor], path: str) -> None:
    """Draw four days of the test: the load, and forecasts of each hour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(series.items(), ("C0", "C7:", "C1--")):
        axes.plot(values[2 * DAY : 6 * DAY].flatten().numpy(), style, label=name)
    axes.set(xlabel="hour", ylabel="load")
    axes.legend()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> float:
    """Train and forecast; returns the share of the naive error that is saved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weeks", type=int, default=16, help="to train on")
    parser.add_argument("--epochs", type=int, default=12, help="of training")
    parser.add_argument(
        "--plot", metavar="PATH", help="draw the forecast into this file"
    )
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    series = make_series(args.weeks + 4)  # the last four are for the test
    x, y = windows(series[: args.weeks * WEEK + WINDOW])  # 168 windows a week
    test_x, test_y = windows(series[args.weeks * WEEK :])

    model = ipufit.IPUModel(Forecaster(32), ipufit.IPUConfig(seed=0))
    optimizer = ipufit.Optimizer("adamw", 5e-3, global_clipnorm=1.0)
    model.compile(optimizer, "mse", metrics=["mae"], lr_schedule="cosine")
    model.fit(x, y, batch_size=32, epochs=args.epochs, verbose=2)

    error = model.evaluate(test_x, test_y, verbose=0)["mae"]
    print(f"mean absolute error of the LSTM: {error:.3f}")
    naive = {"an hour before": test_x[:, -1], "a day before": test_x[:, -DAY]}
    errors = {name: (x - test_y).abs().mean().item() for name, x in naive.items()}
    for name, naive_error in errors.items():
        print(f"mean absolute error of the load of {name}: {naive_error:.3f}")
    best = min(errors, key=lambda name: errors[name])
    if args.plot:
        forecasts = {best: naive[best], "LSTM": model.predict(test_x, verbose=0)}
        plot({"load": test_y, **forecasts}, args.plot)
    saved = 1 - error / errors[best]
    print(f"less error than the better naive forecast: {saved:.1%}")
    return saved


if __name__ == "__main__":
    main()
