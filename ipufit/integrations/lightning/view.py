# SPDX-License-Identifier: Apache-2.0
"""A LightningModule as its own steps and hooks see it, with ipufit for its Trainer."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NoReturn, Protocol

import torch

from ipufit.distributed import get_process_info
from ipufit.errors import UnsupportedError

from .facts import TrainerFacts, changing

_REFUSED = {
    "optimizers": "optimizers() is for manual optimization",
    "lr_schedulers": "lr_schedulers() is for manual optimization",
    "manual_backward": "manual_backward() is for manual optimization",
    "toggle_optimizer": "toggle_optimizer() is for manual optimization",
    "untoggle_optimizer": "untoggle_optimizer() is for manual optimization",
    "all_gather": "all_gather() joins tensors of processes, and a program has those of "
    "one replica; figures cover all of them without it",
}
"""Methods of a LightningModule that no step can call, and why."""

_REFUSED_VALUES = {
    "logger": "figures reach loggers by callbacks, fit(callbacks=[ipufit.WandbLogger("
    "...)])",
    "global_rank": "one program runs on all replicas and processes",
    "local_rank": "one program runs on all replicas and processes",
}
_REFUSED_VALUES["loggers"] = _REFUSED_VALUES["logger"]


class Log(Protocol):
    """Takes what a module logs."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Take one value, with the arguments of `LightningModule.log`."""
        ...

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kw: Any) -> None:
        """Take several values, with the arguments of `LightningModule.log_dict`."""
        ...


def view_of(module: torch.nn.Module, log: Log, trainer: TrainerFacts) -> Any:
    """The module under another class, which has `log`, `trainer` and the like.

    It has the module's own attributes: what is set in one is set in the other. Nothing
    is changed in the module, so that it stays what it was for anyone else.

    Args:
        module: A LightningModule, or a module with its methods.
        log: Takes what is logged.
        trainer: The value of `self.trainer`.

    Example:
        >>> import ipufit.integrations.lightning.logs as logs
        >>> layer = torch.nn.Linear(2, 1)
        >>> view = view_of(layer, logs.NoLog("a doctest"), TrainerFacts({}, "fit"))
        >>> view.weight is layer.weight, isinstance(view, torch.nn.Linear)
        (True, True)
        >>> view.trainer.training, hasattr(layer, "trainer")
        (True, False)
    """
    kind = type(module)
    added: dict[str, Any] = {
        "log": staticmethod(log.log),
        "log_dict": staticmethod(log.log_dict),
        "print": staticmethod(_print_once),
        "trainer": property(lambda self: trainer),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    for name, meaning in (
        ("current_epoch", "the number of the epoch"),
        ("global_step", "the number of updates"),
    ):
        if name not in vars(module):  # else it is an attribute of the user's own
            added[name] = property(_of_trainer(name, meaning, trainer))
    for name, why in _REFUSED.items():
        if name not in vars(module):
            added[name] = _refusing(f"self.{name}() was called: {why}.")
    for name, why in _REFUSED_VALUES.items():
        if name not in vars(module):
            added[name] = property(_refusing(f"self.{name} was read: {why}."))
    make: Any = type(kind)  # the metaclass
    view = object.__new__(make(kind.__name__, (kind,), added))
    object.__setattr__(view, "__dict__", vars(module))
    return view


def _print_once(*values: Any, **settings: Any) -> None:
    """Print as Lightning's `self.print` does: in one of several processes."""
    if get_process_info().is_first:
        print(*values, **settings)  # noqa: T201 - what the user asks for


def _of_trainer(name: str, meaning: str, trainer: Any) -> Callable[[Any], Any]:
    def read(_: Any) -> Any:
        if vars(trainer)["_live"] is None:
            raise UnsupportedError(changing(f"self.{name}", meaning))
        return getattr(trainer, name)

    return read


def _refusing(message: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message)

    return refuse
