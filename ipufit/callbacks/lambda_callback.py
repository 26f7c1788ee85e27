# SPDX-License-Identifier: Apache-2.0
"""`LambdaCallback`: hooks from functions."""

from __future__ import annotations

from typing import Any, Callable, Optional

from ipufit.errors import ConfigError

from .base import Callback

Hook = Optional[Callable[..., Any]]


class LambdaCallback(Callback):
    """Callback made of functions, each of which serves as a hook.

    As in Keras. A function takes the arguments of its hook: `(epoch, logs)`,
    `(batch, logs)` or `(logs)`. It may change `logs`.

    Args:
        on_epoch_begin: Called with `(epoch, logs)` before an epoch.
        on_epoch_end: Called with `(epoch, logs)` after an epoch.
        on_train_begin: Called with `(logs)` before the first epoch.
        on_train_end: Called with `(logs)` after the last epoch.
        on_train_batch_begin: Called with `(batch, logs)` before a call.
        on_train_batch_end: Called with `(batch, logs)` after a call.
        **hooks: Functions for other hooks, such as `on_test_end`.

    Raises:
        ConfigError: If there is no such hook, or a value isn't callable.

    Example:
        >>> callback = LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]),
        ...     on_predict_end=lambda logs: print("predicted"),
        ... )
        >>> callback.on_epoch_end(0, {"loss": 0.5})
        0 0.5
        >>> LambdaCallback(on_epoch_stop=print)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: LambdaCallback knows no hook on_epoch_stop...
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
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name, function in hooks.items():
            if name not in known:
                raise ConfigError(
                    f"LambdaCallback knows no hook {name}. Hooks are: "
                    f"{', '.join(known)}."
                )
            if function is None:
                continue
            if not callable(function):
                raise ConfigError(f"{name}={function!r} is no function.")
            setattr(self, name, function)
