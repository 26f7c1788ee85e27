# SPDX-License-Identifier: Apache-2.0
"""Keras's hooks: the base class of callbacks, and lists of callbacks."""

from __future__ import annotations

import difflib
import sys
from functools import cached_property, partial
from typing import (
    AbstractSet,
    Any,
    Callable,
    ClassVar,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Optional,
    Sequence,
    Union,
)

import numpy as np
import torch

from ipufit._arguments import (
    ArgumentRepr,
    check_function,
    check_number,
    is_number,
    number_in,
    refuse,
    shown,
)
from ipufit._kinds import are_numbers, fields
from ipufit.errors import (
    ConfigError,
    DamagedCheckpointError,
    IpufitWarning,
    advise,
    do_all,
    refuse_foreign,
    warn,
)
from ipufit.state import RunState, span

CallbackLike = Union["Callback", Iterable[Any], None]
"""A callback, or nested sequences of them."""

Hook = Optional[Callable[..., Any]]


class Callback(ArgumentRepr):
    """Base class of callbacks: override the hooks that matter.

    `logs` is one dict per event, shared by all callbacks: keys added in `on_epoch_end`
    reach later callbacks, History included. `logs` is never None.

    Attributes:
        model: The `IPUModel` that runs.
        params: Keras's parameters: `verbose`, `epochs`, `steps`.
        saved_attributes: Names of attributes that are saved in checkpoints, and
            restored in a resumed run. See `state_dict`. A dict maps each name to a
            check: a function of a saved value and its name, which returns what is
            wrong with the value, or None.
        former_attributes: Names that states of earlier versions have, and that are
            ignored.
        is_saved: False if a run may be resumed without this callback, such as a
            display.
        writes_for_all: Whether the callback prints or writes files for all processes of
            a run, so that only process 0 calls its hooks.
        reads_batch_logs: False if the batch hooks don't read their `logs`, which then
            needn't be computed.

    Example:
        >>> class StopWhenGood(Callback):
        ...     saved_attributes = ("good_epochs",)
        ...     good_epochs = 0
        ...     def on_epoch_end(self, epoch, logs):
        ...         self.good_epochs += logs["accuracy"] > 0.99
        ...         if self.good_epochs == 3:
        ...             self.run.stop("accuracy above 99%")
    """

    saved_attributes: ClassVar[Collection[str]] = ()
    former_attributes: ClassVar[Collection[str]] = ()
    is_saved: ClassVar[bool] = True
    writes_for_all: ClassVar[bool] = False
    reads_batch_logs: bool = True
    model: Any = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Warn of methods with almost the name of a hook, which nothing calls."""
        super().__init_subclass__(**keywords)
        for name in vars(cls):
            if not name.startswith("on_") or hasattr(Callback, name):
                continue
            advice = advise("Callback", name, _HOOKS, cutoff=0.85)
            if advice:
                what = f"{cls.__name__}.{name} is no hook, so that nothing calls it."
                warn(f"{what} {advice}", IpufitWarning)

    @cached_property
    def run(self) -> RunState:
        """State of the run; `run.stop("why")` ends it in order."""
        return RunState()

    @property
    def is_due(self) -> bool:
        """Whether a display shows metrics after the present call.

        A callback that overrides this property is a display, which only shows calls to
        people. So it may miss calls.
        """
        return False

    @property
    def hears_every(self) -> int | None:
        """Number of updates after which training calls have to end for this callback.

        None allows calls of any length; 1 makes each update a call. The value is used
        where `device_iterations` is left open. The default is 1 if a class overrides a
        batch hook (`on_train_batch_begin`, `on_train_batch_end`, or their old names)
        and not this property.
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

    def __getstate__(self) -> Any:
        """Leave the model and the run out of copies and pickles: a `fit` sets both."""
        left_out = "model", "run"
        state = {n: value for n, value in vars(self).items() if n not in left_out}
        names = {n for k in type(self).__mro__ for n in vars(k).get("__slots__", ())}
        slots = {n: getattr(self, n) for n in names if hasattr(self, n)}
        return (state, slots) if slots else state

    def set_model(self, model: Any) -> None:
        """Receive the model, before a run."""
        self.model = model

    def set_run(self, run: RunState) -> None:
        """Receive the state of the run, before it begins."""
        self.run = run

    def set_params(self, params: dict[str, Any]) -> None:
        """Receive Keras's parameters before a run; `params` has them, too."""

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

        `logs` is empty. The default calls `on_batch_begin`, Keras's old name of the
        hook.
        """
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called when a training call ends; `batch` is its last update.

        `logs` has the epoch's metrics so far. The default calls `on_batch_end`, Keras's
        old name of the hook.
        """
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: dict[str, Any]) -> None:
        """Called by `on_train_batch_begin`; Keras's old name of that hook."""

    def on_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        """Called by `on_train_batch_end`; Keras's old name of that hook."""

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
        """Return names of parameters whose gradients the callback needs; default: none.

        `model.gradients()` returns the gradients. Called before the training program is
        built, because the program has to send the gradients to the host.
        """
        return ()

    def close(self) -> None:
        """Release resources when a run is over, also after an error.

        Called after every `fit`, `evaluate` and `predict`, once all hooks are done.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the `saved_attributes`, for a resumed run.

        Returns:
            A copy that later hooks don't change. Values are JSON's (NaN and infinities
            too), tensors, NumPy arrays, and lists and dicts of such values. Tensors and
            arrays aren't copied: assign a new tensor, don't change it in place.
        """
        return {name: copied(getattr(self, name)) for name in self.saved_attributes}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` can't take; change nothing.

        Called before a run is resumed.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: A key is unknown or missing.
            DamagedCheckpointError: A value has another type or range.
        """
        # An overridden `state_dict` may have other keys.
        if type(self).state_dict is Callback.state_dict:
            self._check_keys(state)
        if not isinstance(self.saved_attributes, Mapping):
            return
        kinds = {n: kind for n, kind in self.saved_attributes.items() if n in state}
        fault = fields(kinds)(state, "state")
        if fault is not None:
            raise DamagedCheckpointError(
                f"The state of {type(self).__name__} is damaged: {fault}. Use another "
                "checkpoint."
            )

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        known = {*self.saved_attributes, *self.former_attributes}
        unknown = sorted(set(state) - known)
        missing = [name for name in self.saved_attributes if name not in state]
        faults = [f"has {', '.join(unknown)}, which it doesn't know"] if unknown else []
        if missing:
            faults.append(f"lacks {', '.join(missing)}")
        if faults:
            raise ConfigError(
                f"The state of {type(self).__name__} {', and '.join(faults)}. It was "
                "saved by another version of it, or by another callback."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; called after `on_train_begin`.

        In the middle of an epoch, `on_epoch_begin` isn't called again.

        Args:
            state: From `state_dict`.

        Raises:
            ConfigError: A key is unknown or missing.
            DamagedCheckpointError: A value has another type or range.
        """
        self._check_keys(state)
        self.check_state(state)
        for name in self.saved_attributes:
            setattr(self, name, copied(state[name]))


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
_TRAINING_CALLS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)


class LambdaCallback(Callback):
    """Callback made of functions, each of which serves as a hook, as in Keras.

    A function takes the arguments of its hook: `(epoch, logs)`, `(batch, logs)` or
    `(logs)`. It may change `logs`.

    Args:
        on_epoch_begin: Called with `(epoch, logs)` before an epoch.
        on_epoch_end: Called with `(epoch, logs)` after an epoch.
        on_train_begin: Called with `(logs)` before the first epoch.
        on_train_end: Called with `(logs)` after the last epoch.
        on_train_batch_begin: Called with `(batch, logs)` before a call.
        on_train_batch_end: Called with `(batch, logs)` after a call.
        **hooks: Functions for other hooks, such as `on_test_end`.

    Raises:
        ConfigError: A hook doesn't exist, or a value isn't callable.

    Example:
        >>> callback = LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]),
        ...     on_predict_end=lambda logs: print("predicted"),
        ... )
        >>> callback.on_epoch_end(0, {"loss": 0.5})
        0 0.5
        >>> LambdaCallback(on_epoch_stop=print)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: LambdaCallback has no hook on_epoch_stop...
    """

    def __init__(
        self,
        on_epoch_begin: Hook = None,
        on_epoch_end: Hook = None,
        on_train_begin: Hook = None,
        on_train_end: Hook = None,
        on_train_batch_begin: Hook = None,
        on_train_batch_end: Hook = None,
        **hooks: Hook,
    ) -> None:
        hooks = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
            **hooks,
        }
        for name, function in hooks.items():
            if name not in _HOOKS:
                raise ConfigError(
                    f"LambdaCallback has no hook {name}. Hooks are: "
                    f"{', '.join(_HOOKS)}."
                )
            if function is None:
                continue
            check_function(name, function, of="LambdaCallback")
            setattr(self, name, function)


class CallbackList(Callback):
    """A list of callbacks, called one after the other.

    Args:
        callbacks: Callbacks in order; nested sequences are flattened.

    Raises:
        ConfigError: An element isn't a callback.
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
        self._called = [c for c in self.callbacks if is_first or not c.writes_for_all]
        for callback in self.callbacks:
            callback.set_run(run)
            callback.set_params(run.params)

    def are_displays_due(self) -> bool:
        """Return whether a display shows metrics after the present call."""
        return any(callback.is_due for callback in self._called)

    def hears(self, *hooks: str) -> bool:
        """Return whether a callback overrides one of these hooks, and reads its logs.

        Displays are left out: `is_due` says when they read logs.

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
            if not _is_display(callback) and callback.reads_batch_logs
            for name in hooks
        )

    def adds_names(self) -> bool:
        """Return whether a callback may add values to the logs, under any name.

        ipufit's callbacks add at most `learning_rate`, except callbacks that measure.

        Example:
            >>> CallbackList([LambdaCallback(on_epoch_end=print)]).adds_names()
            True
        """
        hooks = ("on_train_batch_end", "on_batch_end", "on_epoch_end")
        modules = {
            getattr(getattr(callback, name), "__module__", None) or ""
            for callback in self.callbacks
            for name in hooks
        }
        return any(
            not name.startswith("ipufit.callbacks.") or name.endswith(".measuring")
            for name in modules
        )

    def call_ends(self) -> list[tuple[int, str]]:
        """Return the numbers of updates after which calls must end, with the callbacks.

        Displays are left out.

        Example:
            >>> from ipufit.callbacks import EarlyStopping, TerminateOnNaN
            >>> CallbackList([EarlyStopping(), TerminateOnNaN()]).call_ends()
            [(1, 'TerminateOnNaN')]
        """
        ends = [(_hears_each_update(c), type(c).__name__) for c in self.callbacks]
        return [(every, name) for every, name in ends if every is not None]

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

    def end(self, around: Sequence[CallbackList], *, is_failing: bool) -> None:
        """Close each callback, except those that an outer run still uses.

        Args:
            around: Callbacks of the outer runs, if this run was started in a hook of
                another run.
            is_failing: Whether the run ends with an error, which is raised. Errors of
                `close` then become warnings.
        """
        shared = {id(c) for hooks in around for c in hooks.callbacks}
        closing = [c.close for c in self._called if id(c) not in shared]
        try:
            do_all(closing, is_failing=is_failing)
        finally:
            self.give_back(around)

    def give_back(self, around: Sequence[CallbackList]) -> None:
        """Set callbacks that outer runs use, too, back to the innermost outer run."""
        runs = {id(c): hooks.run for hooks in around for c in hooks.callbacks}
        for callback in self.callbacks:
            run = runs.get(id(callback), callback.run)
            if callback.run is not run:
                callback.set_run(run)

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
        return {
            key: callback.state_dict() for key, callback in self._by_state_key().items()
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse states that the callbacks can't take; change nothing.

        Args:
            state: From `state_dict` of a list of the same callbacks.

        Raises:
            ConfigError: The callbacks differ, or a state has other keys.
            DamagedCheckpointError: A value of a state has another type or range.
        """
        for key, callback in self._by_state_key(state).items():
            callback.check_state(state[key])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each callback.

        Args:
            state: From `state_dict` of a list of the same callbacks.

        Raises:
            ConfigError: The callbacks differ, or a state has other keys.
        """
        for key, callback in self._by_state_key(state).items():
            callback.load_state_dict(state[key])

    def _by_state_key(
        self, state: Mapping[str, Any] | None = None
    ) -> dict[str, Callback]:
        """Return the callbacks that have a state, by the keys of their states.

        Args:
            state: A state to load; None to save the state. Callbacks without a state
                may differ from those of the run that saved `state`.

        Raises:
            ConfigError: A callback with a state was added, removed or moved.
        """
        counting = [callback for callback in self.callbacks if callback.is_saved]
        saved = {f"{i}:{c.state_name}": c for i, c in enumerate(counting)}
        if state is None or set(state) == set(saved):
            return saved
        now = {key: c for key, c in saved.items() if _has_state(c)}
        names = {*map(_callback_name, now)}
        before = [
            key
            for key in sorted(state, key=_position)
            if state[key] or _callback_name(key) in names
        ]
        if [*map(_callback_name, before)] != [*map(_callback_name, now)]:
            _refuse_callbacks(before, list(now))
        return dict(zip(before, now.values()))


def _call_each(hook: str) -> Callable[..., None]:
    """Make the method of `CallbackList` that calls a hook of each callback."""

    def call(self: CallbackList, *arguments: Any) -> None:
        for callback in self._called:
            with span(type(callback).__name__, hook):
                getattr(callback, hook)(*arguments)

    call.__name__ = hook
    call.__doc__ = f"Call `{hook}` of each callback."
    return call


for _hook in _HOOKS:
    # The old names are called by the new ones.
    if _hook not in ("on_train_end", "on_batch_begin", "on_batch_end"):
        setattr(CallbackList, _hook, _call_each(_hook))


def _is_display(callback: Callback) -> bool:
    return type(callback).is_due is not Callback.is_due


def _has_state(callback: Callback) -> bool:
    is_own = type(callback).state_dict is not Callback.state_dict
    return is_own or bool(callback.saved_attributes)


def _callback_name(key: str) -> str:
    return key.partition(":")[2]


def _position(key: str) -> int:
    """Return the callback's position from a state key such as '0:History'.

    Raises:
        ConfigError: The key doesn't begin with a position.
    """
    position = key.partition(":")[0]
    if not position.isdecimal():
        raise ConfigError(
            f"{key!r} isn't the key of a callback's state, such as '0:History'."
        )
    return int(position)


def _refuse_callbacks(before: list[str], now: list[str]) -> None:
    """Refuse a state of other callbacks than those of the run.

    Args:
        before: Keys of the states, in their order.
        now: Keys of the callbacks of the run.
    """
    missing: list[str] = []
    new: list[str] = []
    names = [*map(_callback_name, before)], [*map(_callback_name, now)]
    changes = difflib.SequenceMatcher(None, *names, autojunk=False).get_opcodes()
    for change, begin, end, new_begin, new_end in changes:
        if change != "equal":
            missing += map(_numbered, before[begin:end])
            new += map(_numbered, now[new_begin:new_end])
    faults = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}"
        for names, what in ((missing, "missing"), (new, "new"))
        if names
    ]
    raise ConfigError(
        f"The state was saved with other callbacks: {', and '.join(faults)}. Pass the "
        "callbacks of the interrupted run that have a state, in its order."
    )


def _numbered(key: str) -> str:
    return f"{_callback_name(key)} (number {_position(key)})"


def _hears_each_update(callback: Callback) -> int | None:
    """Return the number of updates after which calls end for a callback; None for any.

    The first class in the method resolution order that overrides `hears_every` or a
    hook of training calls decides: by the value of `hears_every`, or by 1 for a hook.
    """
    if _is_display(callback):
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
    if not isinstance(callbacks, (list, tuple)):
        refuse_foreign("callbacks", callbacks, "the callback of this name in ipufit")
    # The callbacks are iterated over several times, so an iterator is refused.
    is_listed = isinstance(callbacks, (Sequence, AbstractSet))
    if not is_listed or isinstance(callbacks, (str, bytes)):
        raise ConfigError(
            f"callbacks contains {shown(callbacks)}: use ipufit.Callback objects, "
            "nested in lists if you like."
        )
    for callback in callbacks:
        yield from _flatten(callback)


def check_argument(callback: Callback, name: str, value: Any, **bounds: Any) -> None:
    """Refuse an argument of a callback that isn't a number in a range.

    Args:
        callback: The callback, for the message.
        name: Name of the argument.
        value: Any value. Numbers of NumPy are allowed, and infinity unless `bounds`
            exclude it.
        **bounds: As for `check_number`.

    Raises:
        ConfigError: The value isn't a number in the range.

    Example:
        >>> check_argument(Callback(), "patience", "3", least=0)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Callback has patience='3': use a number of 0 or more.
    """
    who = type(callback).__name__
    settings = {"is_finite": False, "allows_numpy": True, **bounds}
    check_number(name, value, of=who, **settings)


def check_verbose(callback: Callback, verbose: Any) -> None:
    """Refuse a `verbose` that is neither a flag nor a whole number of 0 or more."""
    if not isinstance(verbose, (bool, np.bool_)):
        check_argument(callback, "verbose", verbose, least=0, is_whole=True)


def check_frequency(callback: Callback, name: str, value: Any, *words: str) -> None:
    """Refuse a frequency that is neither a known word nor a number of updates."""
    is_word = isinstance(value, str) and value in words
    is_count = is_number(value, is_whole=True) and value > 0
    if not (is_word or is_count):
        instead = f"{', '.join(map(repr, words))} or a number of updates, 1 or more"
        refuse(name, value, instead, type(callback).__name__)


def copied(value: Any) -> Any:
    """Copy the lists and dicts of a state.

    Args:
        value: The state. Tensors and arrays aren't copied; NumPy's scalars become
            Python's, which JSON can hold.

    Example:
        >>> history = {"loss": [np.float32(0.5)]}
        >>> kept = copied(history)
        >>> history["loss"].append(0.25)
        >>> kept
        {'loss': [0.5]}
    """
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    if isinstance(value, list):
        return value[:] if are_numbers(value) else [*map(copied, value)]
    return value.item() if isinstance(value, np.generic) else value


def numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are single numbers, without matrices and texts.

    Example:
        >>> numbers_in({"loss": 0.5, "confusion_matrix": [[3.0, 1.0], [0.0, 4.0]]})
        {'loss': 0.5}
    """
    numbers = {name: number_in(value) for name, value in logs.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def say(message: str) -> None:
    """Write a line to standard output, and flush it.

    While a progress bar is on the screen, `sys.stdout` is rich's, which prints the line
    above the bar. So it is looked up each time.

    Example:
        >>> say("Epoch 3: early stopping")
        Epoch 3: early stopping
    """
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()
