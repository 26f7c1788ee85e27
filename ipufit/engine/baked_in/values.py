# SPDX-License-Identifier: Apache-2.0
"""Values that a program has baked in, because its code computed with them."""

from __future__ import annotations

import contextlib
import inspect
import random
import warnings
from typing import Any, Iterable, Iterator, Mapping

import numpy as np
import torch

from ipufit.engine.objective.objective import Objective
from ipufit.engine.objective.steps import StepFunction
from ipufit.errors import BakedInWarning, ConfigError
from ipufit.metrics import StreamedMetric

from .reachable import ReachableValues

Roots = Mapping[str, Any]
"""Modules and functions that are traced, by their names in messages."""


def roots_of(
    module: torch.nn.Module,
    objective: Objective | None = None,
    step: StepFunction | None = None,
) -> Roots:
    """Collect the modules and functions that a program traces.

    Args:
        objective: Losses and metrics of a training program. Streamed metrics aren't
            traced.
        step: Function that an inference program calls in the module's place.

    Example:
        >>> list(roots_of(torch.nn.Linear(2, 1)))
        ['module']
    """
    roots: dict[str, Any] = {"module": module}
    if objective is not None and objective.steps is not None:
        step = objective.steps.training
    if step is not None:
        roots.update(_roots_of_step(step))
    if objective is not None:
        for _, loss in objective.losses:
            roots[_name(loss.function)] = loss.function
        for measure in objective.measures:
            if not isinstance(measure.metric, StreamedMetric):
                roots[f"metric {measure.name}"] = measure.metric
    return roots


def _roots_of_step(step: StepFunction) -> Roots:
    """A function; or of a method its code, and the model with the attributes."""
    method = getattr(step, "method", step)
    if not inspect.ismethod(method):
        return {_name(step): step}
    return {"model": method.__self__, f"model.{method.__name__}": method.__func__}


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class BakedInValues:
    """All values that the code of a program could reach when it was traced.

    `forward`, losses and metrics run once in Python. What they read of numbers,
    strings, containers and functions is a part of the program, which never sees a
    change of them. `code_walk.py` says where they are looked for.

    Args:
        roots: Modules and functions that were traced.

    Example:
        >>> module = torch.nn.Dropout(0.5)
        >>> values = BakedInValues({"module": module})
        >>> module.p = 0.25
        >>> values.check()
        Traceback (most recent call last):
        ipufit.errors.ConfigError: module.p was 0.5 when the model was compiled ...
    """

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._values = ReachableValues(roots)

    @property
    def is_complete(self) -> bool:
        """Whether every value was recorded; else `compile()` has to build anew."""
        return self._values.is_complete

    def changed(self, *, thoroughly: bool = True) -> tuple[str, Any, Any] | None:
        """The first value that has changed: path, old and new; None if none has.

        Args:
            thoroughly: Compare the contents of large constants too.
        """
        if self._values.are_unmoved(thoroughly=thoroughly):
            return None
        now = ReachableValues(self._roots)
        change = self._values.difference(now)
        if change is None:  # new objects have the same values
            self._values = now
        return change

    def check(self) -> None:
        """Refuse to go on with other values than the program has baked in.

        Raises:
            ConfigError: A value has changed; the message has its path.
        """
        if self._values.are_unmoved():
            return
        change = self.changed()
        if change is not None:
            path, old, new = change
            now = f"another {repr(new)[2:]}" if repr(old) == repr(new) else repr(new)
            raise ConfigError(
                f"{path} was {old!r} when the model was compiled and is {now} "
                "now: the compiled program has the old value baked in. Change it "
                "between fits, pass it as an input, or make it a 0-d buffer "
                "(register_buffer), which may change at any time."
            )

    def retake(self) -> None:
        """Record the values as they are now."""
        self._values = ReachableValues(self._roots)


@contextlib.contextmanager
def changes_accepted(others: Iterable[BakedInValues]) -> Iterator[None]:
    """Have what a trace changes, such as a counter, be no change for other programs.

    Args:
        others: Baked-in values of the programs that aren't traced.
    """
    current = [one for one in others if one.changed() is None]
    try:
        yield
    finally:
        for one in current:
            one.retake()


@contextlib.contextmanager
def changed_numbers_warned(roots: Roots) -> Iterator[None]:
    """Warn of numbers that `forward` both reads and changes while it is traced.

    Args:
        roots: Modules and functions that are traced.

    Warns:
        BakedInWarning: Such a number has changed.
    """
    before = ReachableValues(roots)
    yield
    for path, old, new in before.differences(ReachableValues(roots)):
        if {type(old), type(new)} <= {int, float}:
            warnings.warn(
                f"forward changes {path} (from {old} to {new}) and reads it. It runs "
                "once, when the program is compiled: the value of that time is baked "
                "in, and every batch is computed with it. Make it a 0-d buffer that a "
                "callback changes, or pass it as an input.",
                BakedInWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def random_draws_warned() -> Iterator[None]:
    """Warn of random numbers that code draws in Python while it is traced.

    Warns:
        BakedInWarning: It draws from Python's or NumPy's global generator.
    """
    before = _generators()
    yield
    drawn = [name for name, state in _generators().items() if state != before[name]]
    if drawn:
        warnings.warn(
            f"forward draws random numbers from {' and '.join(drawn)}. It runs once, "
            "when the program is compiled: the numbers of that time are baked in, and "
            "every batch is computed with them. Draw with torch, as in torch.rand(1, "
            "device=x.device), which a device does for each micro-batch, or pass the "
            "numbers as an input.",
            BakedInWarning,
            stacklevel=2,
        )


def _generators() -> dict[str, Any]:
    numpys: Any = np.random.get_state()
    return {
        "Python's random": random.getstate(),
        "numpy.random": (numpys[1].tobytes(), *numpys[2:]),
    }
