# SPDX-License-Identifier: Apache-2.0
"""Storage of options: values that keep their type, can be frozen, and be copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from ipufit.emulator._ground.checks import require

_FreezableT = TypeVar("_FreezableT", bound="Freezable")
_OptionsT = TypeVar("_OptionsT", bound="OptionsDict")


class Freezable:
    """An object that can refuse changes; its copies are never frozen."""

    _is_frozen: bool

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise if these options belong to a model or a data loader.

        Args:
            option: Name of the option to change. It is ignored.

        Raises:
            AttributeError: If they are frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().checkIsFrozen()
        """
        if self._is_frozen:
            raise AttributeError(
                "Can't modify frozen Options: a data loader or a model uses them. "
                "Change a copy instead: `options.clone()`."
            )

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        self.__dict__["_is_frozen"] = frozen
        for part in self.__dict__.values():
            if isinstance(part, Freezable):
                part._set_frozen(frozen)

    def __deepcopy__(self: _FreezableT, memo: dict[int, Any]) -> _FreezableT:
        duplicate = self.__class__.__new__(self.__class__)
        for name, value in self.__dict__.items():
            duplicate.__dict__[name] = copy.deepcopy(value, memo)
        duplicate.__dict__["_is_frozen"] = False
        return duplicate


class OptionsDict(Freezable):
    """Public values by name, and private attributes.

    A subclass assigns both in its `__init__`, then calls `super().__init__()`. From
    then on an assignment adds no name, and a public value keeps its type.

    Args:
        **values: Further public values.

    Example:
        >>> from ipufit.emulator import Options
        >>> options = Options()
        >>> options.replication_factor = 4
        >>> options("replication_factor")
        4
    """

    _values: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        assigned = self.__dict__
        public = [name for name in assigned if name[0] != "_"]
        assigned["_values"] = {name: assigned.pop(name) for name in public}
        assigned["_values"].update(values)
        assigned["_is_frozen"] = False

    def set(self, **kwargs: Any) -> None:
        """Change existing options, one after the other.

        Args:
            kwargs: New values by name. Each must be an instance of the type of
                the value it replaces; ranges aren't checked.

        Raises:
            AttributeError: If the options are frozen.
            AssertionError: If an option doesn't exist or the type differs.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.set(device_iterations=8)
            >>> options.device_iterations
            8
        """
        self.checkIsFrozen()
        for name, value in kwargs.items():
            require(
                name in self._values,
                f"Invalid option {name}. Options here: {', '.join(self._values)}.",
            )
            expected = type(self._values[name])
            require(
                isinstance(value, expected),
                f"Unexpected type {type(value).__name__} for option {name}: "
                f"use {expected.__name__}.",
            )
            self._values[name] = value

    def createOrSet(self, **kwargs: Any) -> None:
        """Set options, creating those that don't exist with any type.

        Args:
            kwargs: New values by name. The first value of an option decides the
                type of all later ones.

        Raises:
            AttributeError: If the options are frozen.
            AssertionError: If an option exists and the type differs.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options()
            >>> options.createOrSet(model_name="net")
            >>> options.model_name
            'net'
        """
        self.checkIsFrozen()
        for name, value in kwargs.items():
            self._values.setdefault(name, value)
            self.set(**{name: value})

    def _store(self: _OptionsT, **values: Any) -> _OptionsT:
        """Set or create options, and return `self`: the end of most setters."""
        self.createOrSet(**values)
        return self

    def exists(self, option: str) -> bool:
        """Tell whether a public option of this name has a value.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().exists("random_seed")
            False
        """
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the public option of this name; as in PopTorch, also if frozen.

        Example:
            >>> from ipufit.emulator import Options
            >>> options = Options().modelName("net")
            >>> options.deleteIfExists("model_name")
            >>> options.exists("model_name")
            False
        """
        self._values.pop(option, None)

    def toDict(self) -> dict[str, Any]:
        """Copy the public options to a dict of values by name.

        Example:
            >>> from ipufit.emulator import Options
            >>> Options().Distributed.toDict()["num_distributed_processes"]
            1
        """
        return self.update({})

    def update(self, other: dict[str, Any]) -> dict[str, Any]:
        """Add the public options to a dict of values by name, and return it.

        Raises:
            AssertionError: If a name is there already.

        Example:
            >>> from ipufit.emulator import TensorLocationSettings
            >>> TensorLocationSettings().useIOTilesToLoad().update({"onChip": 1})
            {'onChip': 1, 'useIOTilesToLoad': 1}
        """
        for name, value in self._values.items():
            require(
                name not in other,
                f"Option {name} is set in two places. Remove it from `_Popart`.",
            )
            other[name] = value
        return other

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    # Hidden from type checkers: with these in sight every misspelt option would
    # type check.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            values = self.__dict__.get("_values", {})  # absent while unpickling
            if name in values:
                return values[name]
            raise AttributeError(f"Invalid attribute {name}.")

        def __setattr__(self, name: str, value: Any) -> None:
            if "_is_frozen" not in self.__dict__:  # a subclass's `__init__`
                self.__dict__[name] = value
            elif name == "__class__":  # popdist swaps the class of `Distributed`
                object.__setattr__(self, name, value)
            elif not name.startswith("_"):
                self.set(**{name: value})
            elif name in self.__dict__:
                self.checkIsFrozen()
                self.__dict__[name] = value
            else:
                raise AttributeError(f"Invalid private attribute {name}.")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._shown().items())
        return f"{type(self).__name__}({shown})"

    def _shown(self) -> dict[str, Any]:
        """Names and values for `repr`."""
        hidden = ("_values", "_is_frozen")
        private = {k: v for k, v in self.__dict__.items() if k not in hidden}
        return {**self._values, **private}
