# SPDX-License-Identifier: Apache-2.0
"""Numbers and strings of a module that a compiled program has baked in."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Iterable, Iterator

import torch

from ipufit.errors import ConfigError

_PLAIN = (bool, int, float, str, type(None), FunctionType)
_TORCHS = {"training", *vars(torch.nn.Module())}
"""What torch itself keeps in a module."""


class BakedIn:
    """The plain attributes of a module and its children, as a program knows them.

    `forward` runs once in Python, when it is traced: what it read of the module's
    numbers and strings is a part of the program, and a change is never seen.

    Args:
        module: The user's.
        losses: That are modules.

    Example:
        >>> module = torch.nn.Dropout(0.5)
        >>> baked_in = BakedIn(module)
        >>> module.p = 0.25
        >>> baked_in.changed()
        ('p', 0.5, 0.25)
    """

    def __init__(
        self, module: torch.nn.Module, losses: Iterable[torch.nn.Module] = ()
    ) -> None:
        self._values: dict[str, tuple[dict[str, Any], str, Any]] = {}
        for path, child in _modules(module, losses):
            attributes = vars(child)
            for name, value in own_attributes(child).items():
                if is_plain(value):
                    full = f"{path}.{name}" if path else name
                    self._values[full] = attributes, name, _copied(value)
        self._parts = _parts(module)
        self._module = module

    def changed(self) -> tuple[str, Any, Any] | None:
        """The first that has changed: name, old and new value; None if none has.

        Private ones aren't looked at: a module may count in them what it likes.
        """
        return next(self._changes(with_private=False), None)

    def _changes(self, *, with_private: bool) -> Iterator[tuple[str, Any, Any]]:
        for full, (attributes, name, value) in self._values.items():
            now = attributes.get(name)
            if now is value or (type(now) is type(value) and now == value):
                continue
            if with_private or not name.startswith("_"):
                yield full, value, now

    def is_outdated(self) -> bool:
        """Whether a value has changed, or a submodule or parameter is another."""
        if next(self._changes(with_private=True), None) is not None:
            return True
        now = _parts(self._module)
        return [n for n, _ in now] != [n for n, _ in self._parts] or any(
            one is not other for (_, one), (_, other) in zip(now, self._parts)
        )

    def absorb(self, before: BakedIn) -> None:
        """Take over what `forward` itself has changed meanwhile, such as a counter.

        Args:
            before: The module's values before another program was traced.
        """
        for full, (attributes, name, value) in before._values.items():
            now = attributes.get(name)
            if now != value and full in self._values and is_plain(now):
                self._values[full] = attributes, name, _copied(now)

    def check(self) -> None:
        """Refuse to go on with a value that the program doesn't have.

        Raises:
            ConfigError: One has changed.
        """
        changed = self.changed()
        if changed is not None:
            name, old, new = changed
            raise ConfigError(
                f"module.{name} was {old!r} when the model was compiled and is {new!r} "
                "now: the compiled program has the old value baked in. Change it "
                "between fits, make it a buffer (register_buffer), or pass it as an "
                "input."
            )


def _modules(
    module: torch.nn.Module, losses: Iterable[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from module.named_modules()
    for loss in losses:
        for path, child in loss.named_modules():
            name = type(loss).__name__
            yield f"{name}.{path}" if path else name, child


def own_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a module that are the user's own: no weights, no submodules.

    Example:
        >>> own_attributes(torch.nn.Dropout(0.5))
        {'p': 0.5, 'inplace': False}
    """
    return {n: value for n, value in vars(module).items() if n not in _TORCHS}


def is_plain(value: Any) -> bool:
    """Whether a value is looked at: a number, a string, a function, a list of such.

    Example:
        >>> is_plain([1, "a"]), is_plain({})
        (True, False)
    """
    if isinstance(value, (tuple, list)):
        return all(is_plain(element) for element in value)
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def _parts(module: torch.nn.Module) -> list[tuple[str, object]]:
    """Submodules and parameters by name; the objects themselves are compared."""
    return [*module.named_modules(), *module.named_parameters()]
