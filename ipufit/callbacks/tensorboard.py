# SPDX-License-Identifier: Apache-2.0
"""`TensorBoard`: figures for TensorBoard, without TensorFlow."""

from __future__ import annotations

import os
from typing import Any

from ipufit._files import file_errors

from .figure_logger import FigureLogger
from .learning_rate import learning_rate
from .optional import need


class TensorBoard(FigureLogger):
    """Write figures for TensorBoard, in Keras's folders and under Keras's tags.

    In `train`: `epoch_<name>` and `epoch_learning_rate` (of the first parameter group)
    at every epoch, 0-based, and `batch_<name>` at updates, if asked for. In
    `validation`: `epoch_<name>` without `val_`, and `evaluation_<name>_vs_iterations`
    at the updates made since `compile`, for every `evaluate` and validation.

    Show them with `tensorboard --logdir logs`.

    Args:
        log_dir: Where to.
        update_freq: `"epoch"`; or `"batch"`, or a number of updates: then also the
            figures of the epoch so far, after the call that reaches it.

    Raises:
        ConfigError: `update_freq` is something else; or there is no tensorboard.

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
    ) -> None:
        super().__init__(update_freq)
        self.log_dir = os.fspath(log_dir)
        module = need("torch.utils.tensorboard", "TensorBoard", "ipufit[tensorboard]")
        self._make_writer = module.SummaryWriter
        self._writers: dict[str, Any] = {}

    def open(self) -> None:
        """Files are made when there is something to write."""

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Write `batch_<name>`."""
        self._write("train", "batch_{}", logs, self.updates)

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Write `epoch_<name>`, and have it on the disk."""
        validation = {
            name[len("val_") :]: value
            for name, value in logs.items()
            if name.startswith("val_")
        }
        training = {n: value for n, value in logs.items() if not n.startswith("val_")}
        training["learning_rate"] = learning_rate(self.model.optimizer)
        self._write("train", "epoch_{}", training, epoch)
        self._write("validation", "epoch_{}", validation, epoch)
        self._flush()

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Write `evaluation_<name>_vs_iterations`."""
        updates = self.model.num_updates
        self._write("validation", "evaluation_{}_vs_iterations", logs, updates)
        self._flush()

    def close(self) -> None:
        """Close the files, after an error too."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, folder: str, tag: str, logs: dict[str, Any], step: int) -> None:
        if not logs:
            return
        if folder not in self._writers:
            path = os.path.join(self.log_dir, folder)
            with file_errors("can't be written", path):
                self._writers[folder] = self._make_writer(path)
        for name, value in logs.items():
            self._writers[folder].add_scalar(tag.format(name), value, step)

    def _flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()
