# SPDX-License-Identifier: Apache-2.0
"""`WandbLogger`: metrics for Weights & Biases."""

from __future__ import annotations

from typing import Any

from ipufit._optional import need
from ipufit.batching import check_count

from .figure_logger import RunLogger
from .histograms import histogram_values, is_histogram_due


class WandbLogger(RunLogger):
    """Log figures to Weights & Biases.

    Figures of epochs are `epoch/<name>`, with `epoch/epoch` (0-based). Figures of calls
    are `batch/<name>`, with `batch/updates`. Histograms of weights are `weights/<name>`
    and come with the figures of their epoch. They go to the active run, `wandb.run`.
    If there is none, one is begun with the first epoch and finished with `fit`, as
    failed if `fit` raised. A resumed `fit` continues its run.

    Args:
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.
        histogram_freq: Number of epochs from one histogram of the weights to the next,
            from the first epoch on; 0 for none. Each brings all weights to the host,
            and leaves out values that aren't finite.
        **arguments: Arguments of `wandb.init`, such as `project`, `name` or `config`.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` or `histogram_freq` has another value, or wandb
            isn't installed.

    Example:
        >>> from ipufit import ConfigError
        >>> try:
        ...     callback = WandbLogger(project="mnist")
        ... except ConfigError as error:
        ...     "pip install wandb" in str(error)
        ... else:
        ...     callback.run_id is None
        True
    """

    def __init__(
        self,
        update_freq: int | str = "epoch",
        *,
        histogram_freq: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(update_freq, arguments)
        check_count("histogram_freq", histogram_freq)
        self.histogram_freq = histogram_freq
        self._wandb = need("wandb", "WandbLogger", "wandb")

    def active_run(self) -> Any:
        """Return `wandb.run`."""
        return self._wandb.run

    def begin_run(self) -> Any:
        """Begin a run, or continue the run of `run_id`."""
        known = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
        run = self._wandb.init(**{**self.arguments, **known})
        self.run_id = run.id
        return run

    def end_run(self, *, is_failed: bool) -> None:
        """Finish the run with exit code 1 if `fit` failed, else 0."""
        self._active.finish(exit_code=int(is_failed))

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the metrics of an epoch as `epoch/<name>`."""
        histograms = {}
        if is_histogram_due(self.histogram_freq, epoch):
            histograms = {
                f"weights/{name}": self._wandb.Histogram(values)
                for name, values in histogram_values(self.model)
            }
        self._log("epoch", {"epoch": epoch, **logs}, histograms)

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log the metrics so far as `batch/<name>`."""
        self._log("batch", {"updates": self.updates, **logs}, {})

    def _log(self, group: str, figures: dict[str, Any], more: dict[str, Any]) -> None:
        named = {f"{group}/{name}": value for name, value in figures.items()}
        self._active.log({**named, **more})
