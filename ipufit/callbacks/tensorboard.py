# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: metrics for TensorBoard, without TensorFlow."""

from __future__ import annotations

import os
from typing import Any

from ipufit._files import file_errors
from ipufit._optional import need
from ipufit.batching import check_count

from .figure_logger import FigureLogger
from .histograms import histogram_values, is_histogram_due
from .learning_rate import learning_rate


class TensorBoard(FigureLogger):
    """Write figures for TensorBoard, in Keras's folders and under Keras's tags.

    In `train`: `epoch_<name>` and `epoch_learning_rate` (of the first parameter group)
    for every epoch, 0-based, and `batch_<name>` for updates, with `update_freq`. In
    `validation`: `epoch_<name>` without `val_`, and for every `evaluate` and validation
    `evaluation_<name>_vs_iterations`, at the number of updates since `compile`.
    With `histogram_freq` also, in `train`, a histogram of each weight and buffer of
    floats, under its name with `/` for `.`, so that TensorBoard groups them by module.

    Show them with `tensorboard --logdir logs`.

    Args:
        log_dir: Directory to write to.
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.
        histogram_freq: Number of epochs from one histogram of the weights to the next,
            from the first epoch on; 0 for none. Each brings all weights to the host,
            and leaves out values that aren't finite.

    Raises:
        ConfigError: If `update_freq` or `histogram_freq` has another value, or
            tensorboard isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = TensorBoard("logs", update_freq=100)
        ... except ConfigError as error:
        ...     "pip install ipufit[tensorboard]" in str(error)
        ... else:
        ...     callback.update_freq == 100
        True
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        update_freq: int | str = "epoch",
        histogram_freq: int = 0,
    ) -> None:
        super().__init__(update_freq)
        check_count("histogram_freq", histogram_freq)
        self.histogram_freq = histogram_freq
        self.log_dir = os.fspath(log_dir)
        module = need("torch.utils.tensorboard", "TensorBoard", "ipufit[tensorboard]")
        self._make_writer = module.SummaryWriter
        self._writers: dict[str, Any] = {}

    def open(self) -> None:
        """Do nothing: the first metric creates the file."""

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Write the metrics so far as `batch_<name>`."""
        self._write("train", "batch_{}", logs, self.updates)

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write the metrics of an epoch as `epoch_<name>`, and flush the files."""
        training, validation = {}, {}
        for name, value in logs.items():
            if name.startswith("val_"):
                validation[name[len("val_") :]] = value
            else:
                training[name] = value
        training["learning_rate"] = learning_rate(self.model.optimizer)
        self._write("train", "epoch_{}", training, epoch)
        self._write("validation", "epoch_{}", validation, epoch)
        if is_histogram_due(self.histogram_freq, epoch):
            writer = self._writer("train")
            for name, values in histogram_values(self.model):
                writer.add_histogram(name.replace(".", "/"), values, epoch)
        self._flush()

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Write the metrics of an evaluation as `evaluation_<name>_vs_iterations`."""
        updates = self.model.num_updates
        self._write("validation", "evaluation_{}_vs_iterations", logs, updates)
        self._flush()

    def close(self) -> None:
        """Close the files, also after an error."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, folder: str, tag: str, logs: dict[str, Any], step: int) -> None:
        if not logs:
            return
        writer = self._writer(folder)
        for name, value in logs.items():
            writer.add_scalar(tag.format(name), value, step)

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            path = os.path.join(self.log_dir, folder)
            with file_errors("can't be written", path):
                self._writers[folder] = self._make_writer(path)
        return self._writers[folder]

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()
