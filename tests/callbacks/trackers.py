# SPDX-License-Identifier: Apache-2.0
"""Doubles of services for figures: they note down what they are told."""

from types import SimpleNamespace
from unittest.mock import MagicMock


class TensorBoardDouble:
    """The module `torch.utils.tensorboard`."""

    def __init__(self):
        self.scalars = []
        self.histograms = []
        self.open = []
        double = self

        class SummaryWriter:
            def __init__(self, log_dir):
                self.log_dir = log_dir
                double.open.append(log_dir)

            def add_scalar(self, tag, value, step):
                assert self.log_dir in double.open
                double.scalars.append((self.log_dir, tag, value, step))

            def add_histogram(self, tag, values, step):
                assert self.log_dir in double.open
                double.histograms.append((self.log_dir, tag, values, step))

            def flush(self):
                assert self.log_dir in double.open

            def close(self):
                double.open.remove(self.log_dir)

        self.SummaryWriter = SummaryWriter


class WandbDouble:
    """The module `wandb`."""

    def __init__(self):
        self.run = None
        self.runs = []
        self.Histogram = list

    def init(self, **arguments):
        assert self.run is None
        self.run = WandbRun(self, arguments)
        self.runs.append(self.run)
        return self.run


class WandbRun:
    def __init__(self, wandb, arguments):
        self.wandb = wandb
        self.arguments = arguments
        self.id = arguments.get("id", f"id{len(wandb.runs)}")
        self.logged = []
        self.exit_code = None

    def log(self, figures):
        assert self.exit_code is None
        self.logged.append(figures)

    def finish(self, exit_code=0):
        self.exit_code = exit_code
        self.wandb.run = None


class MLflowDouble:
    """The module `mlflow`."""

    def __init__(self):
        self.runs = []
        self.active = None

    def active_run(self):
        return self.active

    def start_run(self, **arguments):
        assert self.active is None
        run_id = arguments.get("run_id", f"id{len(self.runs)}")
        self.active = SimpleNamespace(
            info=SimpleNamespace(run_id=run_id),
            arguments=arguments,
            logged=[],
            status=None,
        )
        self.runs.append(self.active)
        return self.active

    def log_metrics(self, metrics, step):
        self.active.logged.append((step, metrics))

    def end_run(self, status):
        self.active.status, self.active = status, None


class PyplotDouble:
    """The module `matplotlib.pyplot`, where it isn't installed: it draws nothing."""

    def subplots(self, rows, columns, **settings):
        every = [MagicMock() for _ in range(rows * columns)]
        return MagicMock(axes=every), SimpleNamespace(flat=every)

    def get_backend(self):
        return "agg"
