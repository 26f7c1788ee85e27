# SPDX-License-Identifier: Apache-2.0
"""`CometLogger`: figures for Comet."""

from __future__ import annotations

from typing import Any, Mapping

from ipufit._optional import need

from .figure_logger import RunLogger


class CometLogger(RunLogger):
    """Log figures to Comet.

    Figures of epochs keep their names, with the epoch (0-based) and the number of
    updates as their step. Figures of calls are `batch_<name>`, with the number of
    updates. They go to the running experiment. If there is none, one is begun with the
    first epoch and ended with `fit`, with the tag `failed` if `fit` raised. A resumed
    `fit` continues its experiment.

    Args:
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.
        parameters: Parameters to log when the experiment begins, such as
            `{"lr": 0.1}`; None for none.
        **arguments: Arguments of `comet_ml.start`, such as `project_name`, or
            `online=False` for an experiment in a file, which `comet upload` sends.

    Attributes:
        run_id: Key of the experiment that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` has another value, or comet_ml isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = CometLogger(project_name="mnist", online=False)
        ... except ConfigError as error:
        ...     "pip install comet_ml" in str(error)
        ... else:
        ...     callback.run_id is None
        True
    """

    def __init__(
        self,
        update_freq: int | str = "epoch",
        *,
        parameters: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(update_freq, arguments)
        self.parameters = dict(parameters or {})
        self._comet = need("comet_ml", "CometLogger", "comet_ml")

    def open(self) -> None:
        """Join the running experiment, or begin one, and log the parameters."""
        is_new = self._active is None
        super().open()
        if is_new and self.parameters:
            self._active.log_parameters(self.parameters)

    def active_run(self) -> Any:
        """Return Comet's running experiment, or None."""
        running = self._comet.get_running_experiment()
        return None if running is None or running.ended else running

    def begin_run(self) -> Any:
        """Begin an experiment, or continue that of `run_id`."""
        arguments = {"mode": "create", **self.arguments}
        if self.run_id:
            arguments.update(mode="get_or_create", experiment_key=self.run_id)
        experiment = self._comet.start(**arguments)
        self.run_id = experiment.get_key()
        return experiment

    def end_run(self, *, is_failed: bool) -> None:
        """End the experiment, with the tag `failed` if `fit` failed."""
        if is_failed:
            self._active.add_tag("failed")
        self._active.end()

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the figures of an epoch."""
        self._active.log_metrics(dict(logs), step=self.updates, epoch=epoch)

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log the figures so far as `batch_<name>`."""
        figures = {f"batch_{name}": value for name, value in logs.items()}
        self._active.log_metrics(figures, step=self.updates)
