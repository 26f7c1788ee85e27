# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`: end `fit` when a figure stops improving."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, array, count, list_of, number, optional
from ipufit.errors import DamagedCheckpointError

from .messages import say
from .monitor import MonitorCallback, warn_unavailable


class EarlyStopping(MonitorCallback):
    """Stop when a figure hasn't improved for some epochs.

    As Keras's, but a NaN never becomes the best value, and `"auto"` knows the figures
    of several outputs.

    Args:
        monitor: The figure.
        min_delta: A smaller change is no improvement.
        patience: Stop after so many epochs without improvement; 0 and 1 both stop at
            the first such epoch, as in Keras.
        verbose: 1 says when it stops and what it restores.
        mode: `"min"`, `"max"`, or `"auto"`.
        baseline: Improvements count only once this is beaten, too.
        restore_best_weights: Whether the run ends with the weights of its best epoch,
            stopped or not. Every improvement fetches the weights from the device.
        start_from_epoch: Epochs before this one (0-based) aren't looked at.

    Attributes:
        best: The best value of this run.
        best_epoch: When that was, 0-based.
        best_weights: The weights then, if they are to be restored.
        stopped_epoch: When it stopped, 0-based; 0 if it didn't.
        wait: Epochs without improvement.

    Raises:
        ConfigError: At the figure's first value: `mode="auto"`, and no metric says
            which way it gets better.

    Example:
        >>> from ipufit.state import RunState
        >>> stopping = EarlyStopping("loss", patience=2)
        >>> stopping.set_run(RunState())
        >>> stopping.on_train_begin({})
        >>> for epoch, loss in enumerate([3.0, 2.0, 2.5, 2.2]):
        ...     stopping.on_epoch_end(epoch, {"loss": loss})
        >>> stopping.stopped_epoch, stopping.best
        (3, 2.0)
    """

    saved_attributes = ("wait", "best", "best_epoch", "stopped_epoch", "best_weights")
    saved_kinds: ClassVar[Mapping[str, Kind]] = {
        "wait": count,
        "best": optional(number),
        "best_epoch": count,
        "stopped_epoch": count,
        "best_weights": optional(list_of(array)),
    }

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.verbose = verbose
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch
        self._reset()

    def _reset(self) -> None:
        self.wait = 0
        self.best = None
        self.best_epoch = 0
        self.best_weights: list[Any] | None = None
        self.stopped_epoch = 0

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse other keys and kinds, and weights of another module."""
        super().check_state(state)
        if state["best_weights"] is None:
            return
        own = [tuple(one.shape) for one in self.model.module.state_dict().values()]
        if [tuple(one.shape) for one in state["best_weights"]] != own:
            raise DamagedCheckpointError(
                "The state of EarlyStopping has best_weights of another module. Use "
                "another checkpoint."
            )

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """A new run: nothing was seen yet."""
        self._reset()
        self.begin_monitoring()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Look at the figure."""
        if logs.get(self.monitor) is None:
            warn_unavailable(
                f"Early stopping conditioned on metric `{self.monitor}`", logs
            )
            return
        if epoch < self.start_from_epoch:
            return
        value = float(logs[self.monitor])
        self.wait += 1
        if self.improves(value, self.best):
            self._keep(epoch, value)
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.run.stop(
                f"{self.monitor} hasn't improved for {self.wait} epochs (EarlyStopping)"
            )

    def _keep(self, epoch: int, value: float) -> None:
        self.best = value
        self.best_epoch = epoch
        if self.restore_best_weights:
            self.best_weights = self.model.get_weights()
        if self.baseline is None or self.improves(value, self.baseline):
            self.wait = 0

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Restore the best weights, if asked to."""
        if self.stopped_epoch > 0 and self.verbose > 0:
            say(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            if self.verbose > 0:
                say(
                    "Restoring model weights from the end of the best epoch: "
                    f"{self.best_epoch + 1}."
                )
            self.model.set_weights(self.best_weights)
