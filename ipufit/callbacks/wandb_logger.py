# SPDX-License-Identifier: Apache-2.0
"""`WandbLogger`: figures for Weights & Biases."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, count, optional, text

from .figure_logger import FigureLogger
from .optional import need


class WandbLogger(FigureLogger):
    """Log figures to Weights & Biases.

    Figures of epochs are `epoch/<name>`, with `epoch/epoch` (0-based); those of calls
    are `batch/<name>`, with `batch/updates`. They go to the run that is active
    (`wandb.run`). If there is none, one is begun with the first epoch and finished
    with `fit`, as failed if `fit` raised. A `fit` that is resumed goes on with its run.

    Args:
        update_freq: `"epoch"`; or `"batch"`, or a number of updates: then also the
            figures of the epoch so far, after the call that reaches it.
        **arguments: Of `wandb.init`, such as `project`, `name` or `config`.

    Attributes:
        run_id: Of the run that it began; None if it began none.

    Raises:
        ConfigError: `update_freq` is something else; or there is no wandb.

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

    saved_attributes = ("updates", "run_id")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "updates": count,
        "run_id": optional(text),
    }

    def __init__(self, update_freq: int | str = "epoch", **arguments: Any) -> None:
        super().__init__(update_freq)
        self._wandb = need("wandb", "WandbLogger", "wandb")
        self.arguments = arguments
        self.run_id: str | None = None
        self._active: Any = None
        self._is_own = False

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run."""
        super().on_train_begin(logs)
        self.run_id = None

    def open(self) -> None:
        """Take the run that is active, or begin one."""
        if self._active is not None:
            return
        self._active = self._wandb.run
        if self._active is None:
            again = {"id": self.run_id, "resume": "allow"} if self.run_id else {}
            self._active = self._wandb.init(**{**self.arguments, **again})
            self._is_own = True
            self.run_id = self._active.id

    def write_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Log `epoch/<name>`."""
        self._log("epoch", {"epoch": epoch, **logs})

    def write_updates(self, logs: dict[str, Any]) -> None:
        """Log `batch/<name>`."""
        self._log("batch", {"updates": self.updates, **logs})

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Finish the run that it began."""
        self._finish(0)

    def close(self) -> None:
        """The same after an error."""
        self._finish(1)

    def _log(self, what: str, figures: dict[str, Any]) -> None:
        self._active.log({f"{what}/{name}": value for name, value in figures.items()})

    def _finish(self, exit_code: int) -> None:
        if self._is_own:
            self._active.finish(exit_code=exit_code)
        self._active, self._is_own = None, False
