# SPDX-License-Identifier: Apache-2.0
"""Keras's hooks, called in Keras's order."""

from __future__ import annotations

from typing import Any, ClassVar, Iterable, Mapping, Sequence, Union

import torch

from ipufit._kinds import Kind
from ipufit.state import RunState

from .saved_state import check_keys, check_kinds, copied

CallbackLike = Union["Callback", Iterable[Any], None]
"""A callback, or nested sequences of them."""


class Callback:
    """Base class of callbacks: override the hooks that matter.

    `logs` is one dict per event, shared by all callbacks: keys added in
    `on_epoch_end` reach the ones after it, History included. It is never None.

    Attributes:
        model: The `IPUModel` that runs.
        run: State of the run; `run.stop("why")` ends it in order.
        params: Keras's parameters: `verbose`, `epochs`, `steps`.
        saved_attributes: Names of attributes that are saved in checkpoints, and
            restored in a resumed run. See `state_dict`.
        saved_kinds: Kinds of saved attributes by name; a checkpoint in which one is of
            another kind is refused.
        is_saved: False if a run may be resumed without this callback, such as a
            display.
        is_display: Whether this callback only shows calls to people, who needn't see
            every call.
        writes_for_all: Whether it prints or writes files for all processes of a run, so
            that only process 0 calls its hooks.
        reads_batch_logs: False if its hooks of calls don't read their `logs`, which
            then needn't be computed.

    Example:
        >>> class StopWhenGood(Callback):
        ...     saved_attributes = ("good_epochs",)
        ...     good_epochs = 0
        ...     def on_epoch_end(self, epoch, logs):
        ...         self.good_epochs += logs["accuracy"] > 0.99
        ...         if self.good_epochs == 3:
        ...             self.run.stop("accuracy above 99%")
    """

    saved_attributes: ClassVar[tuple[str, ...]] = ()
    saved_kinds: ClassVar[Mapping[str, Kind]] = {}
    is_saved: ClassVar[bool] = True
    is_display: ClassVar[bool] = False
    writes_for_all: ClassVar[bool] = False
    reads_batch_logs: bool = True
    model: Any = None
    run: RunState = RunState()

    @property
    def is_due(self) -> bool:
        """Whether a display shows metrics after the present call."""
        return True

    @property
    def hears_every(self) -> int | None:
        """Number of updates after which training calls have to end for this callback.

        None allows calls of any length; 1 makes each update a call. It counts where
        `device_iterations` is left open. The default is 1 if a class overrides a hook
        of calls (`on_train_batch_begin`, `on_train_batch_end`, or their old names)
        without overriding this, too.
        """
        return None

    @property
    def state_name(self) -> str:
        """Name in checkpoints: the class, and settings that tell callbacks apart."""
        return type(self).__name__

    @property
    def params(self) -> dict[str, Any]:
        """Keras's parameters of the run: `verbose`, `epochs`, `steps`."""
        return self.run.params

    def set_model(self, model: Any) -> None:
        """Receive the model, before a run."""
        self.model = model

    def set_run(self, run: RunState) -> None:
        """Receive the state of the run, before it begins."""
        self.run = run

    def set_params(self, params: dict[str, Any]) -> None:
        """Receive Keras's parameters, which are in `params` too, before a run."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """Called when `fit` begins; `logs` is empty."""

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Called when `fit` ends; `logs` has the last epoch's metrics."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called when an epoch (0-based) begins; `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called when an epoch ends; `logs` has its metrics, with a validation's."""

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a training call begins; `batch` is its first update.

        `logs` is empty. It calls `on_batch_begin`, its old name.
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a training call ends; `batch` is its last update.

        `logs` has the epoch's metrics so far. It calls `on_batch_end`, its old name.
        """
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called as `on_train_batch_begin`, of which it is Keras's old name."""

    def on_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called as `on_train_batch_end`, of which it is Keras's old name."""

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Called when `evaluate` or a validation begins; `logs` is empty."""

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """Called when an evaluation or a validation ends; `logs` has its metrics."""

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a call of an evaluation begins; `logs` is empty."""

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a call of an evaluation ends; `logs` has the metrics so far."""

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Called when `predict` begins; `logs` is empty."""

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """Called when `predict` ends; `logs` is empty."""

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a call of `predict` begins; `logs` is empty."""

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a call of `predict` ends; `logs` has its `outputs`."""

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Return names of parameters whose gradients the callback needs; none here.

        `model.gradients()` returns them. Called before the training program is built,
        which has to send them.
        """
        return ()

    def close(self) -> None:
        """Release resources when a run is over, also after an error.

        Called after every `fit`, `evaluate` and `predict`, once all hooks are done.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the `saved_attributes`, for a resumed run.

        Returns:
            A copy that later hooks don't change. Values are what JSON can hold (NaN and
            infinities too), tensors, NumPy arrays, and lists and dicts of these.
            Tensors and arrays are shared: replace such an attribute, don't fill it.
        """
        return {name: copied(getattr(self, name)) for name in self.saved_attributes}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` can't take, and load nothing.

        Called before a run is resumed.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: A key is unknown or missing.
            DamagedCheckpointError: A value is of another kind.
        """
        if type(self).state_dict is Callback.state_dict:  # else it has keys of its own
            check_keys(type(self).__name__, state, self.saved_attributes)
        check_kinds(type(self).__name__, state, self.saved_kinds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; called after `on_train_begin`.

        In the middle of an epoch, `on_epoch_begin` isn't called again.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: A key is unknown or missing.
        """
        check_keys(type(self).__name__, state, self.saved_attributes)
        for name in self.saved_attributes:
            setattr(self, name, copied(state[name]))
