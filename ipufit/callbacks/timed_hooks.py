# SPDX-License-Identifier: Apache-2.0
"""The hooks of callbacks, whose time goes into a timeline."""

from __future__ import annotations

from typing import Any

from ipufit.profiling import Timeline, timed

from .base import Callback

_SAVING = ("ModelCheckpoint", "BackupAndRestore")


class TimedHooks:
    """A callback's hooks, recorded one by one; those that do nothing aren't.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        callback: The callback, or another object like this one.
    """

    def __init__(self, timeline: Timeline, callback: Any) -> None:
        self._timeline = timeline
        self.callback = callback

    def __getattr__(self, hook: str) -> Any:
        """Make a hook that is recorded; it is kept, so this is called once for each."""
        method = getattr(self.callback, hook)
        callback = self.callback
        while isinstance(callback, TimedHooks):
            callback = callback.callback
        kind = type(callback)
        does_nothing = hook not in vars(callback) and all(
            getattr(kind, name) is getattr(Callback, name) for name in _names(hook)
        )
        if not does_nothing:
            names = {base.__name__ for base in kind.__mro__}
            phase = "checkpoints" if names.intersection(_SAVING) else "callbacks"
            method = timed(self._timeline, method, f"{kind.__name__}.{hook}", phase)
        vars(self)[hook] = method
        return method


def _names(hook: str) -> tuple[str, ...]:
    """A hook, and the old name that Keras calls it by, if it has one."""
    is_old = hook in ("on_train_batch_begin", "on_train_batch_end")
    return (hook, hook.replace("train_", "")) if is_old else (hook,)


class Opening(Callback):
    """Begins a span for each epoch, call, evaluation and prediction.

    It comes before all other callbacks.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        """Begin an epoch."""
        self._timeline.begin(f"epoch {epoch + 1}", "loop")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Begin a call of training."""
        self._timeline.begin("training call", "loop", {"first update": batch})

    def on_test_begin(self, logs: dict[str, Any]) -> None:
        """Begin an evaluation."""
        self._timeline.begin("evaluation", "loop")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Begin a call of an evaluation."""
        self._timeline.begin("evaluation call", "loop", {"first batch": batch})

    def on_predict_begin(self, logs: dict[str, Any]) -> None:
        """Begin a prediction."""
        self._timeline.begin("prediction", "loop")

    def on_predict_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Begin a call of a prediction."""
        self._timeline.begin("prediction call", "loop", {"first batch": batch})


class Closing(Callback):
    """Ends the spans that `Opening` has begun; it comes after all other callbacks.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        """End an epoch."""
        self._timeline.end_named(f"epoch {epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """End a call of training."""
        self._timeline.end_named("training call")

    def on_test_end(self, logs: dict[str, Any]) -> None:
        """End an evaluation."""
        self._timeline.end_named("evaluation")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """End a call of an evaluation."""
        self._timeline.end_named("evaluation call")

    def on_predict_end(self, logs: dict[str, Any]) -> None:
        """End a prediction."""
        self._timeline.end_named("prediction")

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """End a call of a prediction."""
        self._timeline.end_named("prediction call")


def around(timeline: Timeline, callbacks: list[Any]) -> list[Any]:
    """The hooks of callbacks with their time recorded, in spans of epochs and calls.

    Args:
        timeline: Timeline of the profile, which the spans are added to.
        callbacks: The callbacks in order.
    """
    inner = [TimedHooks(timeline, callback) for callback in callbacks]
    return [Opening(timeline), *inner, Closing(timeline)]
