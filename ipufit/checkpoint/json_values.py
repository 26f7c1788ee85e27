# SPDX-License-Identifier: Apache-2.0
"""Writes nested values as strict JSON, and reads exactly the same values back.

JSON has no NaN and no infinity, and readers differ on long integers. Those are written
as objects with one key: `{"$float": "nan"}`, `{"$int": "0x1000..."}`. A dict of the
user's with a key that starts with `$` is wrapped: `{"$dict": {...}}`.

Other JSON is refused: duplicate keys, `NaN` tokens, deep nesting, and numbers that a
float can't hold.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ipufit.errors import UnsupportedError

MAX_DEPTH = 100
"""Levels of lists and objects that a file may have."""

MAX_DIGITS = 20
"""Characters of a plain integer; longer ones are written in hexadecimal."""

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def dump_json(value: Any, *, name: str = "value", indent: int | None = None) -> bytes:
    r"""Encode nested dicts, lists, strings, numbers, bools and None.

    Args:
        value: The value. Dict keys must be strings.
        name: Name of the value in error messages.
        indent: Spaces per level, for files that people read.

    Returns:
        JSON in ASCII, with a newline at its end.

    Raises:
        UnsupportedError: A value in it is of another type, or nested too deeply.

    Example:
        >>> dump_json({"rate": float("inf"), "wait": 3})
        b'{"rate": {"$float": "inf"}, "wait": 3}\n'
    """
    text = json.dumps(_encoded(value, name, 1), allow_nan=False, indent=indent)
    return text.encode("ascii") + b"\n"


def load_json(data: bytes) -> Any:
    """Decode JSON of `dump_json`, and refuse any that it wouldn't write.

    Args:
        data: JSON in UTF-8.

    Raises:
        ValueError: The data isn't strict JSON within the limits; the text says why.

    Example:
        >>> load_json(dump_json([float("nan"), 2**200 + 1]))[1] == 2**200 + 1
        True
    """
    return _decoded(parse_json(data))


def parse_json(data: bytes) -> Any:
    """Decode strict JSON within the limits, in which `$` means nothing.

    Args:
        data: JSON in UTF-8.

    Raises:
        ValueError: The data isn't strict JSON within the limits; the text says why.

    Example:
        >>> parse_json(b'{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: the key 'a' is there twice
    """
    text = data.decode("utf-8")
    _check_depth(data)
    return json.loads(
        text,
        object_pairs_hook=_object,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        parse_int=_short,
    )


def _encoded(value: Any, where: str, depth: int) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        plain = -(2**63) <= value < 2**64
        return int(value) if plain else {"$int": hex(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if not isinstance(value, (dict, list)):
        raise UnsupportedError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which "
            "JSON has no word for: give str, int, float, bool, None, a list or a dict."
        )
    if depth >= MAX_DEPTH:
        raise UnsupportedError(
            f"{where} is nested more than {MAX_DEPTH - 1} levels deep: flatten it."
        )
    if isinstance(value, list):
        return [
            _encoded(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    return _encoded_dict(value, where, depth)


def _encoded_dict(value: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise UnsupportedError(
                f"{where} has a key that is a {type(key).__qualname__}: make it a str."
            )
    is_wrapped = any(key.startswith("$") for key in value)
    inside = depth + 1 + is_wrapped
    if inside > MAX_DEPTH:
        raise UnsupportedError(f"{where} is nested too deeply: flatten it.")
    items = {
        key: _encoded(item, f"{where}[{key!r}]", inside) for key, item in value.items()
    }
    return {"$dict": items} if is_wrapped else items


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _decoded(item) for key, item in value.items()}
    if len(value) > 1:
        raise ValueError(f"an object mixes {tags[0]!r} with other keys")
    return _untagged(tags[0], value[tags[0]])


def _untagged(tag: str, value: Any) -> Any:
    if tag == "$dict" and isinstance(value, dict):
        return {key: _decoded(item) for key, item in value.items()}
    if tag == "$float" and isinstance(value, str) and value in _NON_FINITE:
        return _NON_FINITE[value]
    if tag == "$int" and isinstance(value, str) and _HEXADECIMAL.fullmatch(value):
        return int(value, 16)  # linear, and without a limit of digits
    raise ValueError(f"{tag!r} holds {_short_repr(value)}, which it can't")


def _check_depth(data: bytes) -> None:
    """Refuse deep nesting before a recursive parser meets it.

    Strings are removed first; then each round removes the innermost brackets. The time
    is linear in the number of bytes, whatever they are.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(
            f"it is nested more than {MAX_DEPTH} levels deep, or its brackets don't "
            "match"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_short_repr(twice)} is there twice")
    return value


def _refuse_constant(token: str) -> Any:
    raise ValueError(f"{token} is no JSON")


def _finite(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"the number {_short_repr(token)} is too large")
    return value


def _short(token: str) -> int:
    if len(token) > MAX_DIGITS:
        raise ValueError(f"the number {_short_repr(token)} has too many digits")
    return int(token)


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
