# SPDX-License-Identifier: Apache-2.0
"""`model.optimizer` with Keras's `learning_rate`; unknown attributes are refused.

PopTorch's optimisers read their rates from the parameter groups, and take any attribute
without a word: `optimizer.lr = 0` changed nothing.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

import torch

from ipufit._poptorch import poptorch
from ipufit.errors import ConfigError

from .checks import check_number


class _Settable:
    """The methods that are added to the class of an optimizer."""

    param_groups: list[dict[str, Any]]
    _schedule: str | None = None

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group; setting it sets that of all groups.

        A rate counts from the next call on.

        Raises:
            ConfigError: The rate isn't a number of 0 or more, or a schedule sets it.
        """
        return float(self.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        rate = rate.item() if hasattr(rate, "item") else rate  # of NumPy or torch
        check_number("model.optimizer", "learning_rate", rate, least=0)
        if self._schedule is not None:
            raise ConfigError(
                f"model.optimizer.learning_rate={rate!r} was set, and the schedule "
                f"that compile() got sets it, too ({self._schedule}). Use one of them."
            )
        for group in self.param_groups:
            group["lr"] = float(rate)

    lr = learning_rate

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(self, name):
            raise AttributeError(_advice(name, self))
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Tell `copy` and `pickle` to make the class anew: it can't be imported."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *rest = reduced
        return (_new, (_plain_class(type(self)),), *rest)


def make_settable(
    optimizer: torch.optim.Optimizer, schedule: str | None = None
) -> None:
    """Let `learning_rate` be set, and refuse attributes that nobody reads.

    Args:
        optimizer: One of `poptorch.optim`; it stays the same object.
        schedule: The schedule that sets its rates, in words; None for no schedule.

    Example:
        >>> module = torch.nn.Linear(2, 1)
        >>> sgd = poptorch.optim.SGD(module.parameters(), lr=0.5)
        >>> make_settable(sgd)
        >>> sgd.learning_rate = 0.25
        >>> sgd.param_groups[0]["lr"]
        0.25
        >>> sgd.momentun = 0.9
        Traceback (most recent call last):
        AttributeError: Nobody reads model.optimizer.momentun. ...
    """
    if not isinstance(optimizer, _Settable):
        plain: Any = type(optimizer)
        optimizer.__class__ = _settable_class(plain)
    optimizer._schedule = schedule  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def _settable_class(plain: type) -> Any:
    # PopTorch warns of classes that don't have its own base class as a direct base.
    base = poptorch.optim.Optimizer
    bases = (_Settable, plain, *((base,) if base in plain.__bases__ else ()))
    names = ("__module__", "__qualname__", "__doc__")
    return type(plain.__name__, bases, {name: getattr(plain, name) for name in names})


def _plain_class(settable: type) -> type:
    return settable.__mro__[2]  # after itself and `_Settable`


def _new(plain: type) -> Any:
    return object.__new__(_settable_class(plain))


def _advice(name: str, optimizer: Any) -> str:
    known = inspect.signature(_plain_class(type(optimizer))).parameters
    settings = sorted(set(optimizer.param_groups[0]).intersection(known) - {"params"})
    text = f"Nobody reads model.optimizer.{name}."
    meant = {name, *difflib.get_close_matches(name, settings, n=1)}
    for setting in (one for one in settings if one in meant):
        return (
            f"{text} It is a setting of parameter groups: for group in "
            f"model.optimizer.param_groups: group[{setting!r}] = ..."
        )
    if difflib.get_close_matches(name, ["learning_rate", "learningrate"]):
        return f"{text} Did you mean learning_rate?"
    return (
        f"{text} Set learning_rate, or in the dicts of model.optimizer.param_groups "
        f"{', '.join(settings)}; anything else is told to compile()."
    )
