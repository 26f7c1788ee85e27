# SPDX-License-Identifier: Apache-2.0
"""Keras's hooks, called in Keras's order."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, ClassVar, Iterable, Iterator, Mapping, Sequence, Union

import torch

from ipufit._failures import do_all
from ipufit._kinds import Kind
from ipufit.errors import ConfigError
from ipufit.state import RunState

from .saved_state import check_callbacks, check_keys, check_kinds, copied

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


def _of_each(hook: str) -> Callable[..., None]:
    """Make a hook that calls the hook of each callback in a list."""

    def call(self: CallbackList, *arguments: Any) -> None:
        for callback in self._called:
            getattr(callback, hook)(*arguments)

    call.__name__ = hook
    call.__doc__ = f"Call `{hook}` of each callback."
    return call


class CallbackList(Callback):
    """Callbacks that are called one after the other.

    Args:
        callbacks: Callbacks in order; nested sequences are flattened.

    Raises:
        ConfigError: An element is no callback.
    """

    def __init__(self, callbacks: CallbackLike) -> None:
        self.callbacks: list[Callback] = list(_flatten(callbacks))
        self._called = self.callbacks

    def set_model(self, model: Any) -> None:
        """Give each callback the model."""
        for callback in self.callbacks:
            callback.set_model(model)

    def set_run(self, run: RunState) -> None:
        """Give each callback the state of the run, and its parameters."""
        self.run = run
        is_first = run.processes.is_first
        self._called = [
            callback
            for callback in self.callbacks
            if is_first or not callback.writes_for_all
        ]
        for callback in self.callbacks:
            callback.set_run(run)
            callback.set_params(run.params)

    def are_displays_due(self) -> bool:
        """Whether a display shows figures after the call under way."""
        return any(c.is_due for c in self._called if c.is_display)

    def hears(self, *hooks: str) -> bool:
        """Whether a callback overrides one of these hooks, and reads its logs.

        Displays don't count: they say when they are due.

        Example:
            >>> from ipufit.callbacks import EarlyStopping, TerminateOnNaN
            >>> CallbackList([EarlyStopping()]).hears("on_train_batch_end")
            False
            >>> CallbackList([TerminateOnNaN()]).hears("on_train_batch_end")
            True
        """
        return any(
            name in vars(callback)
            or getattr(type(callback), name) is not getattr(Callback, name)
            for callback in self._called
            if not callback.is_display and callback.reads_batch_logs
            for name in hooks
        )

    on_train_begin = _of_each("on_train_begin")
    on_epoch_begin = _of_each("on_epoch_begin")
    on_epoch_end = _of_each("on_epoch_end")
    on_train_batch_begin = _of_each("on_train_batch_begin")
    on_train_batch_end = _of_each("on_train_batch_end")
    on_test_begin = _of_each("on_test_begin")
    on_test_end = _of_each("on_test_end")
    on_test_batch_begin = _of_each("on_test_batch_begin")
    on_test_batch_end = _of_each("on_test_batch_end")
    on_predict_begin = _of_each("on_predict_begin")
    on_predict_end = _of_each("on_predict_end")
    on_predict_batch_begin = _of_each("on_predict_batch_begin")
    on_predict_batch_end = _of_each("on_predict_batch_end")

    def on_train_end(self, logs: dict[str, Any]) -> None:
        """Call `on_train_end` of each callback, even if one of them fails.

        After an interrupt, which is raised again, their failures are warnings.
        """
        do_all(
            [partial(callback.on_train_end, logs) for callback in self._called],
            is_failing=self.run.stop_reason == "interrupted",
        )

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Names of parameters that any callback wants, each once."""
        wanted = [
            name
            for callback in self.callbacks
            for name in callback.watched_gradients(module)
        ]
        return list(dict.fromkeys(wanted))

    def end(self, around: CallbackList | None, *, is_failing: bool) -> None:
        """Close each callback, except those that an outer run goes on with.

        Args:
            around: Callbacks of the run in one of whose hooks this run was made; None
                if there is no such run.
            is_failing: Whether the run ends with an error. That is the one to raise:
                what fails here is warned of.
        """
        shared = set() if around is None else {id(c) for c in around.callbacks}
        own = [callback for callback in self._called if id(callback) not in shared]
        try:
            do_all([callback.close for callback in own], is_failing=is_failing)
        finally:
            for callback in self.callbacks:
                if around is not None and id(callback) in shared:
                    callback.set_run(around.run)

    def close(self) -> None:
        """Close each callback in order, even if one of them fails."""
        do_all([callback.close for callback in self._called])

    def state_dict(self) -> dict[str, Any]:
        """States of the callbacks, by position and `state_name`.

        Displays have none and don't count: `verbose` may be another in a resumed run.

        Example:
            >>> from ipufit.callbacks import EarlyStopping, TerminateOnNaN
            >>> list(CallbackList([TerminateOnNaN(), EarlyStopping()]).state_dict())
            ['0:TerminateOnNaN', '1:EarlyStopping(val_loss)']
        """
        return {key: callback.state_dict() for key, callback in self._saved().items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse states that the callbacks can't take, and load nothing.

        Args:
            state: From `state_dict` of a list of the same callbacks.

        Raises:
            ConfigError: The callbacks are others; or a state has other keys.
            DamagedCheckpointError: A value of a state is of another kind.
        """
        saved = self._saved()
        check_callbacks(list(state), list(saved))
        for key, callback in saved.items():
            callback.check_state(state[key])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each callback its state.

        Args:
            state: From `state_dict` of a list of the same callbacks.

        Raises:
            ConfigError: The callbacks are others; or a state has other keys.
        """
        saved = self._saved()
        check_callbacks(list(state), list(saved))
        for key, callback in saved.items():
            callback.load_state_dict(state[key])

    def _saved(self) -> dict[str, Callback]:
        counting = [callback for callback in self.callbacks if callback.is_saved]
        return {f"{i}:{c.state_name}": c for i, c in enumerate(counting)}


def _flatten(callbacks: CallbackLike) -> Iterator[Callback]:
    if callbacks is None:
        return
    if isinstance(callbacks, Callback):
        yield callbacks
        return
    if isinstance(callbacks, (str, type)) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"callbacks contains {callbacks!r}: use ipufit.Callback objects, nested in "
            "lists if you like."
        )
    for callback in callbacks:
        yield from _flatten(callback)
