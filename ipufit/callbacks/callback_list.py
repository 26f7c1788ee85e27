# SPDX-License-Identifier: Apache-2.0
"""A list of callbacks, called one after the other."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ipufit._failures import do_all
from ipufit._spans import span
from ipufit.errors import ConfigError
from ipufit.state import RunState

from .base import Callback, CallbackLike
from .saved_state import check_callbacks

_TRAINING_CALLS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)


def _of_each(hook: str) -> Callable[..., None]:
    """Return a hook that calls this hook of each callback in a list."""

    def call(self: CallbackList, *arguments: Any) -> None:
        for callback in self._called:
            with span(type(callback).__name__, hook):
                getattr(callback, hook)(*arguments)

    call.__name__ = hook
    call.__doc__ = f"Call `{hook}` of each callback."
    return call


class CallbackList(Callback):
    """A list of callbacks, called one after the other.

    Args:
        callbacks: Callbacks in order; nested sequences are flattened.

    Raises:
        ConfigError: An element is no callback.
    """

    def __init__(self, callbacks: CallbackLike) -> None:
        self.callbacks: list[Callback] = list(_flatten(callbacks))
        self._called = self.callbacks

    def set_model(self, model: Any) -> None:
        """Pass the model to each callback."""
        for callback in self.callbacks:
            callback.set_model(model)

    def set_run(self, run: RunState) -> None:
        """Pass the state of the run, and its parameters, to each callback."""
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
        """Return whether a display shows metrics after the present call."""
        return any(c.is_due for c in self._called if c.is_display)

    def hears(self, *hooks: str) -> bool:
        """Return whether a callback overrides one of these hooks, and reads its logs.

        Displays don't count: `is_due` tells when they read logs.

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

    def call_ends(self) -> list[tuple[int, str]]:
        """Return after how many updates calls have to end, and for which callbacks.

        Displays don't count.

        Example:
            >>> from ipufit.callbacks import EarlyStopping, TerminateOnNaN
            >>> CallbackList([EarlyStopping(), TerminateOnNaN()]).call_ends()
            [(1, 'TerminateOnNaN')]
        """
        ends = [(_hears_every(c), type(c).__name__) for c in self.callbacks]
        return [(every, name) for every, name in ends if every is not None]

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

        After an interrupt, which is raised again, failures become warnings.
        """
        do_all(
            [partial(callback.on_train_end, logs) for callback in self._called],
            is_failing=self.run.stop_reason == "interrupted",
        )

    def watched_gradients(self, module: torch.nn.Module) -> Sequence[str]:
        """Return the names of parameters whose gradients a callback needs."""
        wanted = [
            name
            for callback in self.callbacks
            for name in callback.watched_gradients(module)
        ]
        return list(dict.fromkeys(wanted))

    def end(self, around: CallbackList | None, *, is_failing: bool) -> None:
        """Close each callback, except those that an outer run still uses.

        Args:
            around: Callbacks of the outer run, if this run was started in one of their
                hooks; else None.
            is_failing: Whether the run ends with an error. That error is raised; errors
                of `close` become warnings.
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
        """Return the states of the callbacks, by position and `state_name`.

        Displays have no state and no position, so a resumed run may have another
        `verbose`.

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
        """Restore the state of each callback.

        Args:
            state: From `state_dict` of a list of the same callbacks.

        Raises:
            ConfigError: The callbacks differ, or a state has other keys.
        """
        saved = self._saved()
        check_callbacks(list(state), list(saved))
        for key, callback in saved.items():
            callback.load_state_dict(state[key])

    def _saved(self) -> dict[str, Callback]:
        counting = [callback for callback in self.callbacks if callback.is_saved]
        return {f"{i}:{c.state_name}": c for i, c in enumerate(counting)}


def _hears_every(callback: Callback) -> int | None:
    """Return the number of updates after which calls end for a callback; None for any.

    The first of its classes that overrides `hears_every` or a hook of training calls
    decides: by the value of `hears_every`, or by 1 for a hook.
    """
    if callback.is_display:
        return None
    if any(hook in vars(callback) for hook in _TRAINING_CALLS):
        return 1
    for kind in type(callback).__mro__:
        if kind is Callback:
            break
        if "hears_every" in vars(kind):
            return callback.hears_every
        if any(hook in vars(kind) for hook in _TRAINING_CALLS):
            return 1
    return None


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
