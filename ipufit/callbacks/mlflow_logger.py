# SPDX-License-Identifier: Apache-2.0
"""`MLflowLogger`: figures for MLflow."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, count, optional, text

from .figure_logger import FigureLogger
from .optional import need


class MLflowLogger(FigureLogger):
    """Log figures to MLflow.

    Figures of epochs keep their names, with the epoch (0-based) as their step; those
    of calls are `batch_<name>`, with the updates as their step. They go to the run
    that is active. If there is none, one is begun with the first epoch and ended with
    `fit`, as `FAILED` if `fit` raised. A `fit` that is resumed goes on with its run.

    Args:
        update_freq: `"epoch"`; or `"batch"`, or a number of updates: then also the
            figures of the epoch so far, after the call that reaches it.
        **arguments: Of `mlflow.start_run`, such as `run_name` or `tags`.

    Attributes:
        run_id: Of the run that it began; None if it began none.

    Raises:
        ConfigError: `update_freq` is something else; or there is no mlflow.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = MLflowLogger(run_name="first")
        ... except ConfigError as error:
        ...     "pip install mlflow" in str(error)
        ... else:
        ...     callback.run_id is None
        True
    """

    saved_attributes = ("updates", "run_id")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "updates": count,
        "run_id": optional(text),
    }

    def __init__(self, update_freq: int | str = "epoch", **arguments: Any) -> None:
        super().__init__(update_freq)
        self._mlflow = need("mlflow", "MLflowLogger", "mlflow")
        self.arguments = arguments
        self.run_id: str | None = None
        self._active_id: str | None = None
        self._is_own = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run."""
        super().on_train_begin(logs)
        self.run_id = None

    def open(self) -> None:
        """Take the run that is active, or begin one."""
        if self._active_id is not None:
            return
        active = self._mlflow.active_run()
        if active is None:
            again = {"run_id": self.run_id} if self.run_id else {}
            active = self._mlflow.start_run(**{**self.arguments, **again})
            self._is_own = True
            self.run_id = active.info.run_id
        self._active_id = active.info.run_id

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the figures of an epoch."""
        self._mlflow.log_metrics(dict(logs), step=epoch)

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log `batch_<name>`."""
        figures = {f"batch_{name}": value for name, value in logs.items()}
        self._mlflow.log_metrics(figures, step=self.updates)

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """End the run that it began."""
        self._end("FINISHED")

    def close(self) -> None:
        """The same after an error."""
        self._end("FAILED")

    def _end(self, status: str) -> None:
        if self._is_own:
            self._mlflow.end_run(status=status)
        self._active_id, self._is_own = None, False
