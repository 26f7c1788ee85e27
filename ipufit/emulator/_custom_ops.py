# SPDX-License-Identifier: Apache-2.0
"""`custom_op`: operations that users write in C++ for PopART."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from ._trace_state import current_trace
from .errors import createPoptorchError

ATTR_PREFIX = "attr:"
"""Before the address of an attribute dict, where PopTorch hands one on."""

attributes_lists: list[dict[str, Any]] = []
"""The attributes of all calls of `custom_op`, kept for good."""

_ATTRIBUTE_TYPES = (float, int, str)
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[Tensor]:
    """Run an operation that is written in C++ for PopART.

    On the host it gives zeros, as PopTorch does. There is no PopART here, so a model
    that is compiled with it is refused.

    Args:
        inputs: What the operation takes.
        name: Of the operation.
        domain: Of the operation.
        domain_version: Of the operation.
        example_outputs: Tensors of the shapes and types that it returns.
        attributes: Names to floats, ints, strings, or lists or tuples of one of
            these.

    Returns:
        Zeros like `example_outputs`.

    Raises:
        ValueError: An attribute is none of these, or isn't ASCII.
        Error: In a trace: an attribute doesn't fit into 32 bits, or else because the
            operation can't be emulated.

    Example:
        >>> x = torch.tensor([1.0])
        >>> custom_op([x], "Cube", "ops.example", 1, example_outputs=[x])
        [tensor([0.])]
    """
    attributes = attributes or {}
    _check_attributes(attributes)
    attributes_lists.append(attributes)
    if current_trace() is None:
        return [torch.zeros_like(example) for example in example_outputs]
    for value in attributes.values():
        for element in _elements(value):
            _check_range(element)
    raise createPoptorchError(
        f"The custom operation {domain}::{name} (version {domain_version}) is C++ code "
        "of PopART, which can't be emulated. Compose it of torch functions, or run "
        "this model on real IPUs."
    )


def attributes_at(address: str) -> dict[str, Any] | None:
    """The attributes that `torch.ops.poptorch.custom_operation` is told.

    Args:
        address: `ATTR_PREFIX` and the hexadecimal address of one of
            `attributes_lists`, or of `None`.

    Returns:
        That dict; None if it is none of these.

    Example:
        >>> attributes_at(f"{ATTR_PREFIX}{hex(id(None))}") is None
        True
    """
    for attributes in attributes_lists:
        if address == f"{ATTR_PREFIX}{hex(id(attributes))}":
            return attributes
    return None


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_attributes(attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings. Got {key!r}.")
        _check_ascii(key)
        elements = _elements(value)
        if not all(isinstance(element, _ATTRIBUTE_TYPES) for element in elements):
            raise ValueError(
                "Attribute values must be floats, ints, strings or a list/tuple of "
                f"float, ints of strings. {key!r} is {value!r}."
            )
        if not all(isinstance(element, type(elements[0])) for element in elements):
            raise ValueError(
                "The types in a list/tuple attribute must all be the same. "
                f"{key!r} is {value!r}."
            )
        for element in elements:
            if isinstance(element, str):
                _check_ascii(element)


def _check_ascii(text: str) -> None:
    if not text.isascii():
        raise ValueError(f"{text} contains non-ASCII characters.")


def _check_range(value: Any) -> None:
    if isinstance(value, float) and abs(value) > _LARGEST_FLOAT:
        side = "high" if value > 0 else "low"
        raise createPoptorchError(
            f"{value:g} is too {side} for a Popart float attribute."
        )
