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
        params: Keras's: `verbose`, `epochs`, `steps`.
        saved_attributes: Names of attributes that a checkpoint keeps, so that a
            resumed run goes on with them. See `state_dict`.
        saved_kinds: Kinds of saved attributes by name; a checkpoint in which one is of
            another kind is refused.
        is_saved: False if a resumed run may do without this callback, as without a
            display.
        is_display: Whether this callback only shows calls to people, who needn't see
            every one.
        writes_for_all: Whether it shows or writes for all processes of a run, so that
            only process 0 calls its hooks.
        reads_batch_logs: False if its hooks of calls don't read their `logs`, which
            needn't be computed for it then.

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
        """Whether a display shows figures after the call under way."""
        return True

    @property
    def hears_every(self) -> int | None:
        """Number of updates after which calls of training have to end for it.

        None if calls may be of any length; 1 if each update has to be a call. It counts
        where `device_iterations` is left open. By default 1 if a hook of calls
        (`on_train_batch_begin`, `on_train_batch_end`, or their old names) is overridden
        by a class that doesn't say otherwise by overriding this, too.
        """
        return None

    @property
    def state_name(self) -> str:
        """Name in checkpoints: the class, and more if callbacks of it can differ."""
        return type(self).__name__

    @property
    def params(self) -> dict[str, Any]:
        """Keras's parameters of the run: `verbose`, `epochs`, `steps`."""
        return self.run.params

    def set_model(self, model: Any) -> None:
        """Called before a run with the model that runs."""
        self.model = model

    def set_run(self, run: RunState) -> None:
        """Called before a run with its state."""
        self.run = run

    def set_params(self, params: dict[str, Any]) -> None:
        """Called before a run with Keras's parameters, which are in `params` too."""

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        """`fit` begins; `logs` is empty."""

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """`fit` ends; `logs` has the last epoch's figures, `val_` ones included."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch begins (0-based); `logs` is empty."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch ends; `logs` has its figures, `val_` ones if it was validated."""

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """A training call begins: `batch` is its first update; `logs` is empty.

        Calls `on_batch_begin`, its old name.
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """A training call ends: `batch` is its last update.

        `logs` has the epoch's figures so far. Calls `on_batch_end`, its old name.
        """
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Keras's old name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Keras's old name of `on_train_batch_end`."""

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """`evaluate` or a validation begins; `logs` is empty."""

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """`evaluate` or a validation ends; `logs` has its figures, without `val_`."""

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """A call of an evaluation begins; `logs` is empty."""

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """A call of an evaluation ends; `logs` has the figures so far."""

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """`predict` begins; `logs` is empty."""

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """`predict` ends; `logs` is empty."""

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """A call of `predict` begins; `logs` is empty."""

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """A call of `predict` ends; `logs` has its `outputs`."""

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Names of parameters whose gradients `model.gradients()` gives; none here.

        Called before the training program is built, which has to send them.
        """
        return ()

    def close(self) -> None:
        """Leave things as they were found, when a run is over, after an error too.

        Called after every `fit`, `evaluate` and `predict`, once all hooks are done.
        """

    def state_dict(self) -> dict[str, Any]:
        """The `saved_attributes`, with which a resumed run goes on.

        Returns:
            A copy that later hooks don't change. Values are what JSON knows (NaN and
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
        """Go on from a state; called after `on_train_begin`.

        Inside an epoch, `on_epoch_begin` isn't called again.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: A key is unknown or missing.
        """
        check_keys(type(self).__name__, state, self.saved_attributes)
        for name in self.saved_attributes:
            setattr(self, name, copied(state[name]))
