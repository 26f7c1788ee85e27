# SPDX-License-Identifier: Apache-2.0
"""`MLflowLogger`: metrics for MLflow."""

from __future__ import annotations

from typing import Any

from ipufit._optional import need

from .figure_logger import RunLogger


class MLflowLogger(RunLogger):
    """Log figures to MLflow.

    Figures of epochs keep their names, with the epoch (0-based) as their step. Figures
    of calls are `batch_<name>`, with the number of updates as their step. They go to
    the active run. If there is none, one is begun with the first epoch and ended with
    `fit`, as `FAILED` if `fit` raised. A resumed `fit` continues its run.

    Args:
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.
        **arguments: Arguments of `mlflow.start_run`, such as `run_name` or `tags`.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` has another value, or mlflow isn't installed.

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

    def __init__(self, update_freq: int | str = "epoch", **arguments: Any) -> None:
        super().__init__(update_freq, arguments)
        self._mlflow = need("mlflow", "MLflowLogger", "mlflow")

    def active_run(self) -> Any:
        """Return MLflow's active run, or None."""
        return self._mlflow.active_run()

    def begin_run(self) -> Any:
        """Begin a run, or continue the run of `run_id`."""
        known = {"run_id": self.run_id} if self.run_id else {}
        run = self._mlflow.start_run(**{**self.arguments, **known})
        self.run_id = run.info.run_id
        return run

    def end_run(self, *, is_failed: bool) -> None:
        """End the run as `FINISHED` or `FAILED`."""
        self._mlflow.end_run(status="FAILED" if is_failed else "FINISHED")

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the metrics of an epoch."""
        self._mlflow.log_metrics(dict(logs), step=epoch)

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log the metrics so far as `batch_<name>`."""
        figures = {f"batch_{name}": value for name, value in logs.items()}
        self._mlflow.log_metrics(figures, step=self.updates)
