# SPDX-License-Identifier: Apache-2.0
"""Several outputs by name, and the loss that a model returns itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ipufit.errors import ConfigError, DataError


def named_outputs(outputs: Any) -> dict[str, Any] | None:
    """Several outputs by name; None if there is only one.

    A dict has its keys, a tuple or list `output_1`, `output_2` and so on.

    Example:
        >>> named_outputs((1, 2)), named_outputs({"a": 1}), named_outputs(3)
        ({'output_1': 1, 'output_2': 2}, None, None)
    """
    if isinstance(outputs, dict):
        several = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        several = {f"output_{i}": value for i, value in enumerate(outputs, 1)}
    else:
        return None
    return several if len(several) > 1 else None


def only(values: Any) -> Any:
    """What is in a container of one; anything else as it is.

    Example:
        >>> only({"a": 1}), only([1, 2])
        (1, [1, 2])
    """
    if isinstance(values, dict) and len(values) == 1:
        return next(iter(values.values()))
    if isinstance(values, (tuple, list)) and len(values) == 1:
        return values[0]
    return values


def part_of(values: Any, name: str, position: int, count: int, what: str) -> Any:
    """The part of targets or weights that belongs to one of several outputs.

    Args:
        values: A dict by name, a sequence by position, or one for an only output.
        name: Of the output.
        position: Of the output.
        count: How many outputs there are.
        what: What messages call the values.

    Raises:
        DataError: There is none for it.

    Example:
        >>> part_of({"a": 1}, "a", 0, 2, "targets"), part_of([1, 2], "b", 1, 2, "")
        (1, 2)
    """
    if isinstance(values, dict):
        if name not in values:
            raise DataError(
                f"The {what} have no {name!r}, which the model returns and which has "
                f"a loss or metric. They have: {', '.join(map(str, values))}."
            )
        return values[name]
    if isinstance(values, (tuple, list)):
        if len(values) != count:
            raise DataError(
                f"There are {len(values)} {what} for {count} outputs: give one for "
                "each, or a dict by the outputs' names."
            )
        return values[position]
    raise DataError(
        f"The model returns {count} outputs, and the {what} are one tensor: give "
        "one for each output, in a list or in a dict by name."
    )


def split_own_loss(outputs: Any) -> tuple[Tensor | None, Any]:
    """The loss that a model returns itself, and the other outputs.

    It is the element `"loss"` of a dict, as transformers return it; the first of a
    tuple if it is a scalar; or all there is, if that is one.

    Example:
        >>> import torch
        >>> split_own_loss({"loss": torch.tensor(2.0), "logits": 1})
        (tensor(2.), {'logits': 1})
        >>> split_own_loss([5])
        (None, [5])
    """
    if isinstance(outputs, dict):
        loss = outputs.get("loss", outputs)
        if loss is not None and not isinstance(loss, Tensor):
            return None, outputs
        rest = {key: value for key, value in outputs.items() if key != "loss"}
        return None if loss is None else checked_scalar(loss), rest
    if isinstance(outputs, Tensor):
        is_loss = outputs.dim() == 0
        return (checked_scalar(outputs), ()) if is_loss else (None, outputs)
    if isinstance(outputs, (tuple, list)) and outputs:
        first = outputs[0]
        if isinstance(first, Tensor) and first.dim() == 0:
            return checked_scalar(first), only(tuple(outputs[1:]))
    return None, outputs


def checked_scalar(loss: Tensor) -> Tensor:
    """A loss of one element, 0-d: PopTorch gives one inside another the shape [1].

    Raises:
        ConfigError: It has several.
    """
    if loss.numel() != 1:
        raise ConfigError(
            f"The module's own loss has shape {tuple(loss.shape)}: it must be a "
            "scalar, the mean over the samples of a micro-batch."
        )
    scalar: Tensor = loss.reshape(())
    return scalar
