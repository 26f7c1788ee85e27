# SPDX-License-Identifier: Apache-2.0
"""Doubles of services for figures: they note down what they are told."""

from types import SimpleNamespace
from unittest.mock import MagicMock


class TensorBoardDouble:
    """The module `torch.utils.tensorboard`."""

    def __init__(self):
        self.scalars = []
        self.histograms = []
        self.texts = {}
        self.hparams = []
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

            def add_text(self, tag, text):
                double.texts[self.log_dir, tag] = text

            def add_hparams(self, settings, metrics, run_name):
                double.hparams.append((self.log_dir, settings, metrics, run_name))

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
        self.config = WandbConfig(arguments.get("config", {}))
        self.exit_code = None

    def log(self, figures):
        assert self.exit_code is None
        self.logged.append(figures)

    def finish(self, exit_code=0):
        self.exit_code = exit_code
        self.wandb.run = None


class WandbConfig(dict):
    def setdefaults(self, settings):
        self.update({**settings, **self})


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
            data=SimpleNamespace(params={}),
            arguments=arguments,
            logged=[],
            texts={},
            status=None,
        )
        self.runs.append(self.active)
        return self.active

    def get_run(self, run_id):
        return next(run for run in self.runs if run.info.run_id == run_id)

    def log_params(self, params):
        assert not params.keys() & self.active.data.params
        assert all(len(str(value)) <= 250 for value in params.values())
        self.active.data.params.update(params)

    def log_text(self, text, artifact_file):
        self.active.texts[artifact_file] = text

    def log_metrics(self, metrics, step):
        self.active.logged.append((step, metrics))

    def end_run(self, status):
        self.active.status, self.active = status, None


class PyplotDouble:
    """The module `matplotlib.pyplot`, where it isn't installed: it draws nothing."""

    def subplots(self, rows, columns, **settings):
        every = [MagicMock() for _ in range(rows * columns)]
        for axes in every:  # numbers, which those who draw compute with
            axes.get_window_extent.return_value = SimpleNamespace(width=99, height=99)
            axes.figure.dpi, axes.imshow.return_value.norm.vmax = 99, 1.0
        return MagicMock(axes=every), SimpleNamespace(flat=every)

    def get_backend(self):
        return "agg"
