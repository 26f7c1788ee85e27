# SPDX-License-Identifier: Apache-2.0
"""Setters of options called from text: a file of calls, or a JSON object."""

from __future__ import annotations

import enum
import json
import os
from operator import attrgetter
from typing import Any

from ipufit.emulator import enums


class ConfigFileError(Exception):
    """Raised if a file given to `Options.loadFromFile` isn't valid Python.

    Example:
        >>> from ipufit.emulator import ConfigFileError
        >>> issubclass(ConfigFileError, Exception)
        True
    """


def apply_config_file(options: object, filepath: str) -> None:
    """Implement `Options.loadFromFile`.

    Raises:
        ConfigFileError: If a line isn't valid Python. Blank lines and comments aren't
            counted in its line number, as in PopTorch.
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
    """Implement `Options.from_json`."""
    for accessor, value in json.loads(json_string).items():
        setter = attrgetter(accessor)(options)
        setter(*value if isinstance(value, list) else [_as_enum_member(value)])


def _as_enum_member(value: Any) -> Any:
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    class_name, member_name = value.split(".")
    enumeration = getattr(enums, class_name, None)
    if isinstance(enumeration, enum.EnumMeta):
        return enumeration.__members__.get(member_name, value)
    return value
