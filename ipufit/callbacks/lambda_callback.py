# SPDX-License-Identifier: Apache-2.0
"""`LambdaCallback`: functions as hooks."""

from __future__ import annotations

from typing import Any, Callable, Optional

from ipufit.errors import ConfigError

from .base import Callback

Hook = Optional[Callable[..., Any]]


class LambdaCallback(Callback):
    """A callback made of functions, each called in the place of a hook.

    As Keras's. A function takes what its hook takes: `(epoch, logs)`, `(batch, logs)`
    or `(logs)`; `logs` may be changed.

    Args:
        on_epoch_begin: See `Callback`, as for all others.
        on_epoch_end: See above.
        on_train_begin: See above.
        on_train_end: See above.
        on_train_batch_begin: See above.
        on_train_batch_end: See above.
        **hooks: Functions for the other hooks of `Callback`, such as `on_test_end`.

    Raises:
        ConfigError: There is no such hook, or a function is none.

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
