# SPDX-License-Identifier: Apache-2.0
"""`accessAttributes`: the attributes of a custom operation, as C++ asks for them."""

from __future__ import annotations

import json
from typing import Any

from ipufit.emulator._ops.custom_ops import ATTR_PREFIX, attributes_at


def accessAttributes(attribute_id_str: str) -> dict[str, Any]:
    """Look up the attributes of a custom operation.

    Args:
        attribute_id_str: JSON, or `attr:` and the address of a dictionary that
            `custom_op` has kept, in hexadecimal.

    Raises:
        ValueError: `attribute_id_str` is neither.

    Example:
        >>> accessAttributes('{"alpha": 2}')
        {'alpha': 2}
    """
    if not isinstance(attribute_id_str, str):
        raise ValueError("Wrong type for attribute_id_str: it must be a string.")
    if attribute_id_str.startswith("{"):
        attributes: dict[str, Any] = json.loads(attribute_id_str)
        return attributes
    if not attribute_id_str.startswith(ATTR_PREFIX):
        raise ValueError(
            f"Invalid attribute_id_str: {attribute_id_str!r} begins neither with '{{' "
            f"nor with {ATTR_PREFIX!r}."
        )
    address = int(attribute_id_str[len(ATTR_PREFIX) :], 16)
    kept = attributes_at(f"{ATTR_PREFIX}{address:#x}")
    if kept is None:
        raise ValueError(
            f"Invalid attribute_id_str: no custom_op has attributes at {address:#x}."
        )
    return kept
