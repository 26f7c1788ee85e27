# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, and their repr.

Errors name the argument, its value and what to use.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import sys
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Callable, Collection, Mapping, NoReturn

import numpy as np

from .errors import ConfigError, suggesting

_LONGEST = 80
"""Length of the longest value that a message shows whole, in characters."""
_LARGEST = 2**63 - 1
"""The largest whole number that Python's library and torch take as a count."""
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""The largest number that a device can hold."""


def shown(value: Any) -> str:
    """Return a short description of any value, for a message.

    Example:
        >>> shown("run"), shown({"weights": "x" * 1000}), shown("x" * 1000)[:8]
        ("'run'", 'dict(...)', "'xxxxxxx")
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of a user's class, too deep, or too long
        return f"{type(value).__name__}(...)"
    if len(text) <= _LONGEST:
        return text
    if isinstance(value, (str, bytes, int, os.PathLike)):
        return f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"
    return f"{type(value).__name__}(...)"


class ArgumentRepr:
    """Base of classes whose repr has the arguments that differ from their defaults.

    The arguments are the fields of a dataclass, which needs `@dataclass(repr=False)`.
    In other classes they are those that the constructor was called with; a misspelt
    argument is refused with the name that it may mean.

    Example:
        >>> class Stop(ArgumentRepr):
        ...     def __init__(self, monitor, patience=3, **settings):
        ...         pass
        >>> Stop("loss", 3, sign=-1)
        Stop(monitor='loss', sign=-1)
    """

    _arguments = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Let a constructor keep its arguments as text."""
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            constructor = suggesting(_keeping_arguments(cls.__init__))
            cls.__init__ = constructor  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # which would take it for all attributes

        def __getattr__(self, name: str) -> Any:
            """Raise Python's error, with what to do about a skipped constructor."""
            try:  # a property that raised an AttributeError is asked again
                return object.__getattribute__(self, name)
            except AttributeError as error:
                advice = skipped_constructor(type(self))
                if not advice or advice in str(error):
                    raise
                raise AttributeError(f"{error}{advice}") from None

    def __repr__(self) -> str:
        """Return the call that makes the object, without defaults."""
        arguments = self._arguments
        if is_dataclass(self):
            # A subclass's constructor may have other arguments.
            kinds = type(self).__mro__
            kind = next(k for k in kinds if "__dataclass_fields__" in vars(k))
            signature = inspect.signature(kind)
            names = [f.name for f in fields(self) if f.repr]
            values = {n: getattr(self, n) for n in names if n in signature.parameters}
            arguments = _as_in_call(signature, values, repr)
        return f"{type(self).__name__}({arguments})"


def skipped_constructor(kind: type) -> str:
    """Return advice for a user's class whose constructor doesn't call its base's.

    Example:
        >>> class Mine(ArgumentRepr):
        ...     __module__ = "mine"
        ...     def __init__(self):
        ...         self.count = 0
        >>> skipped_constructor(Mine)
        '. Let Mine.__init__ call super().__init__() first.'
    """
    for users in kind.__mro__:
        if users.__module__.startswith("ipufit."):
            break
        name = "__post_init__" if "__dataclass_fields__" in vars(users) else "__init__"
        if name not in vars(users):
            continue
        code = getattr(inspect.unwrap(vars(users)[name]), "__code__", None)
        if code is None or "__init__" in code.co_names:
            break
        return f". Let {users.__name__}.{name} call super().__init__() first."
    return ""


def _keeping_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        constructor(self, *arguments, **keywords)
        _, *values = signature.bind(self, *arguments, **keywords).arguments.items()
        # As text, for pickles. A subclass's constructor ends last.
        self.__dict__["_arguments"] = _as_in_call(signature, dict(values), shown)

    return construct


def _as_in_call(
    signature: inspect.Signature,
    values: Mapping[str, Any],
    to_text: Callable[[Any], str],
) -> str:
    """Return the arguments that differ from their defaults, as a call has them."""
    texts: list[str] = []
    before: list[Any] = []
    for name, value in values.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            texts += [f"{key}={to_text(value[key])}" for key in value]
        elif parameter.kind is parameter.VAR_POSITIONAL:  # names can't come before it
            texts = [to_text(part) for part in (*before, *value)]
        elif to_text(value) != to_text(parameter.default):
            texts.append(f"{name}={to_text(value)}")
        before.append(value)
    return ", ".join(texts)


def refuse(name: str, value: Any, instead: str, of: str = "") -> NoReturn:
    """Raise the error for an argument.

    Args:
        name: Name of the argument.
        value: Any value.
        instead: Words for a legal value, such as "a whole number of 1 or more".
        of: Class or function that has the argument; "" if its name says enough.

    Raises:
        ConfigError: Always.
    """
    whose = f"{of} has " if of else ""
    raise ConfigError(f"{whose}{name}={shown(value)}: use {instead}.")


def is_number(
    value: Any, *, is_whole: bool = False, allows_numpy: bool = False
) -> bool:
    """Return whether a value is a number, and not a bool.

    Args:
        value: Any value.
        is_whole: If True, only whole numbers count.
        allows_numpy: If True, numbers of NumPy count, too. PopTorch and JSON take only
            Python's numbers.

    Example:
        >>> is_number(0.5), is_number(True), is_number(np.int64(3), allows_numpy=True)
        (True, False, True)
    """
    kinds: Any = int if is_whole else (int, float)
    if allows_numpy:
        kinds = numbers.Integral if is_whole else numbers.Real
    return isinstance(value, kinds) and not isinstance(value, bool)


def number_in(value: Any) -> float | None:
    """Return a value as Python's number; None if it isn't a single number.

    Args:
        value: Any value. Tensors and arrays of one number count.

    Example:
        >>> number_in(np.float32([0.5])), number_in(np.zeros(2)), number_in("warm-up")
        (0.5, None, None)
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if isinstance(value, (int, float)):
        return value
    return float(value) if isinstance(value, numbers.Real) else None


def check_number(
    name: str,
    value: Any,
    *,
    of: str = "",
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    is_whole: bool = False,
    is_finite: bool = True,
    allows_numpy: bool = False,
) -> None:
    """Refuse a value that isn't a number in a range.

    Args:
        name: Name of the argument.
        value: Any value.
        of: As for `refuse`.
        least: Smallest value allowed.
        above: Bound that the value must exceed.
        below: Bound that the value must stay below.
        most: Largest value allowed.
        is_whole: If True, the value must be a whole number of 64 bits.
        is_finite: If False, infinity and numbers beyond float32 are allowed.
        allows_numpy: As for `is_number`.

    Raises:
        ConfigError: The value isn't such a number.

    Example:
        >>> check_number("momentum", 2, of="Optimizer('sgd')", least=0, below=1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Optimizer('sgd') has momentum=2: use a number of ...
    """
    is_of_kind = is_number(value, is_whole=is_whole, allows_numpy=allows_numpy)
    if isinstance(value, np.generic):
        if not is_of_kind and is_number(value, is_whole=is_whole, allows_numpy=True):
            kind = type(value).__name__
            refuse(name, value, f"Python's number, as .item() of {kind} gives", of)
        value = value.item()
    largest: float = _LARGEST
    if not is_whole:
        largest = LARGEST_FLOAT32 if is_finite else math.inf
    is_held = is_of_kind and abs(value) <= largest  # NaN isn't
    if is_held and not is_finite:
        is_held = abs(value) == math.inf or abs(value) <= sys.float_info.max
    bounds: dict[str, tuple[Callable[[Any, Any], bool], float | None]] = {
        "of {} or more": (operator.ge, least),
        "above {}": (operator.gt, above),
        "below {}": (operator.lt, below),
        "up to {}": (operator.le, most),
    }
    limits = [
        (holds, bound, words)
        for words, (holds, bound) in bounds.items()
        if bound is not None
    ]
    if is_held and all(holds(value, bound) for holds, bound, _ in limits):
        return
    words = " and ".join(words.format(f"{bound:g}") for _, bound, words in limits)
    kind = "a whole number" if is_whole else "a number"
    end = ", of 64 bits" if is_whole else ", finite in float32"
    is_beyond = is_of_kind and not is_held
    refuse(name, value, f"{kind} {words}".rstrip() + end * is_beyond, of)


def check_integer(name: str, value: Any, *, least: int = 0, of: str = "") -> None:
    """Refuse a value that isn't a whole number of `least` or more, of 64 bits.

    Raises:
        ConfigError: `value` is something else.

    Example:
        >>> check_integer("replicas", 0, least=1)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: replicas=0: use a whole number of 1 or more.
    """
    if type(value) is not int or not least <= value <= _LARGEST:
        check_number(name, value, of=of, least=least, is_whole=True)


def check_flags(of: str = "", **flags: Any) -> None:
    """Refuse arguments that are neither True nor False, nor 1 or 0.

    Raises:
        ConfigError: A value is something else.

    Example:
        >>> check_flags("CSVLogger", append="no")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: CSVLogger has append='no': use True or False.
    """
    for name, value in flags.items():
        is_bit = is_number(value, is_whole=True) and value in (0, 1)
        if not isinstance(value, (bool, np.bool_)) and not is_bit:
            refuse(name, value, "True or False", of)


def check_choice(
    name: str, value: Any, choices: Collection[Any], *, of: str = ""
) -> None:
    """Refuse a value that isn't one of some words, whole numbers or None.

    Raises:
        ConfigError: `value` is something else.

    Example:
        >>> check_choice("mode", "mean", ("min", "max", None))
        Traceback (most recent call last):
        ipufit.errors.ConfigError: mode='mean': use one of 'min', 'max', None.
    """
    # Arrays have no truth for `in`.
    is_plain = isinstance(value, (str, int, type(None)))
    if not is_plain or value not in choices:
        refuse(name, value, f"one of {', '.join(map(repr, choices))}", of)


def check_instance(name: str, value: Any, kind: type, *, of: str = "") -> None:
    """Refuse a value that isn't an object of a class.

    Raises:
        ConfigError: `value` is something else.

    Example:
        >>> check_instance("clock", 3, str)
        Traceback (most recent call last):
        ipufit.errors.ConfigError: clock=3: use an object of the class str.
    """
    if not isinstance(value, kind):
        refuse(name, value, f"an object of the class {kind.__name__}", of)


def check_function(name: str, value: Any, *, of: str = "") -> None:
    """Refuse a value that can't be called.

    Raises:
        ConfigError: `value` is something else.

    Example:
        >>> check_function("clock", 3, of="Throughput")
        Traceback (most recent call last):
        ipufit.errors.ConfigError: Throughput has clock=3: use a function.
    """
    if not callable(value):
        refuse(name, value, "a function", of)
