# SPDX-License-Identifier: Apache-2.0
"""`EarlyStopping`: end `fit` when a metric stops improving."""

from __future__ import annotations

from typing import Any, ClassVar, Mapping

from ipufit._kinds import Kind, array, count, list_of, number, optional
from ipufit.errors import DamagedCheckpointError

from .monitor import MonitorCallback, warn_unavailable


class EarlyStopping(MonitorCallback):
    """Stop when a figure hasn't improved for some epochs.

    As in Keras, but a NaN never becomes the best value, and `"auto"` knows the figures
    of several outputs.

    Args:
        monitor: Name of the figure in the logs.
        min_delta: Smallest change that counts as an improvement.
        patience: Number of epochs without improvement after which to stop; 0 and 1 both
            stop at the first such epoch, as in Keras.
        verbose: 1 prints a line when it stops or restores weights.
        mode: `"min"`, `"max"`, or `"auto"`.
        baseline: Value that must be beaten too before an improvement resets `wait`.
        restore_best_weights: If True, the run ends with the weights of its best epoch,
            stopped or not. Every improvement fetches the weights from the device.
        start_from_epoch: Index of the first epoch that counts.

    Attributes:
        best: Best value of this run.
        best_epoch: Index of the best epoch.
        best_weights: Weights of the best epoch, if they are to be restored.
        stopped_epoch: Index of the epoch that stopped the run; 0 if none did.
        wait: Number of epochs since the last improvement.

    Raises:
        ConfigError: At the figure's first value, if `mode="auto"` and no metric has its
            direction.

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
        super().__init__(monitor, mode, min_delta, verbose)
        self.patience = patience
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
        """Refuse a state with other keys, other kinds or weights of another module."""
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
        """Reset the values of an earlier run."""
        self._reset()
        self.begin_monitoring()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Compare the metric with the best value, and stop after `patience` epochs."""
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
        """Restore the best weights if `restore_best_weights` is set."""
        if self.stopped_epoch > 0:
            self.say(f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.best_weights is not None:
            self.say(
                "Restoring model weights from the end of the best epoch: "
                f"{self.best_epoch + 1}."
            )
            self.model.set_weights(self.best_weights)
