# SPDX-License-Identifier: Apache-2.0
"""`WandbLogger`: figures for Weights & Biases."""

from __future__ import annotations

from typing import Any

from .figure_logger import RunLogger
from .optional import need


class WandbLogger(RunLogger):
    """Log figures to Weights & Biases.

    Figures of epochs are `epoch/<name>`, with `epoch/epoch` (0-based). Figures of calls
    are `batch/<name>`, with `batch/updates`. They go to the active run, `wandb.run`.
    If there is none, one is begun with the first epoch and finished with `fit`, as
    failed if `fit` raised. A resumed `fit` continues its run.

    Args:
        update_freq: `"epoch"` for the figures of epochs only. A number n for those of
            the epoch so far too, after each call that makes an n-th update. `"batch"`
            is the same as 1.
        **arguments: Arguments of `wandb.init`, such as `project`, `name` or `config`.

    Attributes:
        run_id: Id of the run that the logger began; None if it began none.

    Raises:
        ConfigError: If `update_freq` has another value, or wandb isn't installed.

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

    def __init__(self, update_freq: int | str = "epoch", **arguments: Any) -> None:
        super().__init__(update_freq, arguments)
        self._wandb = need("wandb", "WandbLogger", "wandb")

    def active_run(self) -> Any:
        """Return `wandb.run`."""
        return self._wandb.run

    def begin_run(self) -> Any:
        """Begin a run, or continue that of `run_id`."""
        known = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
        run = self._wandb.init(**{**self.arguments, **known})
        self.run_id = run.id
        return run

    def end_run(self, *, is_failed: bool) -> None:
        """Finish the run with exit code 1 if `fit` failed, else 0."""
        self._active.finish(exit_code=int(is_failed))

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log the figures of an epoch as `epoch/<name>`."""
        self._log("epoch", {"epoch": epoch, **logs})

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log the figures so far as `batch/<name>`."""
        self._log("batch", {"updates": self.updates, **logs})

    def _log(self, group: str, figures: dict[str, Any]) -> None:
        self._active.log({f"{group}/{name}": value for name, value in figures.items()})
