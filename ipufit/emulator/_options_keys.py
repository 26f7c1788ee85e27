# SPDX-License-Identifier: Apache-2.0
"""Settings that PopTorch's backend takes, and their check.

`popart_options.tsv` has their names, the types of their values in C++, and the
enumerations of PopART that values belong to (PopTorch, `SessionOptions.cpp`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Collection, Mapping

from . import _popart
from ._logging import logger
from .errors import Error

_TABLE = Path(__file__).with_name("popart_options.tsv").read_text("utf-8")
_ROWS = [line.split("\t") for line in _TABLE.splitlines()[1:]]
TYPES: Mapping[str, str] = {name: type_name for name, type_name, _ in _ROWS}
"""Settings that the backend accepts -> the types of their values."""

ENUMERATIONS: Mapping[str, type[_popart.PopartEnum]] = {
    name: getattr(_popart, values) for name, _, values in _ROWS if values
}
"""Settings that are numbers -> the enumerations of PopART that these belong to."""

_CPP_TYPES: dict[type, str] = {
    kind: kind.__name__ for kind in (bool, float, str, dict, list)
}
_CPP_TYPES.update({int: "uint", tuple: "list", set: "list"})


def validate_popart_options(options_dict: Mapping[str, Any]) -> None:
    """Check settings as PopTorch's backend does before compiling, and log them.

    A setting is looked up among the settings of its value's type, so a value of another
    type makes a known name unknown. Empty containers are skipped: they set nothing.
    Settings are logged at level DEBUG.

    Args:
        options_dict: Settings by name, from `Options.toDict`.

    Raises:
        Error: If a setting is unknown, out of range, or of a type that the
            backend doesn't take.

    Example:
        >>> from ipufit.emulator import Options, OutputMode
        >>> options = Options().outputMode(OutputMode.All)
        >>> validate_popart_options(options.toDict())
        >>> _ = options._Popart.set("enableOutlinning", True)
        >>> validate_popart_options(options.toDict())
        Traceback (most recent call last):
        ...
        ipufit.emulator.errors.Error: 'poptorch_cpp_error': Unknown bool option ...
    """
    for key, value in options_dict.items():
        if key in ("anchored_tensors", "patterns_level") or (
            key == "compilation_progress_bar_fn" and callable(value)
        ):
            continue
        kinds = (kind for kind in type(value).__mro__ if kind in _CPP_TYPES)
        type_name = _CPP_TYPES.get(next(kinds, object))
        if type_name == "dict":
            if key == "available_memory_proportion":
                _check_proportions(value)
            else:
                _check_elements(key, value.values())
                _check_known("dict", key, value)
            if key == "patterns" and "patterns_level" not in options_dict:
                raise _backend_error(
                    "Option patterns needs patterns_level: use `_Popart.setPatterns`."
                )
            for name, item in value.items():
                logger.debug(
                    "poptorch.Options set %s[%s] to %s", key, name, _text(item)
                )
        elif type_name == "list":
            _check_elements(key, value)
            _check_known("list", key, value)
            for item in value:
                _check_range(key, item)
                logger.debug("poptorch.Options added %s to %s", _text(item), key)
        elif type_name is None:
            raise _backend_error(
                f"Unknown value type {type(value).__name__} for option {key}: use "
                "a bool, int, float, str, or a list or dict of them."
            )
        else:
            _check_known(type_name, key, [value])
            _check_range(key, value)
            if type_name == "uint" and not 0 <= value < 2**64:
                raise _backend_error(
                    f"Option {key} is {value}, and must be an integer of 64 bits "
                    "without a sign."
                )
            logger.debug("poptorch.Options set %s to value %s", key, _text(value))


def _backend_error(message: str) -> Error:
    return Error(message, type="poptorch_cpp_error")


def _text(value: Any) -> str:
    """Format a value as C++ does: `true`, and enumerations as numbers."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def _check_known(type_name: str, key: str, values: Collection[Any]) -> None:
    """Refuse an unknown setting, unless it sets nothing."""
    if TYPES.get(key) == type_name or not values:
        return
    hint = f"It takes a {TYPES[key]}." if key in TYPES else "Check its spelling."
    raise _backend_error(f"Unknown {type_name} option {key}. {hint}")


def _check_range(key: str, value: Any) -> None:
    enumeration = ENUMERATIONS.get(key)
    if enumeration is None:
        return
    names = {str(int(member)): member.name for member in enumeration}
    if _text(value) not in names:
        known = ", ".join(f"{number} ({name})" for number, name in names.items())
        raise _backend_error(
            f"Value for {enumeration.__name__} out of range: option {key} = "
            f"{_text(value)}, and PopART knows {known}."
        )


def _check_elements(key: str, values: Any) -> None:
    for value in values:
        if not isinstance(value, (str, int)):
            raise _backend_error(
                f"Unknown value type {type(value).__name__} inside option {key}: "
                "use str or int."
            )


def _check_proportions(proportions: Mapping[int, Any]) -> None:
    for ipu, proportion in proportions.items():
        if not isinstance(proportion, (int, float)):
            raise _backend_error(
                f"Unknown value type {type(proportion).__name__} for the memory "
                f"proportion of IPU{ipu}: use a float."
            )
