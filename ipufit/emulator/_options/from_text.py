# SPDX-License-Identifier: Apache-2.0
"""Options from text: a file of setter calls, or a JSON object."""

from __future__ import annotations

import enum
import json
import os
from typing import Any

from ipufit.emulator import enums


class ConfigFileError(Exception):
    """A file given to `Options.loadFromFile` isn't valid Python.

    Example:
        >>> from ipufit.emulator import ConfigFileError
        >>> issubclass(ConfigFileError, Exception)
        True
    """


def apply_config_file(options: object, filepath: str) -> None:
    """Run every line of a file as an expression on `options`.

    Lines are stripped; blank ones and those that start with `#` are dropped.

    Args:
        options: What each line is applied to.
        filepath: The file. It is executed: use only files you trust.

    Raises:
        ConfigFileError: If a line isn't valid Python. The line's number counts
            the kept lines only, as in PopTorch.
    """
    with open(filepath, encoding="utf-8") as file:
        kept = [line.strip() for line in file]
    lines = [f"options.{line}" for line in kept if line and not line.startswith("#")]
    # The settings name enumerations as scripts do: `poptorch.OutputMode.All`.
    script = "\n".join(["import ipufit.emulator as poptorch", *lines])
    try:
        exec(script, {"options": options})
    except SyntaxError as error:
        # The first line is ours, and an error can be one line past the end.
        number = min(max((error.lineno or 2) - 1, 1), len(lines))
        raise ConfigFileError(
            f"SyntaxError at line {number} of {os.path.basename(filepath)}: "
            f"{error.msg}\n> {lines[number - 1]}"
        ) from error


def apply_json(options: object, json_string: str) -> None:
    """Call the setters that a JSON object names.

    Args:
        options: Where the setters are found.
        json_string: An object from dotted names to arguments: a list holds
            several. `"OutputMode.All"` becomes the member, though not in a list.

    Raises:
        json.JSONDecodeError: If it isn't JSON.
        AttributeError: If there is no such setter.
        TypeError: If a name is that of a value, which can't be called.
    """
    for accessor, value in json.loads(json_string).items():
        setter: Any = options
        for name in accessor.split("."):
            setter = getattr(setter, name)
        if isinstance(value, list):
            setter(*value)
        else:
            setter(_as_enum_member(value))


def _as_enum_member(value: Any) -> Any:
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    class_name, member_name = value.split(".")
    enumeration = getattr(enums, class_name, None)
    if isinstance(enumeration, enum.EnumMeta):
        return enumeration.__members__.get(member_name, value)
    return value
